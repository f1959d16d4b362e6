"""Training without rollouts: which kind a file is for, and what is wrong with one before anything starts."""

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from areal.api.config import (
    DPOConfig,
    DPOOptions,
    GRPOConfig,
    RWConfig,
    RWOptions,
    SFTConfig,
    SFTOptions,
    load_config,
    load_experiment,
    save_config,
    script_keys,
)
from areal.api.config.experiment import KINDS
from areal.api.config.load import read
from areal.api.config.schema import fields_of, options_without_effect
from areal.api.errors import ConfigError

TOP = """
experiment_name: pairs
trial_name: t0
allocation_mode: fsdp:d1
"""
PAIRS = TOP + "train_dataset: {path: rows.jsonl, batch_size: 8, type: rw}\n"
MODEL = "model: {path: /models/tiny, optimizer: {lr: 1e-4}}\n"
ACTOR = "actor: {path: /models/tiny, optimizer: {lr: 1e-4}}\n"
REF = "ref: {path: '${actor.path}'}\n"
SFT = TOP + "train_dataset: {path: rows.jsonl, batch_size: 8, type: sft}\n" + MODEL
RW, DPO = PAIRS + MODEL, PAIRS + ACTOR + REF
GRPO = TOP.replace("fsdp", "native:d1+fsdp") + ACTOR + "train_dataset: {path: rows.jsonl, batch_size: 8}\n"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(tmp_path):
    def run(text: str, *overrides: str, **options):
        path = tmp_path / "x.yaml"
        path.write_text(textwrap.dedent(text))
        return load_experiment(["--config", str(path), *overrides], **options)

    return run


@pytest.mark.parametrize(
    ("text", "cls"),
    [
        (SFT, SFTConfig),
        (SFT + "sft: {train_on: all}\n", SFTConfig),
        (RW, RWConfig),
        (RW + "rw: {center_coef: 0.1}\n", RWConfig),
        (DPO, DPOConfig),
        (PAIRS + ACTOR + "dpo: {reference_free: true}\n", DPOConfig),
        (GRPO, GRPOConfig),
        (GRPO + "gconfig: {n_samples: 4}\n", GRPOConfig),
    ],
)
def test_the_sections_tell_the_kind(load, text, cls):
    assert type(load(text)) is cls


def test_an_override_may_tell_the_kind(load):
    assert type(load(SFT, "train_dataset.type=rw")) is RWConfig
    assert type(load(DPO, "dpo.beta=0.3")) is DPOConfig


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (RW + "dpo: {beta: 0.1}\n", ["dpo: DPO", "model: supervised fine-tuning or a reward model"]),
        (SFT + "rw: {center_coef: 0.1}\nsft: {train_on: all}\n", ["rw: a reward model", "sft: supervised fine-tuning"]),
        (DPO + "dpo: {beta: 0.1}\ngconfig: {n_samples: 2}\n", ["dpo: DPO", "gconfig: reinforcement learning"]),
        (GRPO + MODEL, ["actor: reinforcement learning (PPO, GRPO) or DPO", "model: supervised"]),
    ],
)
def test_sections_of_two_kinds_are_named(load, text, named):
    with pytest.raises(ConfigError) as error:
        load(text)
    assert error.value.code == "config.mixed_kinds"
    for line in named:
        assert line in str(error.value)


def test_a_scripts_own_sections_do_not_count(load, tmp_path):
    text = GRPO + "gconfig: {n_samples: 2}\nmodel: {anything: 1}\n"
    assert type(load(text, allow_unknown_top_level=True)) is GRPOConfig
    assert script_keys(["--config", str(tmp_path / "x.yaml")]) == {"model": {"anything": 1}}


@pytest.mark.parametrize("text", [SFT, RW, DPO, GRPO])
def test_what_a_run_saves_is_of_the_same_kind(load, tmp_path, text):
    config = load(text)
    save_config(config, tmp_path / "saved.yaml")
    assert load_experiment(["--config", str(tmp_path / "saved.yaml")], allow_unknown_top_level=True) == config


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_file_is_for_the_first_kind_whatever_is_missing(load, kind):
    """A file without any telling section."""
    row_type = getattr(kind, "row_type", "rl")
    expected = {"rl": "actor.path", "sft": "model.path", "rw": "model.path"}[row_type]
    with pytest.raises(ConfigError) as error:
        load(TOP + f"train_dataset: {{path: rows.jsonl, type: {row_type}}}\n")
    assert (expected, "config.missing_requirement") in [
        (problem.path, problem.code) for problem in error.value.problems
    ]


