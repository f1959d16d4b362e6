"""The command that shows the logs of all processes of a run."""

import json
import subprocess
import sys

import pytest

from areal.launcher import logs
from areal.launcher.preflight import run_lock
from areal.system.run_paths import RunPaths
from tests.expect import raises_code


@pytest.fixture
def paths(tmp_path):
    made = RunPaths(tmp_path / "run")
    made.logs.mkdir(parents=True)
    made.log_of("server-0").write_text("starting\n2026-01-01 10:00:01.000 a\n2026-01-01 10:00:04.000 b\n  of b\n")
    made.log_of("trainer-0").write_text("2026-01-01 10:00:02.000 c\nwithout end")
    return made


def shown(capsys):
    return [tuple(part.strip() for part in line.split("|", 1)) for line in capsys.readouterr().out.splitlines()]


def test_lines_of_all_processes_are_in_the_order_of_their_times(paths, capsys):
    logs.show(paths, [], follow=False)
    assert [(name, text.rpartition(" ")[2]) for name, text in shown(capsys)] == [
        ("server-0", "starting"),
        ("server-0", "a"),
        ("trainer-0", "c"),
        ("trainer-0", "end"),
        ("server-0", "b"),
        ("server-0", "b"),
    ]


def test_a_name_shows_one_process_and_the_plan_names_its_node(paths, capsys):
    processes = [{"name": name, "host": {"node": node}} for name, node in (("server-0", "n1"), ("trainer-0", "n2"))]
    paths.plan.write_text(json.dumps({"processes": processes}))
    logs.show(paths, ["trainer-0"], follow=False)
    assert {name for name, _ in shown(capsys)} == {"trainer-0@n2"}


def test_a_followed_log_gives_each_complete_line_once(paths):
    log = logs.FollowedLog(paths.log_of("trainer-0"))
    assert len(log.new_lines(is_last=False)) == 1
    with open(paths.log_of("trainer-0"), "a") as file:
        file.write(" now\n")
    assert log.new_lines(is_last=False) == ["without end now"]
    assert log.new_lines(is_last=False) == []


def test_following_ends_with_the_launcher_of_the_run(paths):
    argv = [sys.executable, "-m", "areal.launcher.logs", str(paths.root), "--follow"]
    with run_lock(paths):
        command = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert "starting" in command.stdout.readline()
        with open(paths.log_of("trainer-0"), "a") as file:
            file.write(" at last\n")
        assert any("without end at last" in line for line in iter(command.stdout.readline, ""))
        assert command.poll() is None
    with command:
        assert command.wait(60) == 0


@pytest.mark.parametrize("words", [["nowhere"], ["run", "server-9"]])
def test_a_folder_or_process_without_logs_is_refused(paths, monkeypatch, words):
    monkeypatch.chdir(paths.root.parent)
    monkeypatch.setattr(sys, "argv", ["logs", *words])
    with raises_code("launch.no_run_folder"):
        logs.main()
