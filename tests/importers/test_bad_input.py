"""Imports of files that cannot be read, are of another system, or have values that cannot be used."""

import tomllib
from pathlib import Path
from random import Random

import pytest
import yaml

from areal.api.errors import ConfigError
from areal.cli.config import SYSTEMS
from areal.cli.main import run_command
from areal.importers.draft import UNKNOWN, Draft, Note, flat
from areal.importers.script import report_json, report_lines, yaml_text
from tests.expect import raises_code

FILES = [path for path in sorted((Path(__file__).parent / "examples").iterdir()) if path.suffix != ".sh"]
VALUES = ["many", "", ["a"], [1, 2], {}, {"x": 1}, None, -1, 0, 1.5, True, 10**20, float("nan"), "$NODES"]
UNUSABLE = {"config.wrong_type", "config.out_of_range"}


def translated(system: str, tree: dict) -> Draft | ConfigError:
    try:
        return SYSTEMS[system](tree)
    except ConfigError as error:
        return error


def with_value(tree: dict, key: str, value: object) -> dict:
    section, _, rest = key.partition(".")
    return tree | {section: with_value(tree[section], rest, value) if rest else value}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_any_value_of_any_key_is_translated_or_refused_by_its_name(path):
    text = path.read_text()
    tree = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    random, refused = Random(path.stem), 0
    for key in flat(tree):
        value = random.choice(VALUES)
        changed = with_value(tree, key, value)
        draft = translated(path.name.partition("_")[0], changed)
        if isinstance(draft, ConfigError):
            assert (draft.code in UNUSABLE, str(draft).partition(": ")[0]) == (True, key)
            assert repr(value) in str(draft)
            refused += 1
            continue
        assert draft.notes.keys() == flat(changed).keys()
        assert len(list(report_lines(draft))) == len(draft.notes) + 1
        assert len(report_json(draft)["keys"]) == len(draft.notes)
        assert isinstance(yaml.safe_load(yaml_text(draft, path.name)), dict)
    assert refused or path.name.startswith("areal")  # whose values are checked when the result is loaded


@pytest.mark.parametrize(
    ("system", "key", "value", "code"),
    [
        ("verl", "trainer.nnodes", "$NODES", "config.wrong_type"),
        ("verl", "data.train_batch_size", 0, "config.out_of_range"),
        ("verl", "data.train_batch_size", 1.5, "config.wrong_type"),
        ("verl", "trainer.logger", 3, "config.wrong_type"),
        ("roll", "actor_train.device_mapping", "list(range(0,x))", "config.wrong_type"),
        ("cosmos", "rollout.n_generation", True, "config.wrong_type"),
    ],
)
def test_an_unusable_value_is_named_with_its_key(system, key, value, code):
    tree: dict = {key.rpartition(".")[2]: value}
    for section in reversed(key.split(".")[:-1]):
        tree = {section: tree}
    with raises_code(code, key, value):
        SYSTEMS[system](tree)


def test_numbers_that_are_text_are_numbers():
    draft = SYSTEMS["verl"]({"data": {"train_batch_size": "64", "train_files": "d"}, "trainer": {"nnodes": 2.0}})
    assert draft.options["train_dataset.batch_size"].value == 64
    assert draft.options["allocation_mode"].value == "vllm:d4t2+fsdp:d8"


@pytest.fixture
def refused(tmp_path):
    """Asserts that the import of a text is refused with a code and values; without `names`, with the path."""

    def check(system: str, text: str, *words: str, code: str = "config.unreadable_file", names: tuple = ()) -> str:
        path = tmp_path / "f.yaml"
        path.write_text(text)
        named = (path, *names) if code == "config.unreadable_file" else names
        with raises_code(code, *named) as error:
            run_command(["config", "import", system, str(path), *words])
        return str(error.value)

    return check


@pytest.mark.parametrize("text", ["", "- a\n", "data: [1\n", "\x00", "{a: " * 400 + "1" + "}" * 400])
def test_a_file_without_a_mapping_is_named(text, refused):
    refused("verl", text)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_file_without_a_key_of_the_system_is_refused(system, refused):
    refused(system, "other: {key: 1}\n", names=("other.key",))


