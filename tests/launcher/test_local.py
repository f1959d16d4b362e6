import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from areal.api.errors import ConfigError, LaunchError
from areal.launcher import local
from areal.launcher.__main__ import launcher_of
from areal.launcher.local import read_command_line
from areal.launcher.placement import Machine
from areal.launcher.status import StatusLine, trained_steps
from areal.launcher.supervisor import Outcome
from areal.system.durable import publish_folder
from areal.system.heartbeat import Beat, read_beats, write_beats
from areal.system.run_paths import RunPaths
from tests.expect import raises_code
from tests.launcher.fake_backend import context_of

CONFIG = """
experiment_name: e
trial_name: t
allocation_mode: fsdp:d2
cluster:
  fileroot: {root}
train_dataset:
  path: org/data
  type: sft
  batch_size: 2
total_train_steps: 5
model:
  path: org/model
  dtype: float32
  optimizer:
    lr: 1.0e-3
launcher:
  stop_grace_s: 60.0
  status_interval_s: 0.1
my_section:
  behaviour: {behaviour}
  again: ${{experiment_name}}
"""

SCRIPT = """
import json, os, pathlib, sys, time
import yaml
from areal.api.errors import InputError
from areal.system.process import ProcessContext
assert "torch" not in sys.modules
context = ProcessContext.from_env()
run = pathlib.Path(context.run_dir)
config = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
def ready(done="ready"):
    folder = run / "names" / done
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f".{context.name}.new").write_text(str(os.getpid()))
    (folder / f".{context.name}.new").replace(folder / f"{context.name}.json")
if config["my_section"]["behaviour"] == "leave": sys.exit(0)
ready()
others = [f"trainer-{rank}" for rank in range(context.world_size)]
while not all((run / "names" / "ready" / f"{name}.json").exists() for name in others): time.sleep(0.01)
behaviour = config["my_section"]["behaviour"]
assert config["my_section"]["again"] == "e"
if behaviour == "fail" and context.index == 1:
    raise InputError("row 7 has no\\nanswer", code="data.bad_row")
if behaviour in ("fail", "hang"): time.sleep(600)
if behaviour == "fail_once":
    with open(run / "notes", "a") as file:
        file.write(f"{context.index} {context.run_id} {context.recover}\\n")
    if context.run_id == 0 and context.index: time.sleep(600)
    while context.run_id == 0 and (run / "notes").read_text().count("\\n") < 2: time.sleep(0.01)
    if context.run_id == 0: os.kill(os.getpid(), 9)
(run / "metrics.jsonl").write_text('{"step": 5, "loss": 0.5}\\n')
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    yield tmp_path
    for path in (tmp_path / "runs").rglob("ready/*.json"):
        assert not alive(int(path.read_text())), f"{path.stem} was left behind"


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(folder, *overrides, behaviour="end", module="areal.launcher.local"):
    (folder / "config.yaml").write_text(CONFIG.format(root=folder / "runs", behaviour=behaviour))
    return [
        *(sys.executable, "-m", module, str(folder / "script.py"), "--config", str(folder / "config.yaml")),
        *overrides,
    ]


def launch(folder, *overrides, **options):
    return subprocess.run(command(folder, *overrides, **options), capture_output=True, text=True, timeout=250)


def summary(folder):
    return json.loads((folder / "runs" / "e" / "t" / "summary.json").read_text())


def wait_until_ready(folder):
    deadline = time.monotonic() + 120
    signs = [folder / "runs" / "e" / "t" / "names" / "ready" / f"trainer-{rank}.json" for rank in (0, 1)]
    while not all(sign.exists() for sign in signs):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(sign.read_text()) for sign in signs]


def test_a_completed_run_is_not_overwritten(folder):
    began_s = time.monotonic()
    done = launch(folder)
    lasted_s = time.monotonic() - began_s
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("areal: run completed: ")
    result = summary(folder)
    assert result["status"] == "completed"
    assert result["exit_codes"] == {"trainer-0": 0, "trainer-1": 0}
    assert result["peak_rss_gib"] > 0.01
    assert 0 < result["seconds"] < lasted_s
    assert json.loads((folder / "runs" / "e" / "t" / "plan.json").read_text())["numbers"]["samples_per_step"] == 2
    again = launch(folder, "recover.mode=disabled")
    assert again.returncode == 2
    assert "(metrics.jsonl)" in again.stderr
    assert "[launch.earlier_run]" in again.stderr
    assert again.stderr.startswith("areal: error: ")
    planned = launch(folder, "recover.mode=disabled", "--dry-run", module="areal.launcher")
    assert (planned.returncode, "[launch.earlier_run]" in planned.stderr) == (2, True)
    replaced = launch(folder, "--overwrite", "--json")
    assert json.loads(replaced.stdout) == {"run": str(folder / "runs" / "e" / "t"), **summary(folder)}
    assert (replaced.returncode, summary(folder)["started_at"] >= result["started_at"]) == (0, True)


def test_failure_names_its_cause(folder):
    done = launch(folder, behaviour="fail")
    assert done.returncode == 1
    assert "areal: error: run failed: trainer-1 exited with 2: row 7 has no answer [data.bad_row] (log: " in done.stderr
    assert "Traceback" not in done.stderr
    assert summary(folder)["status"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_all_processes(folder, number):
    reset = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job that runs the tests ignores it
    argv = command(folder, behaviour="hang")
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, preexec_fn=reset) as launcher:
        pids = wait_until_ready(folder)
        launcher.send_signal(number)
        _, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 130
    assert "interrupted, all processes have ended" in stderr
    assert "areal: to continue: " in stderr
    assert not any(alive(pid) for pid in pids)
    assert summary(folder)["status"] == "interrupted"


@pytest.mark.parametrize(
    ("version", "total", "says"), [(4, 4, True), (3, 4, False), (None, 4, False), (4, None, False)]
)
def test_an_interruption_in_the_last_evaluation_says_that_all_steps_are_done(tmp_path, capsys, version, total, says):
    paths = RunPaths(tmp_path)
    paths.metrics.write_text('{"step": 3}\n')
    outcome = Outcome(
        status="interrupted",
        cause="",
        server_error=[],
        was_ready=True,
        exit_codes={},
        restarts={},
        peak_rss_bytes=0,
        episodes=None,
        alarms=[],
        steps_done=trained_steps(paths, {"version": version}),
    )
    assert local._report(outcome, paths, StatusLine(), "", total_steps=total) == 130
    assert ("all 4 train steps" in capsys.readouterr().err) == says


def test_a_launch_whose_shell_ignores_interrupts_prints_how_to_end_it(folder):
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    argv = command(folder, behaviour="hang")
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, preexec_fn=ignore) as launcher:
        wait_until_ready(folder)
        launcher.send_signal(signal.SIGINT)
        launcher.terminate()
        _, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 130
    assert f"kill {launcher.pid}" in stderr.splitlines()[0]


def test_children_of_a_killed_launcher_end_and_the_run_folder_is_free(folder):
    with subprocess.Popen(command(folder, behaviour="hang"), stderr=subprocess.PIPE, text=True) as launcher:
        pids = wait_until_ready(folder)
        second = launch(folder)
        assert second.returncode == 2
        assert f"is in use by the launcher with pid {launcher.pid} on host" in second.stderr
        launcher.kill()
    deadline = time.monotonic() + 120
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert launch(folder).returncode == 0


def test_launch_is_refused_while_a_child_of_a_dead_launcher_lives(folder, monkeypatch):
    monkeypatch.setattr(local, "_ORPHANS_LIMIT_S", 0.2)
    run = folder / "runs" / "e" / "t"
    context = context_of("trainer-0", run_dir=run, num_servers=0)
    (folder / "sleep.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    argv = [sys.executable, "-m", "areal.trainer", str(folder / "sleep.py")]
    with subprocess.Popen(argv, env=os.environ | context.to_env(), stdout=subprocess.PIPE) as left:
        try:
            assert left.stdout.readline() == b"up\n"
            with pytest.raises(LaunchError, match=rf"trainer-0 \(pid {left.pid}\)"):
                local.launch(local.read_command_line(command(folder)[3:]), local.LocalCluster(Machine(cores=2)))
        finally:
            left.kill()
    assert not (run / "plan.json").exists()


def test_killed_rank_starts_again_with_the_others(folder):
    done = launch(folder, "recover.mode=fault", "recover.freq_steps=1", behaviour="fail_once")
    assert done.returncode == 0, done.stderr
    assert "trainer-0 was killed by SIGKILL" in done.stderr
    assert "all trainer ranks restart in 0.5 s (restart 1 of at most 3 without progress)" in done.stderr
    assert "trainers continue from the beginning" in done.stderr
    notes = (folder / "runs" / "e" / "t" / "notes").read_text().splitlines()
    assert sorted(notes) == ["0 0 False", "0 1 False", "1 0 False", "1 1 False"]
    assert len(summary(folder)["restarts"]["trainers"]) == 1


def test_after_a_kill_of_all_processes_the_same_command_continues(folder):
    recover = ["recover.mode=auto", "recover.freq_steps=1"]
    with subprocess.Popen(command(folder, *recover, behaviour="hang"), stderr=subprocess.PIPE) as launcher:
        pids = wait_until_ready(folder)
        for pid in [*pids, launcher.pid]:
            os.kill(pid, signal.SIGKILL)
    paths = RunPaths(folder / "runs" / "e" / "t")
    (paths.recover / "next").mkdir(parents=True)
    publish_folder(paths.recover / "next", paths.recover / "step-000003")
    paths.requests.mkdir()
    (paths.requests / "1.request.json").write_text("{}")
    write_beats(paths.alive, {"trainer-7": Beat(pid=1, beats=1, doing="", for_s=0.0, step=None)})
    done = launch(folder, *recover, behaviour="end")
    assert done.returncode == 0, done.stderr
    assert json.loads(paths.plan.read_text())["recover"]
    assert f"areal: continues the run in {paths.root}, trainers from step-000003" in done.stderr
    assert not paths.requests.exists()
    assert "trainer-7" not in read_beats(paths.alive)
    again = launch(folder, *recover, behaviour="leave")  # a run that was complete: its trainers end at once
    assert again.returncode == 0, again.stderr


def test_continuing_without_a_checkpoint_is_reported(folder):
    recover = ["recover.mode=auto", "recover.freq_steps=1"]
    assert "areal: continues" not in launch(folder, *recover, behaviour="end").stderr
    RunPaths(folder / "runs" / "e" / "t").metrics.write_text("{}\n")
    done = launch(folder, *recover, behaviour="end")
    assert "trainers from the beginning" in done.stderr


def test_dry_run_prints_the_plan_and_starts_nothing(folder):
    done = launch(folder, "--dry-run", module="areal.launcher")
    assert done.returncode == 0, done.stderr
    assert "trainer-1: cpu" in done.stdout
    assert "samples per train step: 2" in done.stdout
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.pth=x"], "model.pth: unknown key"),
        (["allocation_mode=fsdp:dx"], "allocation_mode: "),
        (["cluster.n_nodes=2"], "cluster.n_nodes=2: the local launcher runs on one machine"),
        (["model.path=/no/model"], "model.path: /no/model is not a folder"),
        (["train_dataset.path=no.jsonl"], "train_dataset.path: no.jsonl does not exist"),
        (["launcher.trainer_env_vars=A"], "NAME=value"),
    ],
)
def test_a_bad_configuration_is_reported_before_any_start(folder, overrides, says):
    with pytest.raises(ConfigError) as error:
        local.launch(local.read_command_line(command(folder, *overrides)[3:]), local.LocalCluster(Machine(cores=2)))
    assert says in str(error.value)
    assert not (folder / "runs").exists()


def test_unknown_keys_are_refused_without_a_script(folder):
    argv = [word for word in command(folder) if not word.endswith("script.py")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert "my_section: unknown key" in done.stderr


def test_launcher_needs_neither_torch_nor_aiohttp():
    code = "import sys, areal.launcher.local; assert not {'torch', 'aiohttp'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", ""])
def test_seconds_per_step_are_a_positive_number(text):
    with raises_code("config.bad_override"):
        read_command_line(["--config", "examples/quickstart/sft.yaml", "--dry-run", f"--step-s={text}"])


def test_seconds_per_step_reach_the_launch_and_every_launcher_skips_the_word():
    words = ["--config", "examples/quickstart/sft.yaml", "--dry-run", "--step-s=90"]
    assert read_command_line(words).step_s == 90.0
    assert launcher_of(words) == ("local", words)


def test_one_line_names_the_keys_without_effect(caplog):
    words = ["--config", "examples/quickstart/sft.yaml", "--dry-run", "enable_offload=true"]
    assert launcher_of(words) == ("local", words)
    assert caplog.records == []
    read_command_line(words)
    (line,) = caplog.messages
    assert "enable_offload" in line


def test_a_launch_has_the_numbers_of_a_script_as_they_are_written():
    words = ["train.py", "--config", "examples/quickstart/sft.yaml", "version=1.50"]
    result = read_command_line(words)
    assert (result.extras, result.numbers) == ({"version": 1.5}, {"version": "1.50"})


def test_a_sweep_runs_every_combination_and_compares_them(folder):
    words = ["--sweep", "seed=1,2", "--parallel", "2"]
    done = launch(folder, *words, behaviour="end", module="areal.launcher")
    assert done.returncode == 0, done.stderr
    assert "run 2 of 2: seed=2" in done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("  seed:")] == ["  seed: 1 | 2"]
    runs = folder / "runs" / "e"
    for name in ("t_0", "t_1"):
        assert json.loads(RunPaths(runs / name).summary.read_bytes())["status"] == "completed"
    assert (runs / "t_0.log").exists()


def test_a_sweep_is_checked_before_its_first_run_and_has_the_worst_status(folder):
    done = launch(folder, "--sweep", "model.optimizer.lr=1e-3,much", behaviour="end", module="areal.launcher")
    assert done.returncode == 2
    assert "model.optimizer.lr: 'much' is not allowed" in done.stderr
    assert not (folder / "runs").exists()
    done = launch(folder, "--sweep", "my_section.behaviour=fail,end", behaviour="end", module="areal.launcher")
    assert done.returncode == 1, done.stderr
    assert "run 2 of 2 ended with status 0" in done.stderr
    assert not (folder / "runs" / "e" / "t_0.log").exists()  # one after the other, each on the screen
