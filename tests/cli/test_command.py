"""The command `areal`: its table, help, exit status, and the choice of the launcher."""

import inspect
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from areal.cli.main import COMMANDS, help_text, run_command
from areal.launcher.__main__ import launcher_of
from areal.system.run_paths import run_folder
from tests.expect import raises_code

QUICKSTART = str(Path(__file__).parents[2] / "examples" / "quickstart" / "grpo.yaml")


def test_the_help_fits_one_screen_and_names_every_subcommand():
    lines = help_text().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert [name for line in lines if line.startswith("  ") for name in line.split()[:1]] == [c.name for c in COMMANDS]


def test_the_page_of_commands_has_a_row_for_each():
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1].split()[1] for line in page.splitlines() if line.startswith("| `areal ")]
    assert sorted(rows) == sorted(command.name for command in COMMANDS)


def test_the_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['areal', '--help']\n"
        "import runpy\n"
        "try: runpy.run_module('areal', run_name='__main__')\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, help_text() + "\n"), done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_subcommand_has_a_help_and_prints_json(command, capsys):
    module, _, name = command.function.partition(":")
    assert len(inspect.signature(getattr(import_module(module), name)).parameters) == 1
    try:
        status = run_command([command.name, "--help"])
    except SystemExit as ended:
        status = ended.code
    assert status in (0, None)
    text = capsys.readouterr().out
    assert f"areal {command.name}" in text
    assert "--json" in text


def test_the_plan_of_a_run_is_one_line_of_json(capsys):
    words = ["run", "--config", QUICKSTART, "--dry-run", "actor.path=/no/such/model"]
    with raises_code("launch.missing_inputs"):
        run_command(words)
    assert "trainer-0" in capsys.readouterr().out
    with raises_code("launch.missing_inputs"):
        run_command([*words, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [process["name"] for process in result["processes"]] == ["controller", "server-0", "trainer-0"]
    assert result["problems"]


def test_the_help_of_a_run_fits_one_screen(capsys):
    helps = [one_screen(["run", "--help"], capsys), one_screen(["run", "--config", QUICKSTART, "-h"], capsys)]
    assert helps[0] == helps[1]
    assert all(f" {flag}" in helps[0] for flag in ("--dry-run", "--json", "--overwrite", "--launcher"))


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        ("local", ["AREAL_SERVER_TOKEN"]),
        ("ray", ["RAY_ADDRESS"]),
        ("ssh", ["--hosts", "--ssh-option", "--python"]),
        ("slurm", ["--sweep", "--parallel", "--detach", "--attach"]),
    ],
)
def test_the_help_of_a_launcher_fits_one_screen_and_leads_to_the_options(launcher, flags, capsys):
    text = one_screen(["run", "--launcher", launcher, "--help"], capsys)
    assert [flag for flag in (*flags, "areal run --help", "areal config SECTION") if flag not in text] == []
    for words in (["train.py", "--config", QUICKSTART, "--help"], [flags[0], "--help"]):
        with pytest.raises(SystemExit):
            import_module(f"areal.launcher.{launcher}").run_command(words)
        assert capsys.readouterr().out == text


def one_screen(words, capsys):
    """What a help prints: at most 24 lines of 80 columns that begin with the usage."""
    try:
        status = run_command(words)
    except SystemExit as ended:
        status = ended.code
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert (status, lines[0][:17]) == (0, "usage: areal run ")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    return text


def test_the_help_of_attach_names_the_command(capsys):
    with pytest.raises(SystemExit):
        run_command(["run", "--attach", "--help"])
    assert capsys.readouterr().out.startswith("usage: areal run --attach RUN")


def test_wrong_usage_has_a_code_and_a_status(capsys):
    with raises_code("command.unknown"):
        run_command(["adit"])
    assert run_command([]) == run_command(["run"]) == 2
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit) as ended:
        run_command(["config"])
    assert ended.value.code == 2


def test_a_run_is_a_folder_or_a_name_below_the_default_fileroot(tmp_path, monkeypatch):
    assert run_folder(str(tmp_path)) == tmp_path
    assert run_folder("no/such") == Path("no/such")
    (tmp_path / "experiment" / "trial").mkdir(parents=True)
    monkeypatch.setattr("areal.system.run_paths.DEFAULT_FILEROOT", tmp_path)
    assert run_folder("experiment/trial") == tmp_path / "experiment" / "trial"
    (tmp_path / "runs" / "own" / "trial").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert run_folder("own/trial") == Path("runs/own/trial")


