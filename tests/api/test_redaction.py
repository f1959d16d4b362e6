"""Secrets are in no file and no output of areal, and the file of a run still loads."""

import dataclasses
import stat

import pytest

from areal.api.config import GRPOConfig, load_config, save_config
from areal.api.config.experiment import KINDS, BaseExperimentConfig
from areal.api.config.launcher import SlurmConfig
from areal.api.config.load import load_experiment, script_keys
from areal.api.config.observe import StatsLoggerConfig
from areal.api.config.redaction import (
    HIDDEN,
    has_secret,
    is_secret,
    public,
    public_command,
    public_environment,
    public_text,
)
from areal.api.config.schema import leaf_paths
from areal.api.errors import ConfigError
from areal.fleet.server_backend import flag_problems
from areal.fleet.sglang import SGLANG
from areal.fleet.vllm import VLLM
from areal.launcher.job import parse_env_vars

SECRET = "s3cr3t-value"
BASE = """
experiment_name: e
trial_name: t
allocation_mode: native:d1+fsdp:d1
actor: {path: org/model, optimizer: {lr: 1e-5}}
train_dataset: {path: x.jsonl, batch_size: 4}
"""


def test_only_the_keys_of_trackers_are_secret_options():
    names = {path for kind in KINDS for path, _ in leaf_paths(kind)}
    secret = [name for name in names if is_secret(name.rpartition(".")[2])]
    assert sorted(secret) == ["stats_logger.swanlab.api_key", "stats_logger.wandb.wandb_api_key"]


