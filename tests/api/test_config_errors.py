"""What is wrong with a configuration is reported before anything starts: its path, its code and its value."""

from itertools import pairwise
from pathlib import Path

import pytest

from areal.api.config import GRPOConfig, SFTConfig, load_config
from areal.api.errors import ConfigError
from tests.api.minimal import MINIMAL

ALIASES = "a: &a [1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(7 * [f'*{before}'])}]\n" for before, name in pairwise("abcdef")
)
"""117,649 values in f alone."""


@pytest.fixture
def problem(tmp_path: Path):
    """Loads a file and overrides that cannot be right, and returns the error."""

    def load(*overrides: str, text: str | bytes = MINIMAL, cls: type = GRPOConfig) -> ConfigError:
        path = tmp_path / "x.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ConfigError) as caught:
            load_config(["--config", str(path), *overrides], cls)
        assert len(str(caught.value).splitlines()) == max(
            1, len(caught.value.problems) + (len(caught.value.problems) > 1)
        )
        return caught.value

    return load


@pytest.mark.parametrize(
    ("override", "path", "suggestion"),
    [
        ("seeed=3", "seeed", "seed"),
        ("actor.optimizer.learning_rate=1", "actor.optimizer.learning_rate", "actor.optimizer.lr"),
        ("actor.ppo_max_token_len_per_gpu=1", "actor.ppo_max_token_len_per_gpu", "actor.mb_spec.max_tokens_per_mb"),
        ("total_training_steps=3", "total_training_steps", "total_train_steps"),
        ("actor.lr=3", "actor.lr", "actor.optimizer.lr"),
        ("batch_size=3", "batch_size", "train_dataset.batch_size"),
        ("rollout.n=4", "rollout.n", "gconfig.n_samples"),  # of verl
        ("rollout.max_head_offpolicynes=3", "rollout.max_head_offpolicynes", "rollout.max_head_offpolicyness"),
        ("zzzzqqqq=3", "zzzzqqqq", ""),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(problem, override: str, path: str, suggestion: str) -> None:
    (result,) = problem(override).problems
    assert (result.path, result.code, result.suggestion) == (path, "config.unknown_key", suggestion)
    assert suggestion in result.message


def test_staleness_has_one_target(problem) -> None:
    rollout = "rollout={max_head_offpolicyness: 2, target_staleness: {mean: 1, ess: 0.9}}"
    (result,) = problem("actor.use_decoupled_loss=true", rollout).problems
    assert (result.path, result.code) == ("rollout.target_staleness.ess", "config.conflict")
    assert "mean=1" in result.message


@pytest.mark.parametrize("path", ["actor.optimizer.beta2", "gconfig.top_p"])
def test_a_key_with_dots_in_a_file_is_told_from_a_misspelt_one(problem, path: str) -> None:
    (result,) = problem(text=MINIMAL + f"{path}: 0.9\n").problems
    assert (result.path, result.code) == (path, "config.unknown_key")
    assert "nested" in result.message


@pytest.mark.parametrize(
    ("override", "has_hint"),
    [
        ("gconfig.stop=[yes]", True),
        ("gconfig.stop=[a, no]", True),
        ("gconfig.stop=yes", False),  # quotes alone give no list
        ("workflow_args=[1]", False),
    ],
)
def test_quotes_are_advised_where_they_help(problem, override: str, has_hint: bool) -> None:
    assert ("quotes" in problem(override).problems[0].message) == has_hint


def test_a_wrong_option_names_where_it_was_given(problem, tmp_path: Path) -> None:
    """The command line for an override, the file for the rest; each line of several has its own place."""
    file = f"({tmp_path / 'x.yaml'})"
    assert str(problem("seeed=3")).endswith("(command line)")
    assert str(problem("actor.optimizer={lr: 1, lrr: 3}")).endswith("(command line)")
    assert str(problem("actor.optim.lr=1")).endswith("(command line)")
    assert str(problem("gconfig.stop_token_ids.0=1")).endswith("(command line)")
    assert str(problem("alarms.rules=[{name: grad_norm, x: 1}]")).endswith("(command line)")
    assert str(problem("seed")).endswith("(command line)")
    assert str(problem(text=MINIMAL + "seeed: 3\n")).endswith(file)
    first, second = str(problem("rollout.x=1", text=MINIMAL + "seeed: 3\n")).splitlines()[1:]
    ends = {line.strip().partition(":")[0]: line for line in (first, second)}
    assert ends["rollout.x"].endswith("(command line)")
    assert ends["seeed"].endswith(file)


@pytest.mark.parametrize(
    ("code", "override", "path", "values"),
    [
        # what was given, and what is expected
        ("wrong_type", "actor.optimizer.lr=abc", "actor.optimizer.lr", ["'abc'", "number"]),
        ("wrong_type", "seed=1.5", "seed", ["1.5", "integer"]),
        ("wrong_type", "seed=true", "seed", ["true", "integer"]),
        ("wrong_type", "seed=null", "seed", ["null", "integer"]),
        ("wrong_type", "actor.optimizer.lr=true", "actor.optimizer.lr", ["true", "number"]),
        ("wrong_type", "gconfig.greedy=1", "gconfig.greedy", ["1", "true or false"]),
        ("wrong_type", "gconfig.greedy=yes please", "gconfig.greedy", ["'yes please'", "true or false"]),
        ("wrong_type", "gconfig.stop_token_ids=5", "gconfig.stop_token_ids", ["5", "list of integer", "[1, 2]"]),
        ("wrong_type", "gconfig.stop_token_ids=[true]", "gconfig.stop_token_ids", ["[True]", "list of integer"]),
        ("wrong_type", "gconfig.stop=[yes]", "gconfig.stop", ["[True]", "quotes"]),
        ("wrong_type", "evaluator.stop_at=[1]", "evaluator.stop_at", ["[1]", "mapping of text to number"]),
        ("wrong_type", "evaluator.stop_at={sampled: much}", "evaluator.stop_at.sampled", ["'much'", "number"]),
        ("wrong_type", "gconfig=3", "gconfig", ["3", "section"]),
        ("wrong_type", "actor=null", "actor", ["null", "section"]),
        ("wrong_type", "seed.more=1", "seed", ["{'more': 1}", "integer"]),
        ("wrong_type", "seed=99999999999999999999", "seed", ["99999999999999999999", "integer"]),
        ("wrong_type", f"seed=0x{'f' * 5000}", "seed", ["digits"]),
        ("wrong_type", "trial_name=\udcff", "trial_name", ["UTF-8"]),
        ("wrong_type", "workflow_args=" + "[" * 50 + "]" * 50, "workflow_args", ["32"]),
        ("wrong_type", "workflow_args" + ".a" * 5000 + "=1", "workflow_args", ["32"]),
        ("not_a_choice", "rollout.on_stale=maybe", "rollout.on_stale", ["'maybe'", "train, mask, drop, wait"]),
        ("not_a_choice", "actor.dtype=fp16", "actor.dtype", ["'fp16'", "bfloat16, float32"]),
        ("out_of_range", "gconfig.top_p=2", "gconfig.top_p", ["2", "above 0 and at most 1"]),
        ("out_of_range", "actor.optimizer.beta2=1", "actor.optimizer.beta2", ["1", "below 1"]),
        ("out_of_range", "actor.optimizer.lr=.nan", "actor.optimizer.lr", ["nan", "finite"]),
        ("out_of_range", "launcher.save_grace_s=1e60", "launcher.save_grace_s", ["1e+60", "at most 3.16224e+07"]),
        ("out_of_range", "actor.optimizer.weight_decay=1e308", "actor.optimizer.weight_decay", ["at most 1e+09"]),
        ("out_of_range", "actor.reward_bias=-1e308", "actor.reward_bias", ["from -1e+09 to 1e+09"]),
        ("out_of_range", "rollout.queue_size=99999999999", "rollout.queue_size", ["at most 2.14748e+09 or null"]),
        ("wrong_type", "actor.path=.nan", "actor.path", [".nan", "expected text"]),
        ("out_of_range", "rollout.max_concurrent_rollouts=0", "rollout.max_concurrent_rollouts", ["0", "1 or null"]),
        ("required", "experiment_name=???", "experiment_name", []),
        ("required", "train_dataset.path=???", "train_dataset.path", []),
        ("required", "valid_dataset.max_rows=3", "valid_dataset.path", []),
        ("unresolved_interpolation", "trial_name=${nothing}", "trial_name", ["${nothing}"]),
        ("unresolved_interpolation", "seed=${seed}", "seed", ["${seed}"]),
        ("unresolved_interpolation", "seed=${oc.env:AREAL_UNSET}", "seed", ["${oc.env:AREAL_UNSET}"]),
        # names of folders
        ("conflict", "trial_name=a/b", "trial_name", ["'a/b'"]),
        ("conflict", "experiment_name=", "experiment_name", ["''"]),
        ("conflict", "experiment_name=..", "experiment_name", ["'..'"]),
        ("conflict", "cluster.fileroot=~/runs", "cluster.fileroot", ["'~/runs'"]),
        ("missing_requirement", "train_dataset.path=", "train_dataset.path", []),
        ("missing_requirement", "actor.path=", "actor.path", []),
        # allocation
        (
            "allocation.invalid",
            "allocation_mode=native:dx+fsdp:d1",
            "allocation_mode",
            ["column 8", "'native:dx+fsdp:d1'"],
        ),
        ("allocation.invalid", "allocation_mode=", "allocation_mode", ["column 1", "native:d1+fsdp:d1"]),
        ("missing_requirement", "allocation_mode=fsdp:d2", "allocation_mode", ["native:d1+fsdp:d2"]),
        ("unsupported", "allocation_mode=native:d1t2+fsdp:d1", "allocation_mode", ["native:d1 or sglang:d1t2"]),
        ("conflict", "actor.fsdp.shard_size=2", "actor.fsdp.shard_size", ["1 data and context ranks", "use 1"]),
        ("unsupported", "allocation_mode=native:d1|fsdp[a]:d1", "allocation_mode", ["native:d1|fsdp[a]:d1"]),
        ("unsupported", "allocation_mode=native:d1", "allocation_mode", ["native:dN+eval"]),
        ("conflict", "allocation_mode=native:d1+fsdp:d9", "train_dataset.batch_size", ["8", "9"]),
        # across sections
        ("conflict", "rollout.consumer_batch_size=7", "rollout.consumer_batch_size", ["train_dataset.batch_size=8"]),
        ("conflict", "rollout.target_staleness.mean=1.5", "rollout.target_staleness.mean", ["offpolicyness=0", "2"]),
        ("out_of_range", "rollout.target_staleness.mean=0", "rollout.target_staleness.mean", ["above 0"]),
        ("out_of_range", "rollout.target_staleness.ess=1", "rollout.target_staleness.ess", ["below 1"]),
        (
            "conflict",
            "rollout={max_head_offpolicyness: 1, target_staleness: {mean: 0.1}}",
            "rollout.target_staleness.mean",
            ["0.1", "batch_size=8"],
        ),
        (
            "conflict",
            "rollout={max_head_offpolicyness: 1, target_staleness: {mean: 1}, dynamic_bs: true}",
            "rollout.target_staleness.mean",
            ["dynamic_bs"],
        ),
        (
            "missing_requirement",
            "rollout={max_head_offpolicyness: 1, target_staleness: {ess: 0.9}}",
            "rollout.target_staleness.ess",
            ["actor.use_decoupled_loss=true"],
        ),
        ("conflict", "actor.temperature=0.7", "actor.temperature", ["0.7", "gconfig.temperature=1.0"]),
        ("conflict", "ref={path: a, optimizer: {}}", "ref.optimizer", []),
        ("conflict", "ref={path: a, router_replay: true}", "ref.router_replay", []),
        ("conflict", "ref={path: a, temperature: 2}", "ref.temperature", ["2.0", "gconfig.temperature"]),
        ("missing_requirement", "critic.path=a", "critic.optimizer", []),
        ("conflict", "critic={path: a, optimizer: {}, temperature: 2}", "critic.temperature", []),
        ("missing_requirement", "actor.optimizer=null", "actor.optimizer", []),
        ("conflict", "gconfig={n_samples: 4, greedy: true}", "gconfig.greedy", ["n_samples=4"]),
        ("conflict", "gconfig={min_new_tokens: 9, max_new_tokens: 8}", "gconfig.min_new_tokens", ["max_new_tokens=8"]),
        ("conflict", "gconfig.stop=['']", "gconfig.stop", []),
        ("conflict", "gconfig.stop_token_ids=[-1]", "gconfig.stop_token_ids", ["-1"]),
        ("conflict", "eval_gconfig.n_samples=4", "eval_gconfig.n_samples", ["4"]),
        ("conflict", "actor.reward_norm={mean_level: group}", "actor.reward_norm", ["gconfig.n_samples"]),
        ("conflict", "actor.adv_norm={mean_level: null, mean_leave1out: true}", "actor.adv_norm.mean_leave1out", []),
        ("not_a_choice", "evaluator.modes=[best]", "evaluator.modes", ["'best'"]),
        ("not_a_choice", "evaluator.modes=[]", "evaluator.modes", ["[]"]),
        ("conflict", "evaluator.stop_at={greedy: 1}", "evaluator.stop_at", ["'greedy'"]),
        ("conflict", "train_dataset.type=sft", "train_dataset.type", ["sft", "rl"]),
        ("missing_requirement", "recover={mode: fault, freq_secs: null}", "recover.mode", ["freq_steps"]),
        ("conflict", "native={context_length: 99, max_total_tokens: 98}", "native.max_total_tokens", ["98"]),
        # the command line itself
        ("bad_override", "seed", "seed", []),
        ("bad_override", "actor..lr=1", "actor..lr=1", []),
        ("bad_override", "experiment_name.more=1", "experiment_name.more", ["'sort'"]),
        ("bad_override", "gconfig.stop=[a", "gconfig.stop", ["'[a'"]),
        ("bad_override", "critic={path: ${actor.path}}", "critic", ["put ${...} in quotes"]),
        ("bad_override", "tokenizer_path=${actor.path", "tokenizer_path", ["'${actor.path'"]),
        ("bad_override", "workflow_args={a: '${'}", "workflow_args", ["${"]),
        ("bad_override", "workflow_args={a: \udcff}", "workflow_args", []),
        ("bad_override", f"seed={'1' * 5000}", "seed", ["digits"]),
        ("bad_override", "workflow_args=" + "{a: " * 80 + "1" + "}" * 80, "workflow_args", []),
        ("bad_override", "workflow_args=" + "[" * 5000 + "]" * 5000, "workflow_args", []),
        (
            "allocation.invalid",
            f"allocation_mode=native:d{'1' * 5000}+fsdp:d1",
            "allocation_mode",
            ["column 8", "d1111"],
        ),
        ("conflict", f"trial_name=a/{'1' * 5000}", "trial_name", ["a/111"]),
        ("conflict", f"rollout.server_addrs=[{'1' * 5000}x]", "rollout.server_addrs", ["'111"]),
        ("conflict", "gconfig.stop_token_ids=[" + "-1," * 4000 + "]", "gconfig.stop_token_ids", ["-1"]),
        ("bad_override", "~seeed", "seeed", ["~seeed"]),
        ("bad_override", "~seed=3", "seed", ["~seed"]),
        ("bad_override", "~actor.optimizer.lr=1", "actor.optimizer.lr", ["0.0001"]),
        ("bad_override", "~experiment_name.more", "experiment_name.more", ["'sort'"]),
        ("bad_override", "~", "~", []),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_one_mistake(problem, code: str, override: str, path: str, values: list[str]) -> None:
    error = problem(override)
    result = next(problem for problem in error.problems if problem.path == path)
    assert result.code == (code if "." in code else f"config.{code}")
    assert [value for value in values if value not in result.message] == []
    assert {problem.code for problem in error.problems} == {result.code}
    assert len(str(error)) < 1000


def test_blocks_are_not_compiled_where_that_fails(problem) -> None:
    (result,) = problem(
        "actor.compile=true", "actor.gradient_checkpointing=true", "actor.checkpointing=selective"
    ).problems
    assert (result.path, result.code) == ("actor.checkpointing", "config.conflict")


def test_all_mistakes_are_reported_at_once_and_only_they(problem) -> None:
    error = problem("seeed=3", "actor.optimizer.lr=abc", "gconfig.top_p=7", "trial_name=a/b", "actor.path=")
    assert error.code == "config.invalid"
    assert {(problem.path, problem.code) for problem in error.problems} == {
        ("seeed", "config.unknown_key"),
        ("actor.optimizer.lr", "config.wrong_type"),
        ("gconfig.top_p", "config.out_of_range"),
        ("actor.path", "config.missing_requirement"),
        ("trial_name", "config.conflict"),
    }
    first, *lines = str(error).splitlines()
    assert first.startswith("5 problems in ")
    assert [line.strip() for line in lines] == [str(problem) for problem in error.problems]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (
            ["gconfig.n_samples=many", "actor.group_size=8", "actor.reward_norm={mean_level: group}"],
            "gconfig.n_samples",
        ),
        (["gconfig.n_sample=8", "actor.group_size=8"], "gconfig.n_sample"),
        (["trial_name=${x}", "rollout.trial_name=${trial_name}", "saver.trial_name=${trial_name}"], "trial_name"),
    ],
)
def test_the_consequences_of_a_mistake_are_not_reported(problem, overrides: list[str], path: str) -> None:
    assert [problem.path for problem in problem(*overrides).problems] == [path]


@pytest.mark.parametrize(
    "override",
    [
        "stats_logger.wandb.wandb_base_url=notaurl",
        "stats_logger.mlflow.tracking_uri=http://",
        "stats_logger.trackio.space_id=a/b/c/d",
    ],
)
def test_an_address_of_a_tracker_has_the_form_of_one(problem, override: str) -> None:
    (result,) = problem(override).problems
    path, _, value = override.partition("=")
    assert (result.path, result.code) == (path, "config.conflict")
    assert value in result.message


def test_a_wrong_address_of_wandb_is_not_shown_with_its_password(problem) -> None:
    assert "s3cr3t" not in str(problem("stats_logger.wandb.wandb_base_url=me:s3cr3t@wandb.example"))


def test_an_empty_mapping_reports_all_that_is_required(problem) -> None:
    paths = {problem.path for problem in problem(text="{}").problems}
    assert paths == {"experiment_name", "trial_name", "train_dataset.path", "actor.path", "actor.optimizer",
                     "allocation_mode"}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1", ""),
        ("a: 1\na: 2\n", "duplicate"),
        ("a: \x00", ""),
        ("- 1\n- 2\n", "list"),
        ("hello\n", "single value"),
        ("", "empty"),
        ("# a comment\n", "empty"),
        (b"a: \xff\n", "UTF-8 text (byte 3)"),
        ("a: ${b\n", "${b"),
        ("a: " + "{a: " * 80 + "1" + "}" * 80, "nested"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested"),
        ("seed: " + "1" * 5000, "digits"),
        ("a: &a {b: *a}", "recursive"),
        (ALIASES, "the aliases make more than 100000 values"),
        ("a: !!python/object/apply:os.getcwd []", "constructor"),
        ("a: 1\n---\nb: 1\n", "single document"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_files_that_are_no_configuration(problem, tmp_path: Path, text: str | bytes, part: str) -> None:
    (result,) = problem(text=text).problems
    assert (result.path, result.code) == (str(tmp_path / "x.yaml"), "config.unreadable_file")
    assert part in result.message


@pytest.mark.parametrize("name", ["", "none.yaml"], ids=["directory", "missing"])
def test_a_path_that_is_no_file(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", path], GRPOConfig)
    assert caught.value.code == "config.unreadable_file"
    assert [problem.path for problem in caught.value.problems] == [str(Path(path))]


@pytest.mark.parametrize(
    ("argv", "word"),
    [([], "--config"), (["seed=3"], "--config"), (["--config"], "--config"), (["--conf", "x.yaml"], "--conf")],
)
def test_command_lines_that_name_no_file(argv: list[str], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(argv, GRPOConfig)
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [(word, "config.bad_override")]


SFT = """
experiment_name: sort
trial_name: t0
allocation_mode: fsdp:d1
train_dataset: {path: rows.jsonl, batch_size: 8, type: sft}
model: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""


@pytest.mark.parametrize(
    ("override", "path", "code"),
    [
        ("allocation_mode=native:d1+fsdp:d1", "allocation_mode", "config.conflict"),
        ("model.optimizer=null", "model.optimizer", "config.missing_requirement"),
        ("model.path=", "model.path", "config.missing_requirement"),
        ("train_dataset.type=rl", "train_dataset.type", "config.conflict"),
        ("gconfig.n_samples=2", "gconfig", "config.unknown_key"),
    ],
)
def test_mistakes_of_supervised_training(problem, override: str, path: str, code: str) -> None:
    result = problem(override, text=SFT, cls=SFTConfig).problems
    assert [(problem.path, problem.code) for problem in result] == [(path, code)]