WRONG = {(path, system) for path in FILES for system in SYSTEMS if not path.name.startswith(system)}


@pytest.mark.parametrize(("path", "system"), sorted(WRONG), ids=lambda value: getattr(value, "stem", value))
def test_a_file_of_another_system_is_refused_and_its_own_is_named(path, system):
    ours = path.name.partition("_")[0]
    with raises_code("config.unreadable_file", path, f"areal config import {ours} "):
        run_command(["config", "import", system, str(path)])


def test_a_file_that_no_import_supports_is_refused_with_its_reason(refused):
    text = "pretrain: m\nseed: 1\nstudent_train: {training_args: {learning_rate: 1.0e-6}, a: 1, b: 2}\n"
    refused("roll", text, code="config.unsupported", names=("student_train",))
    refused("verl", text, names=("areal config import roll ",))


@pytest.mark.parametrize(
    ("known", "unknown", "is_foreign"), [(0, 1, True), (1, 10, False), (1, 11, True), (2, 20, False)]
)
def test_a_source_is_foreign_with_more_than_ten_unknown_keys_for_a_known_one(known, unknown, is_foreign):
    notes = {f"k{number}": Note("kept", "seed") for number in range(known)}
    notes |= {f"u{number}": Note("missing", UNKNOWN) for number in range(unknown)}
    notes |= {f"m{number}": Note("missing", "write a workflow") for number in range(50)}
    assert Draft("ROLL", {}, notes=notes).is_foreign == is_foreign


@pytest.mark.parametrize(
    "text", ["[1", "${", "9" * 5000, "[" * 400 + "]" * 400], ids=["yaml", "omegaconf", "digits", "deep"]
)
@pytest.mark.parametrize("system", ["verl", "areal"])
def test_an_override_that_is_no_yaml_is_named(system, text, refused):
    key = "data.train_batch_size"
    refused(system, "data: {train_batch_size: 8}\n", f"{key}={text}", code="config.bad_override", names=(key,))


def test_errors_contain_no_secret(refused):
    shown = [
        refused("verl", "trainer: {}\n", word, code="config.bad_override", names=("api_key",))
        for word in ("kwargs.api_key=%abc def", "kwargs.api_key=abc: def", "api_key:def")
    ]
    shown.append(refused("verl", "trainer:\n  wandb_api_key: %abcdef\n", names=("line 2",)))
    assert not [text for text in shown if any(secret in text.replace("default", "") for secret in ("abc", "def"))]


def test_a_word_of_a_script_that_is_no_yaml_is_text(imported):
    words = {"trainer.experiment_name": "`date +%F`", "data.train_files": "*.parquet"}
    words |= {"trainer.note": "a: b", "trainer.other": "${"}
    text = "\n".join(f"{key}={text if '`' in text else repr(text)}" for key, text in words.items())
    assert imported("verl", text, name="f.sh").of_keys("value").items() >= words.items()


def test_an_output_that_cannot_be_written_is_named(refused, tmp_path):
    for output in (tmp_path, tmp_path / "f.yaml" / "below.yaml"):
        refused("verl", TEXT, "-o", str(output), code="command.not_written", names=(output,))


TEXT = "data: {train_batch_size: 8}\n"


def test_an_output_that_exists_is_replaced_only_on_request_and_the_input_never(refused, imported, tmp_path):
    path, output, link = tmp_path / "f.yaml", tmp_path / "ours.yaml", tmp_path / "link.yaml"
    output.write_text("mine")
    link.symlink_to(path)
    refused("verl", TEXT, "-o", str(output), code="config.output", names=(output, "--overwrite"))
    for same in (path, link):
        refused("verl", TEXT, "-o", str(same), "--overwrite", code="config.output", names=(same,))
    assert (path.read_text(), output.read_text()) == (TEXT, "mine")
    imported("verl", TEXT, "-o", str(output), "--overwrite")
    assert yaml.safe_load(output.read_text())["train_dataset"]["batch_size"] == 8