def tracker_keys() -> list[str]:
    """Every option of the trackers that takes a key."""
    result = []
    for tracker in dataclasses.fields(StatsLoggerConfig):
        section = getattr(StatsLoggerConfig(), tracker.name)
        names = [field.name for field in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else []
        result += [f"stats_logger.{tracker.name}.{name}" for name in names if is_secret(name)]
    return result


def test_the_trackers_have_the_keys_that_this_page_knows():
    assert tracker_keys() == ["stats_logger.wandb.wandb_api_key", "stats_logger.swanlab.api_key"]


@pytest.mark.parametrize(
    "override",
    [
        *(f"{path}={SECRET}" for path in tracker_keys()),
        f"stats_logger.wandb.wandb_base_url=https://me:{SECRET}@wandb.example",
        f"vllm.hf-token={SECRET}",
        f"launcher.trainer_env_vars=A=1,HF_TOKEN={SECRET}",
        f"judge_api_key={SECRET}",  # of a script
    ],
)
def test_a_written_configuration_has_no_secret_and_loads_back(tmp_path, monkeypatch, override):
    source = tmp_path / "grpo.yaml"
    source.write_text(BASE)
    argv = ["--config", str(source), override]
    extra = script_keys(argv)
    config = load_experiment(argv, allow_unknown_top_level=True)
    path = tmp_path / "run" / "config.yaml"
    variables = save_config(config, path, extra=extra)
    assert SECRET not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET not in str(public(dataclasses.asdict(config) | extra))

    without = load_experiment(["--config", str(path)], allow_unknown_top_level=True)  # a replay, another user
    assert isinstance(without, GRPOConfig)
    assert SECRET not in str(without)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    again = load_experiment(["--config", str(path)], allow_unknown_top_level=True)
    if "env_vars" in override:
        assert again.launcher.trainer_env_vars == "A=1"
    else:
        assert again == config
        assert script_keys(["--config", str(path)]) == extra


def test_ordinary_values_are_written_as_they_are(tmp_path):
    source = tmp_path / "grpo.yaml"
    source.write_text(BASE)
    config: BaseExperimentConfig = load_config(["--config", str(source)], GRPOConfig)
    assert save_config(config, tmp_path / "saved.yaml") == {}
    assert public(dataclasses.asdict(config)) == dataclasses.asdict(config)


@pytest.mark.parametrize("name", ["max_tokens", "source_key", "monkey", "stop_token_ids", "tokenizer", "key_of"])
def test_names_that_are_no_secrets(name):
    assert not is_secret(name, "value")


@pytest.mark.parametrize("name", ["api_key", "apikey", "--hf-token", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "password"])
def test_names_of_secrets(name):
    assert is_secret(name, "value")
    assert not is_secret(name, "")


def test_commands_and_environments_are_shown_without_secrets():
    words = ["serve", "--hf-token=x", "--api-key", "a", "b", "--port=1", "--url=http://u:p@h", "http://u:p@h"]
    hidden = ["serve", f"--hf-token={HIDDEN}", "--api-key", HIDDEN, HIDDEN, "--port=1", f"--url={HIDDEN}", HIDDEN]
    assert public_command(words) == hidden
    assert public_environment({"A_KEY": "x", "B": "y"}) == {"A_KEY": HIDDEN, "B": "y"}


@pytest.mark.parametrize("key", ["stats_logger.wandb.wandb_api_key", "stats_logger.swanlab.api_key"])
def test_errors_do_not_quote_a_secret(tmp_path, key):
    source = tmp_path / "grpo.yaml"
    *sections, name = key.split(".")
    opening = "".join(f"{section}: {{" for section in sections)
    source.write_text(f"{BASE}{opening}{name}: [{SECRET}]{'}' * len(sections)}\n")
    with pytest.raises(ConfigError) as error:
        load_config(["--config", str(source)], GRPOConfig)
    assert [(problem.path, problem.code) for problem in error.value.problems] == [(key, "config.wrong_type")]
    assert SECRET not in str(error.value)


def test_a_refused_flag_of_a_server_is_not_quoted():
    problems = dict(flag_problems("sglang", SGLANG.flags, {"api_key": SECRET, "port": 1}))
    assert set(problems) == {"sglang.api_key", "sglang.port"}
    assert SECRET not in str(problems)


KEY = "stats_logger.wandb.wandb_api_key"


@pytest.mark.parametrize(
    "words",
    [
        [f"{KEY}='{SECRET}"],
        [f"{KEY}=${{{SECRET}"],
        [f"{KEY}={SECRET}", f"{KEY}.name=1"],
        [f"{KEY}={SECRET}", f"~{KEY}=other"],
        [f"{KEY}:{SECRET}"],
        [f"--{KEY}={SECRET}"],
        [f"stats_logger.wandb=[{{wandb_api_key: {SECRET}}}]"],
        [f"stats_logger.wandb.tags=https://me:{SECRET}@wandb.example"],
        [f"stats_logger.wandb.tags={{api_key: {SECRET}}}"],
    ],
)
def test_errors_do_not_quote_a_secret_of_the_command_line(tmp_path, words):
    source = tmp_path / "grpo.yaml"
    source.write_text(BASE)
    with pytest.raises(ConfigError) as error:
        load_config(["--config", str(source), *words], GRPOConfig)
    assert SECRET not in str(error.value)
    assert SECRET not in str(error.value.problems)


@pytest.mark.parametrize("value", [f"'{SECRET}", f"{SECRET}: x: y", f"[{SECRET}", f"{{{SECRET}"])
def test_errors_do_not_quote_a_line_of_a_file_with_a_secret(tmp_path, value):
    source = tmp_path / "grpo.yaml"
    source.write_text(f"{BASE}stats_logger:\n  wandb:\n    wandb_api_key: {value}\n    mode: disabled\n")
    with pytest.raises(ConfigError) as error:
        load_config(["--config", str(source)], GRPOConfig)
    assert error.value.code == "config.unreadable_file"
    assert SECRET not in str(error.value)


def test_overrides_in_a_command_are_shown_without_secrets():
    assert public_command(["-m", "areal", f"{KEY}={SECRET}", "seed=1"]) == ["-m", "areal", f"{KEY}={HIDDEN}", "seed=1"]


def test_text_of_others_is_shown_without_secrets():
    for text in (f"api_key={SECRET}", f"api_key: {SECRET}", f'{{"api_key": "{SECRET}"}}', f"http://me:{SECRET}@host/x"):
        assert SECRET not in public_text(text)
        assert has_secret(text)
    for text in ("steps: 3", "http://host:80/x", "source_key=data_source"):
        assert public_text(text) == text
        assert not has_secret(text)
    assert not has_secret("export HF_TOKEN=$(cat ~/.token)")


@pytest.mark.parametrize("rules", [SGLANG, VLLM], ids=lambda rules: rules.name)
def test_a_flag_of_a_server_with_a_secret_is_refused(rules):
    """Every user of the machine can read a command line."""
    problems = dict(flag_problems(rules.name, rules.flags, {"hf-token": SECRET, "download_dir": "x"}))
    assert set(problems) == {f"{rules.name}.hf-token"}
    assert SECRET not in str(problems)


@pytest.mark.parametrize(
    ("option", "value", "is_refused"),
    [
        ("additional_bash_cmds", [f"export WANDB_API_KEY={SECRET}"], True),
        ("additional_bash_cmds", ["export WANDB_API_KEY=$(cat ~/.wandb)", "ulimit -n 4096"], False),
        ("sbatch_additional_args", f"--export=ALL,HF_TOKEN={SECRET}", True),
        ("sbatch_additional_args", "--constraint=a100", False),
        ("srun_additional_args", f"--export=ALL,HF_TOKEN={SECRET}", True),
        ("srun_additional_args", "--export=ALL,HF_TOKEN=$HF_TOKEN", True),  # would be in the command of srun
        ("srun_additional_args", "--export=ALL,FOLDER=$FOLDER", False),
    ],
)
def test_options_that_become_commands_of_slurm_have_no_secret(option, value, is_refused):
    problems = dict(SlurmConfig(**{option: value}).problems())
    assert set(problems) == ({option} if is_refused else set())
    assert SECRET not in str(problems)


def test_wrong_environment_variables_are_not_quoted():
    with pytest.raises(ConfigError) as error:
        parse_env_vars(f"HF_TOKEN={SECRET},B")
    assert error.value.code == "launch.bad_env_vars"
    assert SECRET not in str(error.value)
