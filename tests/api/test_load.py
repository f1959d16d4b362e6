"""From a command line to a config and back."""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.api.config import (
    GRPOConfig,
    PPOActorConfig,
    PPOConfig,
    SFTConfig,
    TrainDatasetConfig,
    check_config,
    load_config,
    load_experiment,
    save_config,
    script_keys,
)
from areal.api.config.experiment import KINDS
from areal.api.config.load import script_numbers
from areal.api.config.validate import conflicts
from areal.api.errors import ConfigError

MINIMAL = """
    experiment_name: sort
    trial_name: t0
    allocation_mode: native:d1+fsdp:d1
    train_dataset: {path: rows.jsonl, batch_size: 8}
    actor: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""
MINIMAL_SFT = """
    experiment_name: sort
    trial_name: t0
    allocation_mode: fsdp:d1
    train_dataset: {path: rows.jsonl, batch_size: 8, type: sft}
    model: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_yaml(text: str, name: str = "x.yaml") -> str:
        path = tmp_path / name
        path.write_text(dedent(text), encoding="utf-8")
        return str(path)

    return write_yaml


@pytest.fixture
def grpo(write):
    """Loads the minimal file with overrides."""
    path = write(MINIMAL)
    return lambda *overrides: load_config(["--config", path, *overrides], GRPOConfig)


def test_a_minimal_file_takes_every_default(grpo) -> None:
    config = grpo()
    assert config.experiment_name == "sort"
    assert config.actor.optimizer is not None
    assert config.actor.optimizer.lr == 1e-4
    assert config.actor.optimizer.beta2 == 0.999
    assert config.critic is None
    assert config.max_concurrent_rollouts == 8
    assert config.allocation.world_size == 2


def test_the_script_and_both_spellings_of_the_flag_are_understood(write) -> None:
    path = write(MINIMAL)
    expected = load_config(["--config", path, "seed=7"], GRPOConfig)
    assert load_config(["train.py", "seed=7", f"--config={path}"], GRPOConfig) == expected
    assert load_config(["--config", path, "+seed=7"], GRPOConfig) == expected


@pytest.mark.parametrize("script", [[], ["train.py"]], ids=["", "script"])
def test_the_overrides_of_hydra_are_understood(write, script: list[str]) -> None:
    argv = [*script, "--config", write(MINIMAL + "    critic: {path: /c}\n    seed: 5\n")]
    words = ["+gconfig.top_p=0.5", "++gconfig.greedy=false", "++critic.path=/d", "~critic", "~seed=5", "~gconfig.stop"]
    config = load_config([*argv, *words], GRPOConfig)
    assert (config.gconfig.top_p, config.critic, config.seed, config.gconfig.stop) == (0.5, None, 1, None)
    assert load_experiment([*argv[len(script) :], *words], allow_unknown_top_level=bool(script)) == config
    config = load_config([*argv, "~actor.optimizer.lr", "~critic.path", "critic=null"], GRPOConfig)
    assert config.actor.optimizer is not None
    assert config.actor.optimizer.lr == GRPOConfig().actor.optimizer.lr if GRPOConfig().actor.optimizer else 2e-5


def test_a_number_from_the_environment_is_a_number_in_its_copies(write, monkeypatch) -> None:
    monkeypatch.setenv("AREAL_TEST_SEED", "7")
    monkeypatch.setenv("AREAL_TEST_RATE", "1e-3")
    monkeypatch.setenv("AREAL_TEST_GREEDY", "True")
    text = (
        MINIMAL.replace("native:d1", "sglang:d1")
        + """
    seed: ${oc.env:AREAL_TEST_SEED}
    actor.copy: 1
    gconfig: {greedy: "${oc.env:AREAL_TEST_GREEDY}"}
    sglang: {random_seed: "${seed}"}
    workflow_args: {seed: "${seed}", deep: ["${seed}", "${seed}-x"], rate: "${actor.optimizer.lr}"}
    """.replace("    actor.copy: 1\n", "")
    )
    path = write(text)
    config = load_config(["--config", path, "actor.optimizer.lr=${oc.env:AREAL_TEST_RATE}"], GRPOConfig)
    assert config.seed == 7
    assert config.gconfig.greedy is True
    assert config.sglang == {"random_seed": 7}
    assert config.workflow_args == {"seed": 7, "deep": [7, "7-x"], "rate": 1e-3}
    monkeypatch.setenv("AREAL_TEST_SEED", "seven")
    assert refused("seed", load_config, ["--config", path, "actor.optimizer.lr=1"], GRPOConfig) == "config.wrong_type"


