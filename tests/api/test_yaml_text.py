"""Numbers of YAML that are text, or times, to their reader."""

import pytest

from areal.api.config import GRPOConfig, load_config, save_config
from areal.api.errors import ConfigError
from tests.expect import raises_code

MINIMAL = """
allocation_mode: native:d1+fsdp:d1
train_dataset: {path: rows.jsonl, batch_size: 8}
actor: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""
NAMES = "experiment_name: e\ntrial_name: t\n"


@pytest.fixture
def load(tmp_path):
    def load_text(text: str, *overrides: str) -> GRPOConfig:
        (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
        return load_config(["--config", str(tmp_path / "x.yaml"), *overrides], GRPOConfig)

    return load_text


@pytest.mark.parametrize("text", ["007", "1.50", "2024_01_02", "1e3", "0x1F", "12:30", "-1", ".5", "2024-01-02"])
def test_a_text_field_keeps_a_number_as_it_is_written(load, text):
    config = load(f"experiment_name: {text}  # name\ntrial_name: '{text}'{MINIMAL}")
    assert (config.experiment_name, config.trial_name) == (text, text)


def test_a_time_limit_is_no_number_in_base_60(load):
    slurm = "launcher: {slurm: {time_limit: 12:30:00}}\n"
    assert load(NAMES + MINIMAL + slurm).launcher.slurm.time_limit == "12:30:00"
    spec = "  scheduling_spec: [{time_limit: 1:00:00, begin: 2027-01-01 10:00}]\n"
    result = load(f"{NAMES}{MINIMAL}rollout:\n{spec}").launcher.slurm
    assert (result.time_limit, result.sbatch_additional_args) == ("1:00:00", "'--begin=2027-01-01 10:00'")


def test_numbers_elsewhere_stay_numbers(load):
    more = "gconfig: {stop: [007, &a 1.50, *a, b], top_p: .5}\nseed: 1_000\nworkflow_args: {a: 1.50, b: [1e3]}\n"
    config = load(NAMES + MINIMAL + more)
    assert config.gconfig.stop == ["007", "1.50", "1.50", "b"]
    assert (config.gconfig.top_p, config.seed) == (0.5, 1000)
    assert config.workflow_args == {"a": 1.5, "b": [1000.0]}


def test_each_alias_of_a_number_is_read_as_its_own_field(load):
    config = load(f"experiment_name: &e 1.50\nseed: &s 007\ntrial_name: *s\nworkflow_args: {{a: *e, b: *s}}{MINIMAL}")
    assert (config.experiment_name, config.seed, config.trial_name) == ("1.50", 7, "007")
    assert config.workflow_args == {"a": 1.5, "b": 7}


def test_a_shared_section_is_read_in_each_place(load):
    shared = "workflow_args: &w {time_limit: 2}\nlauncher: {slurm: {<<: *w}}\n"
    config = load(NAMES + MINIMAL + shared.replace("2", "12:30:00"))
    assert config.workflow_args["time_limit"] == config.launcher.slurm.time_limit == "12:30:00"
    assert load(NAMES + MINIMAL + shared.replace("2", "007")).launcher.slurm.time_limit == "007"


def test_a_section_that_contains_itself_is_refused(load):
    with raises_code("config.unreadable_file"):
        load(f"{NAMES}{MINIMAL}workflow_args: &w {{a: 1, b: *w}}\n")


def test_an_apostrophe_in_text_is_kept(load, tmp_path):
    config = load(f"{NAMES}{MINIMAL}cluster: {{fileroot: ./o'brien}}\nworkflow_args: {{hint: 3:it's}}\n")
    assert (config.cluster.fileroot, config.workflow_args) == ("./o'brien", {"hint": "3:it's"})
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(["--config", str(tmp_path / "saved.yaml")], GRPOConfig) == config


def test_an_override_reads_numbers_as_a_file_does(load):
    lines = {
        "gconfig.stop": "[007, 1.50]",
        "workflow_args.limit": "1:30",
        "workflow_args.more": "{a: 1:30, b: [1e3, 1.50]}",
        "launcher.slurm": "{time_limit: 12:30:00}",
    }
    by_override = load(NAMES + MINIMAL, *(f"{key}={value}" for key, value in lines.items()))
    by_file = load(
        f"{NAMES}{MINIMAL}gconfig: {{stop: [007, 1.50]}}\nlauncher: {{slurm: {{time_limit: 12:30:00}}}}\n"
        "workflow_args: {limit: 1:30, more: {a: 1:30, b: [1e3, 1.50]}}\n"
    )
    assert by_override == by_file
    assert by_override.gconfig.stop == ["007", "1.50"]


def test_lines_of_errors_are_those_of_the_file(load):
    with pytest.raises(ConfigError, match="line 2"):
        load("experiment_name: 007\n  trial_name: 1:30: 4\n" + MINIMAL)
