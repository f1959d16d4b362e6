"""Whatever is wrong with a configuration is said before anything starts: which key, what it held, what to change."""

from pathlib import Path

import pytest

from areal.api.config import GRPOConfig, SFTConfig, load_config
from areal.api.errors import ConfigError

MINIMAL = """
experiment_name: sort
trial_name: t0
allocation_mode: native:d1+fsdp:d1
train_dataset: {path: rows.jsonl, batch_size: 8}
actor: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""


@pytest.fixture
def problem(tmp_path: Path):
    """Loads a file and overrides that cannot be right, and returns the message."""

    def load(*overrides: str, text: str = MINIMAL, cls: type = GRPOConfig) -> str:
        path = tmp_path / "x.yaml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load_config(["--config", str(path), *overrides], cls)
        return str(caught.value)

    return load


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # unknown keys
        ("seeed=3", ["seeed: unknown key; did you mean seed?"]),
        ("actor.optimizer.learning_rate=1", ["actor.optimizer.learning_rate: unknown key"]),
        ("actor.lr=3", ["actor.lr: unknown key; did you mean actor.optimizer.lr?"]),
        ("batch_size=3", ["batch_size: unknown key; did you mean train_dataset.batch_size?"]),
        ("rollout.max_head_offpolicynes=3", ["did you mean rollout.max_head_offpolicyness?"]),
        ("zzzzqqqq=3", ["zzzzqqqq: unknown key: remove it"]),
        # wrong types
        ("actor.optimizer.lr=abc", ["actor.optimizer.lr: 'abc' was given where number is expected"]),
        ("seed=1.5", ["seed: 1.5 was given where integer is expected"]),
        ("seed=true", ["seed: True was given where integer is expected"]),
        ("seed=null", ["seed: null was given where integer is expected"]),
        ("gconfig.greedy=1", ["gconfig.greedy: 1 was given where true or false is expected"]),
        ("gconfig.stop_token_ids=5", ["gconfig.stop_token_ids: 5 was given where list of integer is expected"]),
        ("gconfig.stop=[yes]", ["gconfig.stop: [True] was given", "quotes"]),
        ("evaluator.stop_at=[1]", ["evaluator.stop_at: [1] was given where mapping of text to number is expected"]),
        ("gconfig=3", ["gconfig: 3 was given where a section"]),
        ("actor=null", ["actor: null was given where section is expected"]),
        # choices and ranges
        ("rollout.on_stale=maybe", ["rollout.on_stale: 'maybe' is not allowed: use one of train, mask, drop, wait"]),
        ("gconfig.top_p=2", ["gconfig.top_p: 2.0 is not allowed: use a number above 0 and at most 1"]),
        ("actor.optimizer.beta2=1", ["actor.optimizer.beta2: 1.0 is not allowed", "below 1"]),
        ("actor.optimizer.lr=.nan", ["actor.optimizer.lr: nan is not allowed: use a finite number"]),
        ("rollout.max_concurrent_rollouts=0", ["use a number of at least 1 or null"]),
        ("actor.dtype=fp16", ["actor.dtype: 'fp16' is not allowed: use one of bfloat16, float32"]),
        # required
        ("experiment_name=???", ["experiment_name: is required"]),
        ("train_dataset.path=???", ["train_dataset.path: is required"]),
        ("train_dataset.path=", ["train_dataset.path: is empty"]),
        ("actor.path=", ["actor.path: is required"]),
        ("valid_dataset.max_rows=3", ["valid_dataset.path: is required"]),
        # interpolation
        ("trial_name=${nothing}", ["trial_name: ${nothing} cannot be resolved", "not found"]),
        ("seed=${seed}", ["seed: ${seed} cannot be resolved"]),
        ("seed=${oc.env:AREAL_NO_SUCH_VARIABLE}", ["seed: ${oc.env:AREAL_NO_SUCH_VARIABLE} cannot be resolved"]),
        # names of folders
        ("trial_name=a/b", ["trial_name: 'a/b' cannot name a folder"]),
        ("experiment_name=", ["experiment_name: '' cannot name a folder"]),
        ("experiment_name=..", ["experiment_name: '..' cannot name a folder"]),
        ("cluster.fileroot=~/runs", ["cluster.fileroot: '~/runs' is not expanded"]),
        # allocation
        ("allocation_mode=native:dx+fsdp:d1", ["allocation_mode: column 8 of 'native:dx+fsdp:d1'"]),
        ("allocation_mode=", ["allocation_mode: column 1", "native:d1+fsdp:d1"]),
        ("allocation_mode=fsdp:d2", ["fsdp:d2 has no servers", "native:d1+fsdp:d2"]),
        ("allocation_mode=native:d1t2+fsdp:d1", ["use native:d1 or sglang:d1t2"]),
        ("allocation_mode=native:d1+megatron:d2", ["megatron is not supported by this version: use fsdp:d2"]),
        ("allocation_mode=native:d1+fsdp:d2t2", ["only data parallelism"]),
        ("allocation_mode=native:d1|fsdp[a]:d1", ["cannot be launched by this version"]),
        ("allocation_mode=native:d1+eval", ["cannot be launched by this version"]),
        ("allocation_mode=native:d1+fsdp:d9", ["train_dataset.batch_size: 8 is below the 9 data-parallel ranks"]),
        # across sections
        ("rollout.consumer_batch_size=7", ["rollout.consumer_batch_size: 7 differs from train_dataset.batch_size=8"]),
        ("actor.temperature=0.7", ["actor.temperature: 0.7 differs from gconfig.temperature=1.0"]),
        ("actor.group_size=4", ["actor.group_size: 4 differs from gconfig.n_samples=1"]),
        ("ref={path: a, optimizer: {}}", ["ref.optimizer: is set"]),
        ("ref={path: a, temperature: 2}", ["ref.temperature: 2.0 differs from gconfig.temperature"]),
        ("critic.path=a", ["critic.optimizer: is null"]),
        ("actor.optimizer=null", ["actor.optimizer: is null"]),
        ("gconfig={n_samples: 4, greedy: true}", ["gconfig.greedy: makes all n_samples=4 answers equal"]),
        ("gconfig={min_new_tokens: 9, max_new_tokens: 8}", ["gconfig.min_new_tokens: 9 is above max_new_tokens=8"]),
        ("gconfig.stop=['']", ["gconfig.stop: holds an empty string"]),
        ("gconfig.stop_token_ids=[-1]", ["gconfig.stop_token_ids"]),
        ("eval_gconfig.n_samples=4", ["eval_gconfig.n_samples: 4 is not 1"]),
        ("actor.reward_norm={mean_level: group}", ["actor.reward_norm: compares", "raise gconfig.n_samples"]),
        ("actor.adv_norm={mean_level: null, mean_leave1out: true}", ["actor.adv_norm.mean_leave1out"]),
        ("actor.behav_imp_weight_cap=5", ["actor.behav_imp_weight_cap: has an effect only with use_decoupled_loss"]),
        ("evaluator.freq_steps=5", ["evaluator: asks for evaluations", "valid_dataset.path"]),
        ("evaluator.stop_at={sampled: 1}", ["evaluator.stop_at: is {'sampled': 1.0}, but nothing is evaluated"]),
        ("evaluator.modes=[best]", ["evaluator.modes: 'best' is not an evaluation mode"]),
        ("evaluator.modes=[]", ["evaluator.modes: [] must hold"]),
        ("evaluator.stop_at={greedy: 1}", ["evaluator.stop_at: 'greedy' is not among modes"]),
        ("train_dataset.type=sft", ["train_dataset.type: sft rows cannot be used here: set it to rl"]),
        ("recover.mode=auto", ["recover.mode: auto needs recovery checkpoints"]),
        ("native={context_length: 99, max_total_tokens: 98}", ["native.max_total_tokens: 98 is below"]),
        # the command line itself
        ("seed", ["seed: is not an override: write key.sub=value"]),
        ("actor..lr=1", ["actor..lr=1: has an empty name"]),
        ("seed.more=1", ["seed"]),
        ("experiment_name.more=1", ["experiment_name.more: cannot be set: experiment_name is 'sort', not a section"]),
        ("gconfig.stop=[a", ["gconfig.stop: '[a' is not readable as a YAML value"]),
    ],
)
def test_one_mistake(problem, override: str, expected: list[str]) -> None:
    message = problem(override)
    for part in expected:
        assert part in message
    assert "Traceback" not in message


def test_all_mistakes_are_told_at_once_and_only_they(problem) -> None:
    message = problem("seeed=3", "actor.optimizer.lr=abc", "gconfig.top_p=7", "trial_name=a/b", "actor.path=")
    lines = message.splitlines()
    assert lines[0].startswith("5 problems in ")
    told = [line.split(":")[0].strip() for line in lines[1:]]
    assert told == ["seeed", "actor.optimizer.lr", "gconfig.top_p", "actor.path", "trial_name"]


def test_a_mistake_brings_no_consequences(problem) -> None:
    message = problem("gconfig.n_samples=many", "actor.group_size=8", "actor.reward_norm={mean_level: group}")
    assert message.splitlines()[0].startswith("gconfig.n_samples: 'many' was given where integer is expected")
    message = problem("gconfig.n_sample=8", "actor.group_size=8")
    assert "did you mean gconfig.n_samples?" in message
    assert len(message.splitlines()) == 1
    message = problem("trial_name=${expname}", "rollout.trial_name=${trial_name}", "saver.trial_name=${trial_name}")
    assert len(message.splitlines()) == 1


def test_nothing_given_names_all_that_is_required(problem) -> None:
    message = problem(text="")
    for path in ("experiment_name", "trial_name", "train_dataset.path", "actor.path", "allocation_mode"):
        assert f"{path}: " in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "not readable as YAML"),
        ("- 1\n- 2\n", "holds a list"),
        ("a: 1\na: 2\n", "not readable as YAML"),
        ("a: \x00", "not readable as YAML"),
    ],
)
def test_files_that_are_no_configuration(problem, text: str, expected: str) -> None:
    message = problem(text=text)
    assert expected in message
    assert "x.yaml" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "no configuration file given"),
        (["seed=3"], "no configuration file given"),
        (["--config"], "--config needs a file"),
        (["--config", "/nowhere/x.yaml"], "/nowhere/x.yaml: no such configuration file"),
        (["--conf", "x.yaml"], "unknown flag --conf"),
    ],
)
def test_command_lines_that_name_no_file(argv: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(argv, GRPOConfig)


SFT = """
experiment_name: sort
trial_name: t0
allocation_mode: fsdp:d1
train_dataset: {path: rows.jsonl, batch_size: 8, type: sft}
model: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("allocation_mode=native:d1+fsdp:d1", "allocation_mode: native:d1+fsdp:d1 starts servers"),
        ("model.optimizer=null", "model.optimizer: is null"),
        ("model.path=", "model.path: is required"),
        ("train_dataset.type=rl", "train_dataset.type: rl rows cannot be used here: set it to sft"),
        ("evaluator.modes=[greedy]", "evaluator: has modes or stop_at"),
        ("gconfig.n_samples=2", "gconfig: unknown key"),
    ],
)
def test_mistakes_of_supervised_training(problem, override: str, expected: str) -> None:
    assert expected in problem(override, text=SFT, cls=SFTConfig)