def test_later_files_win(write) -> None:
    base, more = write(MINIMAL), write("seed: 5\nactor: {path: /models/other}", "more.yaml")
    config = load_config(["--config", base, "--config", more], GRPOConfig)
    assert (config.seed, config.actor.path) == (5, "/models/other")
    assert config.actor.optimizer is not None


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=3", "seed", 3),
        ("total_train_steps=1e3", "total_train_steps", 1000),
        ("actor.optimizer.eps=1e-6", "actor.optimizer.eps", 1e-6),
        ("actor.optimizer.lr=1", "actor.optimizer.lr", 1.0),
        ("gconfig.greedy=true", "gconfig.greedy", True),
        ("trial_name=007", "trial_name", "007"),
        ("trial_name=1e3", "trial_name", "1e3"),
        ("trial_name=yes", "trial_name", "yes"),
        ("trial_name='a b'", "trial_name", "a b"),
        ("trial_name=${experiment_name}-x", "trial_name", "sort-x"),
        ("tokenizer_path=", "tokenizer_path", ""),
        ("actor.eps_clip_higher=null", "actor.eps_clip_higher", None),
        ("evaluator.modes=[sampled,greedy]", "evaluator.modes", ["sampled", "greedy"]),
        ("gconfig.stop=['a b', c]", "gconfig.stop", ["a b", "c"]),
        ("gconfig.stop_token_ids=[1, 2]", "gconfig.stop_token_ids", [1, 2]),
        ("workflow_args.max_turns=3", "workflow_args", {"max_turns": 3}),
        ("workflow_args={max_turns: 3, deep: {a: [1]}}", "workflow_args", {"max_turns": 3, "deep": {"a": [1]}}),
        ("reward_fn=my.py:score=x", "reward_fn", "my.py:score=x"),
        ("perf_tracer.enabled=true", "perf_tracer.enabled", True),
        ("actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap=[Block]",
         "actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap", ["Block"]),
        ("seed=${oc.env:AREAL_TEST_SEED}", "seed", 41),
    ],
)  # fmt: skip
def test_overrides_reach_every_kind_of_field(grpo, monkeypatch, override: str, path: str, value: Any) -> None:
    monkeypatch.setenv("AREAL_TEST_SEED", "41")
    node: Any = asdict(grpo(override))
    for name in path.split("."):
        node = node[name]
    assert node == value
    assert type(node) is type(value)


def test_an_override_opens_a_null_section(grpo, write) -> None:
    config = grpo("critic.path=/models/c", "critic.optimizer.lr=1e-3", "valid_dataset.path=v.jsonl")
    assert config.critic is not None
    assert config.critic.eps_clip == 0.5
    assert config.valid_dataset is not None
    assert config.valid_dataset.path == "v.jsonl"
    path = write(MINIMAL + "    critic: null\n", "null.yaml")
    config = load_config(["--config", path, "critic.path=/m", "critic.optimizer={lr: 1e-3}"], GRPOConfig)
    assert config.critic is not None