@pytest.mark.parametrize(
    ("text", "lost", "option"),
    [
        ("data: {train_files: t, train_batch_size: '${b}'}", "data.train_batch_size", "train_dataset.batch_size"),
        ("data: {train_files: t, train_batch_size: '${b}'}", "data.train_batch_size", "actor.ppo_n_minibatches"),
        ("{trainer: {nnodes: '${n}'}, data: {train_files: t}}", "trainer.nnodes", "allocation_mode"),
        ("{critic: '${c}', data: {train_files: t}}", "critic", "critic.path"),
    ],
)
def test_a_comment_says_that_a_key_without_a_value_has_its_default(text, lost, option, imported):
    for written, is_lost in ((text, True), ("data: {train_files: t}", False)):
        origin = imported("verl", written).report["options"][option]["origin"]
        assert origin.endswith(f"the default of {lost}, which has no value") == is_lost


def test_a_key_with_a_variable_that_a_script_does_not_set_is_missing_with_its_name(imported):
    text = "A=a\nrun data.train_files=$A data.val_files=\"['$TEST', 'b']\" trainer.nnodes=${NODES}\n"
    result = imported("verl", text, name="f.sh")
    fates, values, texts = result.fates, result.of_keys("value"), result.of_keys("text")
    assert (fates["data.train_files"], values["data.train_files"]) == ("kept", "a")
    for key, value, name in (("data.val_files", ["$TEST", "b"], "$TEST"), ("trainer.nnodes", "$NODES", "$NODES")):
        assert (fates[key], values[key], name in texts[key]) == ("missing", value, True)
    assert not result.values.keys() & {"valid_dataset.path", "cluster.n_nodes"}
    result = imported("verl", text, "data.val_files=v", "trainer.nnodes=2", name="f.sh")
    assert "missing" not in result.fates.values()


def test_secrets_are_in_the_file_but_in_no_report(tmp_path, capsys):
    path, output = tmp_path / "f.yaml", tmp_path / "ours.yaml"
    path.write_text(
        "experiment_name: e\ntrial_name: t\nallocation_mode: sglang:d1+d1\ntrain_dataset: {path: d}\n"
        "stats_logger: {wandb: {mode: online, wandb_api_key: 0123456789abcdef}}\n"
        "actor: {path: m, optimizer: {lr: 1.0e-6}, scheduling_spec: [{env_vars: {API_TOKEN: fedcba9876}}]}\n"
    )
    words = ["config", "import", "areal", str(path), "-o", str(output), "--overwrite"]
    for more in (["--json"], []):
        assert run_command([*words, *more]) == 0
        shown = "".join(capsys.readouterr())
        assert "launcher.trainer_env_vars" in shown
        assert not [secret for secret in ("0123456789abcdef", "fedcba9876") if secret in shown]
    assert yaml.safe_load(output.read_text())["stats_logger"]["wandb"]["wandb_api_key"] == "0123456789abcdef"


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ("[f]", b"", "f.yaml"),
        ("[g]", b"defaults: [f]\n", "g.yaml"),
        ("[g]", b"defaults: [g]\n", "g.yaml"),
        ("[g]", b"data: {seed: \xff}\n", "g.yaml"),
    ],
    ids=["itself", "in a circle", "one that includes itself", "no text"],
)
def test_a_bad_file_of_defaults_is_named(first, second, named, tmp_path):
    (tmp_path / "f.yaml").write_text(f"defaults: {first}\n{TEXT}")
    (tmp_path / "g.yaml").write_bytes(second)
    with raises_code("config.unreadable_file", tmp_path / named):
        run_command(["config", "import", "verl", str(tmp_path / "f.yaml")])


def test_a_file_that_two_files_of_defaults_include_is_no_cycle(tmp_path, imported):
    for name, text in (("a", "defaults: [c]"), ("b", "defaults: [c]"), ("c", TEXT)):
        (tmp_path / f"{name}.yaml").write_text(text)
    result = imported("verl", "defaults: [a, b]\ndata: {train_files: t}\n")
    assert result.values["train_dataset.batch_size"] == 8