@pytest.mark.parametrize("command", ["show", "watch", "trace", "export", "compare", "replay"])
def test_every_command_names_a_run_that_does_not_exist(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises_code("launch.no_run_folder", "no/such"):
        run_command([command, "no/such"])


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        (["--config", QUICKSTART, "--dry-run", "--json"], "local"),
        (["--config", QUICKSTART, "--overwrite"], "local"),
        (["--config", QUICKSTART, "launcher.type=slurm", "--sweep", "seed=1,2", "--detach"], "slurm"),
        (["my.py", "--config", QUICKSTART], "local"),
        (["--dry-run", "my.py", "--config", QUICKSTART, "my_key=1"], "local"),
        (["--config", QUICKSTART, "launcher.type=slurm"], "slurm"),
        (["--config", QUICKSTART, "--hosts", "a,b"], "ssh"),
        (["--config", QUICKSTART, "--hosts=a,b", "--launcher=ray"], "ray"),
        (["--launcher", "slurm", "--attach", "RUN"], "slurm"),
        (["--attach", "--help"], "local"),
        (["--help", "actor"], "local"),
    ],
)
def test_the_launcher_is_named_or_follows_from_the_configuration(words, launcher):
    result, rest = launcher_of(words)
    assert result == launcher
    assert not [word for word in rest if word.startswith("--launcher")]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--config", QUICKSTART, "cluster.n_nodes=2"], "launch.several_nodes"),
        (["--config", QUICKSTART, "--launcher"], "config.bad_override"),
        (["--config", QUICKSTART, "--launcher", "k8s"], "config.bad_reference"),
        (["--config", QUICKSTART, "actor.eps_clib=1"], "config.unknown_key"),
    ],
)
def test_a_launcher_that_cannot_be_chosen_is_an_error(words, code):
    with raises_code(code):
        launcher_of(words)


def test_config_prints_what_a_run_would_use_without_secrets(text_of, json_of, tmp_path):
    words = ["config", "--config", QUICKSTART, "actor.eps_clip=0.3", "stats_logger.wandb.wandb_api_key=geheim"]
    assert (result := json_of(*words))["actor"]["eps_clip"] == 0.3
    assert "geheim" not in str(result)
    (tmp_path / "config.yaml").write_text(text_of(*words))
    result = json_of("config", tmp_path, "seed=7")
    assert (result["seed"], result["actor"]["eps_clip"]) == (7, 0.3)


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        ("actor", "actor.optimizer.lr"),
        ("model", "model.optimizer.lr"),
        ("dpo", "dpo.beta: number above 0; default 0.1"),
        ("rw", "rw.center_coef"),
        ("sft.train_on", "last | assistant | all"),
    ],
)
def test_config_explains_the_options_of_every_kind(option, shown, text_of):
    assert shown in text_of("config", option)


def test_config_explains_an_option(json_of):
    result = json_of("config", "rollout.on_stale")
    assert (result["default"], result["choices"]) == ("train", ["train", "mask", "drop", "wait"])


@pytest.mark.parametrize(
    ("option", "suggestion"),
    [
        ("rollout.on_stail", "rollout.on_stale?"),
        ("actor.lr", "actor.optimizer.lr?"),
        ("rollout.n", "gconfig.n_samples?"),
        ("seed.", "seed?"),
        ("zzzz.qqqq", "actor, "),
    ],
)
def test_config_suggests_an_option_for_an_unknown_one(option, suggestion):
    with raises_code("config.unknown_key", suggestion):
        run_command(["config", option])


def test_a_run_without_a_ledger_is_one_error_of_each_reader(tmp_path, capsys):
    for words in (["audit"], ["stats"]):
        assert run_command([*words, str(tmp_path)]) == 2
        assert capsys.readouterr().err.endswith("[ledger.not_found]\n")
    for words, code in ((["trace"], "data.no_traces"), (["replay"], "replay.no_run")):
        with raises_code(code):
            run_command([*words, str(tmp_path)])