def test_an_override_replaces_lists_and_mappings(write) -> None:
    path = write(MINIMAL + "    valid_dataset: {path: v}\n    evaluator: {stop_at: {sampled: 0.5}}\n")
    argv = ["--config", path, "evaluator.stop_at={greedy: 0.9}", "evaluator.modes=[greedy]"]
    assert load_config(argv, GRPOConfig).evaluator.stop_at == {"greedy": 0.9}
    assert load_config(["--config", path, "evaluator.stop_at={}"], GRPOConfig).evaluator.stop_at == {}


def test_interpolation_sees_defaults_other_sections_and_whole_sections(grpo) -> None:
    config = grpo(
        "gconfig.max_new_tokens=77",
        "gconfig.temperature=0.5",
        "actor.temperature=${gconfig.temperature}",
        "eval_gconfig=${gconfig}",
        "actor.mb_spec.max_tokens_per_mb=${gconfig.max_tokens}",
        "ref={path: '${actor.path}', temperature: '${gconfig.temperature}'}",
        "tokenizer_path=${ref.path}",
    )
    assert config.eval_gconfig is not None
    assert config.eval_gconfig == config.gconfig
    assert config.actor.temperature == 0.5
    assert config.actor.mb_spec.max_tokens_per_mb == 65536
    assert config.ref is not None
    assert config.tokenizer_path == config.ref.path == "/models/tiny"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train_dataset.path=[a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("train_dataset.path=[a.jsonl]", ["a.jsonl"]),
        ("train_dataset.path=007", "007"),
        ("train_dataset.path=a b: c", "a b: c"),
    ],
)
def test_a_dataset_is_a_path_or_a_list_of_paths(grpo, word: str, expected: Any) -> None:
    assert grpo(word).train_dataset.path == expected


@pytest.mark.parametrize("word", ["train_dataset.path=null", "train_dataset.path=[[a]]"])
def test_another_value_as_a_dataset_is_refused_in_one_line(write, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", write(MINIMAL), word], GRPOConfig)
    assert [(problem.path.partition("[")[0], problem.code) for problem in caught.value.problems] == [
        ("train_dataset.path", "config.wrong_type")
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gconfig.temperature=0.5"], [0.5, 0.5, 0.5]),
        (["gconfig.temperature=${oc.env:AREAL_TEST_T}", "ref.temperature=${actor.temperature}"], [0.25, 0.25, 0.25]),
        (["gconfig={temperature: 0.5}", "actor={path: a, temperature: 0.5, optimizer: {lr: 1e-4}}"], [0.5, 0.5, 0.5]),
        ([], [1.0, 1.0, 1.0]),
    ],
)
def test_temperatures_of_the_models_follow_the_sampling(grpo, monkeypatch, words, expected) -> None:
    monkeypatch.setenv("AREAL_TEST_T", "0.25")
    config = grpo("ref.path=r", "teacher.path=t", *words)
    assert [model.temperature for model in (config.actor, config.ref, config.teacher)] == expected


@pytest.mark.parametrize("value", ["warm", "-1"])
@pytest.mark.parametrize("copies", [[], ["ref.path=r", "ref.temperature=${gconfig.temperature}"]])
def test_a_wrong_sampling_temperature_is_reported_once(write, value, copies) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", write(MINIMAL), f"gconfig.temperature={value}", *copies], GRPOConfig)
    assert [problem.path for problem in caught.value.problems] == ["gconfig.temperature"]


def test_load_experiment_picks_the_class(write) -> None:
    rl, sft = write(MINIMAL), write(MINIMAL_SFT, "sft.yaml")
    assert type(load_experiment(["--config", rl])) is GRPOConfig
    config = load_experiment(["--config", sft, "model.dtype=float32"])
    assert isinstance(config, SFTConfig)
    assert config.model.dtype == "float32"