@pytest.mark.parametrize(
    ("text", "overrides", "path", "code"),
    [
        (RW, ["allocation_mode=native:d1+fsdp:d1"], "allocation_mode", "config.conflict"),
        (RW, ["model.optimizer=null"], "model.optimizer", "config.missing_requirement"),
        (RW, ["model.mb_spec.granularity=4"], "model.mb_spec.granularity", "config.conflict"),
        (RW, ["model.temperature=0.5"], "model.temperature", "config.conflict"),
        (RW, ["rw.center_coef=-1"], "rw.center_coef", "config.out_of_range"),
        (RW, ["valid_dataset={path: v.jsonl, type: sft}"], "valid_dataset.type", "config.conflict"),
        (DPO, ["actor.optimizer=null"], "actor.optimizer", "config.missing_requirement"),
        (DPO, ["ref=null"], "ref", "config.missing_requirement"),
        (DPO, ["ref.optimizer.lr=1e-5"], "ref.optimizer", "config.conflict"),
        (DPO, ["ref.temperature=0.5"], "ref.temperature", "config.conflict"),
        (DPO, ["ref.mb_spec.granularity=3"], "ref.mb_spec.granularity", "config.conflict"),
        (DPO, ["dpo.label_smoothing=0.5"], "dpo.label_smoothing", "config.out_of_range"),
        (DPO, ["dpo.beta=0"], "dpo.beta", "config.out_of_range"),
        (GRPO, ["train_dataset.truncation=left"], "train_dataset.truncation", "config.conflict"),
        (SFT, ["sft.loss_aggregation=seq-mean-token-sum-norm"], "sft.loss_scale_tokens", "config.missing_requirement"),
        (SFT, ["sft.train_on=first"], "sft.train_on", "config.not_a_choice"),
    ],
)
def test_mistakes_are_named(load, text, overrides, path, code):
    with pytest.raises(ConfigError) as error:
        load(text, *overrides)
    assert (path, code) in [(problem.path, problem.code) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("text", "overrides", "path"),
    [
        (RW, ["evaluator.modes=[greedy]", "valid_dataset={path: v.jsonl, type: rw}"], "evaluator.modes"),
        (DPO, ["evaluator.eval_before_train=true"], "evaluator.eval_before_train"),
        (DPO, ["dpo.reference_free=true"], "ref"),
        (DPO, ["dpo.loss_type=ipo", "dpo.label_smoothing=0.1"], "dpo.label_smoothing"),
        (DPO, ["train_dataset.truncation=left"], "train_dataset.truncation"),
        (SFT, ["sft.loss_scale_tokens=9"], "sft.loss_scale_tokens"),
    ],
)
def test_what_has_no_effect_is_listed(load, text, overrides, path):
    assert path in [item.path for item in options_without_effect(load(text, *overrides))]


def test_whole_pairs_may_be_asked_for_by_hand(load):
    assert load(DPO, "actor.mb_spec.granularity=2").actor.mb_spec.granularity == 2
    assert load(PAIRS + ACTOR, "dpo.reference_free=true").models.keys() == {"actor"}
    assert load(DPO).models.keys() == {"actor", "ref"}


def test_a_reward_model_file_of_areal_loads(tmp_path):
    path = tmp_path / "rw.yaml"
    path.write_text(RW.replace("path: /models/tiny", "path: /models/tiny, is_critic: true, weight_update_mode: xccl"))
    assert isinstance(load_experiment(["--config", str(path)]), RWConfig)
    assert load_config(["--config", str(path)], RWConfig).sequences_per_row == 2


@pytest.mark.parametrize("name", ["reward_model", "dpo"])
def test_the_examples_load(name):
    config = load_experiment(["--config", str(EXAMPLES / "preference" / f"{name}.yaml")])
    assert isinstance(config, RWConfig if name == "reward_model" else DPOConfig)


@pytest.mark.parametrize(("section", "cls"), [("sft", SFTOptions), ("rw", RWOptions), ("dpo", DPOOptions)])
def test_the_rows_of_the_algorithms_page_are_options(section, cls):
    page = (EXAMPLES.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = page.partition(f"| config (`{section}.`) |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = [
        yaml.safe_load("{" + ", ".join(re.findall(r"`([^`]+)`", row.split("|")[-2])) + "}") for row in table if row
    ]
    assert len(shown) >= 3
    for each in shown:
        assert not read(cls, each).problems
    assert {name for item in shown for name in item} == set(fields_of(cls))