def test_only_the_launcher_of_a_script_tolerates_the_scripts_own_keys(write) -> None:
    path = write(MINIMAL + "    game: {rounds: 3}\n")
    assert refused("game", load_experiment, ["--config", path]) == "config.unknown_key"
    assert load_experiment(["--config", path], allow_unknown_top_level=True).experiment_name == "sort"
    with pytest.raises(ConfigError) as caught:
        load_experiment(["--config", path, "actor.lrr=1"], allow_unknown_top_level=True)
    assert [problem.path for problem in caught.value.problems] == ["actor.lrr"]


def refused(path: str, load, *arguments) -> str:
    """The code of the one problem, which is at `path`."""
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    assert [problem.path for problem in caught.value.problems] == [path]
    return caught.value.code


def test_a_key_spelled_almost_like_a_known_one_is_refused_with_a_script_too(write) -> None:
    argv = ["game.py", "--config", write(MINIMAL), "rollouts.on_stale=drop", "game.rounds=3"]
    assert refused("rollouts", script_keys, argv) == "config.unknown_key"
    assert set(script_keys(argv, "class MyConfig:\n    rollouts: Rollouts")) == {"rollouts", "game"}
    # a section of another kind of training is the script's own
    assert set(script_keys(["--config", write(MINIMAL), "model.path=x"])) == {"model"}


@dataclass(frozen=True, kw_only=True)
class Game:
    """A section of a user's own."""

    rounds: int
    board: tuple[int, int] = (3, 3)
    level: int | str = 1


@dataclass(frozen=True, kw_only=True)
class GameConfig(GRPOConfig):
    """What a user's script defines."""

    game: Game
    bonus: dict[str, list[float]] = field(default_factory=dict)


def test_a_users_subclass_is_read_and_checked(write) -> None:
    path = write(MINIMAL)
    argv = ["--config", path, "game={rounds: 3, board: [4, 5], level: hard}", "bonus.win=[1, 2.5]"]
    config = load_config(argv, GameConfig)
    assert config.game == Game(rounds=3, board=(4, 5), level="hard")
    assert config.bonus == {"win": [1.0, 2.5]}
    assert refused("game", load_config, ["--config", path], GameConfig) == "config.required"
    assert refused("game.rounds", load_config, ["--config", path, "game.level=2"], GameConfig) == "config.required"


def test_the_launcher_hands_a_scripts_own_keys_on(write, tmp_path: Path) -> None:
    path = write(MINIMAL + "    game: {rounds: '${gconfig.n_samples}'}\n    sglang: {x: 1}\n")
    argv = ["game.py", "--config", path, "game.level=hard"]
    launched = load_experiment(argv, allow_unknown_top_level=True)
    save_config(launched, tmp_path / "run" / "config.yaml", extra=script_keys(argv))
    config = load_config(["--config", str(tmp_path / "run" / "config.yaml")], GameConfig)
    assert config.game == Game(rounds=1, level="hard")
    assert config.actor == launched.actor


@dataclass(frozen=True, kw_only=True)
class VersionConfig(GRPOConfig):
    version: str
    names: list[str]
    rate: float
    note: str
    limits: dict[str, float]


def test_the_launcher_hands_numbers_of_a_script_on_as_they_are_written(write, tmp_path: Path) -> None:
    path = write(MINIMAL + "    version: 1.5\n    names: [007, '8', 1_0]\n    rate: 1e-3\n    note: 1, 2\n")
    argv = ["--config", path, "trial_name=%m", "version=1.50", "+limits={a: 0x1F}", "limits.b=1.10"]
    launched, extra = load_experiment(argv, allow_unknown_top_level=True), script_keys(argv)
    saved = tmp_path / "run" / "config.yaml"
    save_config(launched, saved, extra=extra, numbers=script_numbers(argv, extra))
    config = load_config(["--config", str(saved)], VersionConfig)
    assert config == load_config(argv, VersionConfig)
    assert (config.version, config.names, config.rate) == ("1.50", ["007", "8", "1_0"], 0.001)
    assert config.limits == {"a": 31.0, "b": 1.1}


def test_loading_changes_nothing(write, tmp_path: Path) -> None:
    path = write(MINIMAL)
    load_config(["--config", path], GRPOConfig)
    assert [file.name for file in tmp_path.iterdir()] == ["x.yaml"]


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["run.py", "--help", "rollout"], ["--help", "gconfig.top_p"]])
def test_help_prints_and_ends(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(argv, GRPOConfig)
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert ("gconfig.top_p: number above 0 and at most 1; default 1.0" in printed) == ("rollout" not in argv)


TEXTS = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ["1e-5", "null", "yes", "0x1", "~", "${a.b}", "a: b", "[x", "'", "007", " x ", "#", "\\n", "1_000", "12:30"]
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=TEXTS.filter(lambda text: text not in ("", ".", "..", "???") and not set(text) & set("/\0")),
    stop=st.none() | st.lists(TEXTS.filter(bool), max_size=3),
    values=st.dictionaries(TEXTS.filter(bool), TEXTS | st.integers() | st.booleans() | st.none(), max_size=3),
    lr=st.floats(1e-9, 1e3),
)
def test_what_is_saved_loads_back_equal(tmp_path: Path, name, stop, values, lr) -> None:
    from areal.api.config import GenerationHyperparameters, OptimizerConfig

    config = PPOConfig(
        experiment_name=name,
        trial_name="t",
        allocation_mode="native:d2+fsdp:d1",
        train_dataset=TrainDatasetConfig(path="p"),
        gconfig=GenerationHyperparameters(stop=stop),
        actor=PPOActorConfig(path="m", optimizer=OptimizerConfig(lr=lr)),
        workflow_args=values,
    )
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(["--config", str(tmp_path / "saved.yaml")], PPOConfig) == config
    assert [path.name for path in tmp_path.iterdir()] == ["saved.yaml"]


def test_a_process_of_a_run_reads_the_checked_file_without_checks(grpo, tmp_path: Path, monkeypatch) -> None:
    config, path = grpo("stats_logger.wandb.wandb_api_key=s3cr3t"), tmp_path / "saved.yaml"
    for name, value in save_config(config, path, extra={"game": {"rounds": 1}}).items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        patch.setattr("areal.api.config.load.conflicts", None)  # a check would fail
        assert load_experiment(["--config", str(path)], allow_unknown_top_level=True) == config
    path.write_text(path.read_text().replace("\nseed: 1\n", "\nseed: -1\n").replace("\ngame:\n  rounds: 1\n", "\n"))
    assert refused("seed", load_experiment, ["game.py", "--config", str(path)]) == "config.out_of_range"


@pytest.mark.parametrize("kind", KINDS)
def test_a_section_of_defaults_has_no_problems(kind: type) -> None:
    """So a section that nobody wrote is not checked."""
    result = {problem.path for problem in conflicts(kind())}
    needed = {f"{model}.{option}" for model in ("actor", "model") for option in ("path", "optimizer")}
    assert result <= needed | {"allocation_mode", "train_dataset.type", "ref"}


def test_a_configuration_is_read_in_few_calls(write) -> None:
    """The functions of areal that one load enters, and their calls; the budget of issue 46 is 4,000 calls."""
    argv = ["--config", "examples/quickstart/grpo.yaml", "actor.optimizer.lr=1e-4"]
    calls: list[str] = []

    def count(frame, event, argument) -> None:
        if event == "call" and "/areal/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(count)
    try:
        load_config(argv, GRPOConfig)
    finally:
        sys.setprofile(None)
    assert len(calls) < 4000


def test_configs_made_in_python_can_be_checked(grpo) -> None:
    check_config(grpo())
    with pytest.raises(ConfigError) as caught:
        check_config(PPOConfig())
    paths = {problem.path for problem in caught.value.problems if problem.code == "config.required"}
    assert paths == {"experiment_name", "trial_name", "train_dataset.path"}
