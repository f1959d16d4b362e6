"""What the supervisor starts again after a death, with small scripted processes in place of the real ones."""

import json
import re
import signal
import threading
import time

import pytest

from areal.launcher import backend, restart_rules, supervisor
from areal.launcher import status as liveness
from tests.expect import in_order
from tests.launcher.fake_run import SERVE, BeatClock, alive

UNTIL_DONE = "ready(); wait_for('done')"
DIES_ONCE = "if first('died'): ready(); die()\n"


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(restart_rules, "_BACKOFF_S", 0.02)


def test_a_killed_server_restarts_alone(make_run):
    run = make_run(stop_grace_s=60.0)
    waits = "note(name); " + UNTIL_DONE
    outcome = run(controller=waits, server_0=DIES_ONCE + "write(names / 'done', ''); " + SERVE, trainer_0=waits)
    assert outcome.status == "completed"
    assert list(outcome.restarts) == ["server-0"]
    assert "SIGKILL" in outcome.restarts["server-0"][0]
    assert sorted(run.notes()) == ["controller", "trainer-0"], "another process was started again"
    assert in_order(run.screen.getvalue(), "server-0", "0.02 s", 1, 3)


PART = """
new = first("started-" + name)
if name == "server-0":
    note("server-0 " + str((names / "parts" / "0.json").exists()))
    write(names / "parts" / "0.json", "{}"); ready()
    live()
note(name); ready(); wait_for("ready/server-0.json"); wait_for("ready/server-1.json")
if new: die()
write(names / "served", ""); live()
"""


def test_when_one_part_of_a_server_dies_all_its_parts_restart(make_run):
    run = make_run()
    trainer = "wait_for('served'); ready()"
    outcome = run(trainer_0=trainer, server_0=PART, server_0_part_1=PART, server_1="note(name);" + SERVE)
    assert outcome.status == "completed"
    assert list(outcome.restarts) == ["server-0"]
    assert sorted(run.notes()) == ["server-0 False"] * 2 + ["server-0-part-1"] * 2 + ["server-1"]


def test_a_killed_controller_restarts_alone(run):
    waits = "note(name); " + UNTIL_DONE
    outcome = run(controller=DIES_ONCE + "ready(); write(names / 'done', ''); live()", server_0=SERVE, trainer_0=waits)
    assert outcome.status == "completed"
    assert list(outcome.restarts) == ["controller"]
    assert run.notes() == ["trainer-0"]


SERVED = "wait_for('ready/controller.json'); wait_for('ready/server-0.json')\n"
TRAINER = """
note(f"{name} {context['run_id']} {context['recover']}")
ready()
if context["run_id"] == 0:
    wait_for("ready/trainer-0.json"); wait_for("ready/trainer-1.json")
    if name == "trainer-1": die()
    live(100); note("outlived the others")
"""


def test_after_a_killed_rank_all_ranks_restart_from_the_checkpoint(run):
    run.write_checkpoint(12)
    (run.paths.recover / "step-000012").rename(run.paths.recover / ".step-000012.old")  # killed while it replaced it
    noted = "note(name); " + SERVE
    outcome = run(controller=noted, server_0=noted, trainer_0=SERVED + TRAINER, trainer_1=SERVED + TRAINER)
    assert outcome.status == "completed"
    assert list(outcome.restarts) == ["trainers"]
    assert sorted(run.notes()) == [
        "controller",
        "server-0",
        "trainer-0 0 False",
        "trainer-0 1 True",
        "trainer-1 0 False",
        "trainer-1 1 True",
    ]
    lines = run.screen.getvalue().splitlines()
    killed = [line for line in lines if "SIGKILL" in line]
    assert all("trainer-1" in line and "trainer-0" not in line for line in killed), "only the first death is reported"
    assert killed
    assert in_order(run.screen.getvalue(), "SIGKILL", "step-000012")


def test_without_a_checkpoint_trainers_start_from_the_beginning(run):
    assert run(trainer_0=TRAINER, trainer_1=TRAINER).status == "completed"
    assert sorted(run.notes())[-1] == "trainer-1 1 False"
    assert "step-" not in run.screen.getvalue()


def test_without_recovery_a_dead_rank_ends_the_run(make_run):
    run = make_run(recover="disabled")
    outcome = run(trainer_0=TRAINER, trainer_1=TRAINER)
    assert in_order(outcome.cause, "trainer-1", "SIGKILL", "recover.mode=disabled")
    assert outcome.restarts == {}


@pytest.mark.parametrize(
    ("role", "death", "comes_back"),
    [
        ("server_0", "die()", True),  # a kill before the ready sign
        *((role, "sys.exit(1)", False) for role in ("controller", "server_0", "trainer_0")),
        ("controller", "ready(); sys.exit(1)", True),
        ("trainer_0", "ready(); sys.exit(1)", True),
        ("server_0", "ready(); print('areal: error: fix it'); sys.exit(2)", False),
        ("trainer_0", "sys.exit(75)", True),
    ],
)
def test_exit_codes_that_end_the_run(run, role, death, comes_back):
    codes = {"controller": SERVE, "server_0": SERVE, "trainer_0": UNTIL_DONE}
    codes[role] = f"if first('died'): {death}\nready(); write(names / 'done', ''); " + codes[role]
    outcome = run(**codes)
    assert outcome.status == ("completed" if comes_back else "failed")
    assert sum(map(len, outcome.restarts.values())) == int(comes_back)


def test_entries_of_dead_processes_are_removed_before_a_restart(run):
    look = (
        "traces = ['names/servers/0.json', 'names/ready/server-0.json']\n"
        "if first('died'): beat(); write(names / 'servers' / '0.json', '{}'); ready(); die()\n"
        "note(str([t for t in traces if (run / t).exists()])); write(names / 'done', ''); "
    )
    assert run(controller=SERVE, server_0=look + SERVE, trainer_0=UNTIL_DONE).status == "completed"
    assert run.notes() == ["[]"]


def test_a_process_that_dies_repeatedly_ends_the_run(run):
    dies = "ready(); print('areal: error: no memory'); sys.exit(1)"
    outcome = run(controller=SERVE, server_0=dies, trainer_0=SERVE)
    assert outcome.status == "failed"
    assert in_order(outcome.cause, "server-0", 1, "no memory", "recover.retries=3")
    assert len(outcome.restarts["server-0"]) == 3


def test_a_new_train_step_resets_restart_counts(make_run, monkeypatch):
    monkeypatch.setattr(liveness, "_LOOK_INTERVAL_S", 0.0)  # it looks before it handles deaths
    run = make_run(retries=1)  # and three deaths: between two of them the run gets a step further
    trainer = """
ready()
while (step := len(list(names.glob("life*")))) <= 3: beat(step); time.sleep(.02)
"""
    server = """
life = len(list(names.glob("life*")))
write(names / f"life{life}", ""); ready()
def said():
    try: return json.loads((run / "alive.json").read_text())["trainer-0"]["step"]
    except (OSError, KeyError): return 0
while said() <= life: time.sleep(.01)
if life < 3: die()
live()
"""
    outcome = run(controller=SERVE, server_0=server, trainer_0=trainer)
    assert outcome.status == "completed", outcome.cause
    assert len(outcome.restarts["server-0"]) == 3


def test_a_full_disk_prevents_restarts(run, monkeypatch):
    monkeypatch.setattr("areal.launcher.supervisor.disk_problem", lambda _: "the disk is full: make room")
    outcome = run(controller=SERVE, server_0="ready(); die()", trainer_0=SERVE)
    assert in_order(outcome.cause, "the disk is full: make room", "server-0", "SIGKILL")
    assert "\n" not in outcome.cause
    assert outcome.restarts == {}


def test_successful_trainers_end_the_run_without_the_controller(run, monkeypatch):
    monkeypatch.setattr(restart_rules, "_BACKOFF_S", 60.0)
    controller = "ready(); wait_for('ready/trainer-0.json'); write(names / 'dead', ''); die()"
    trainer = "ready(); wait_for('dead'); time.sleep(.3)"
    outcome = run(controller=controller, server_0=SERVE, trainer_0=trainer)
    assert outcome.status == "completed"


def test_a_finished_controller_restarts_for_unfinished_trainers(run):
    controller = "note('controller'); ready(); wait_for('finish'); (names / 'finish').unlink()"
    trainer = (
        "ready(); wait_for('ready/controller.json'); controller = pid_of('controller'); write(names / 'finish', '')\n"
        "while (names / 'finish').exists(): time.sleep(.01)\n"
        "if context['run_id'] == 0: wait_for_the_end_of(controller); die()"
    )
    outcome = run(controller=controller, server_0=SERVE, trainer_0=trainer)
    assert outcome.status == "completed"
    assert run.notes() == ["controller", "controller"]


def test_trainers_of_a_completed_run_may_end_before_they_are_ready(run):
    run.write_checkpoint(3)
    ends = "note(str(context['recover']))\nif context['run_id'] == 0: die()"
    assert run(controller="time.sleep(600)", server_0="time.sleep(600)", trainer_0=ends).status == "completed"
    assert run.notes() == ["False", "True"]


HANGS = "if first('hung'): ready(); live()\n"
LIVES_UNTIL_DONE = "ready(); live(until='done')"


@pytest.mark.parametrize("name", ["controller", "server-0", "trainer-1"])
def test_stopped_process_is_found_killed_and_started_again(make_run, set_clock, name):
    run = make_run(hang_s=1.0, ready_timeout_s=1e9)
    set_clock(run, BeatClock(run, silent=name))
    codes = dict.fromkeys(("controller", "server_0", "trainer_0", "trainer_1"), LIVES_UNTIL_DONE) | {"server_0": SERVE}
    again = "ready(); write(names / 'done', ''); " + ("live()" if name == "server-0" else "")
    codes[name.replace("-", "_")] = HANGS + again
    pids = []
    thread = threading.Thread(target=lambda: pids.append(run.stop(name)))
    thread.start()
    outcome = run(**codes)
    thread.join()
    assert outcome.status == "completed", outcome.cause
    assert list(outcome.restarts) == ["trainers" if name == "trainer-1" else name]
    text = r"hung: no heartbeat for [12] s \(launcher.hang_s\), the last one was 'work' for 1 s, and was killed"
    assert re.search(f"{name} {text}", run.screen.getvalue())
    assert not alive(pids[0])


def test_process_that_hangs_but_runs_writes_its_stacks_first(make_run, set_clock):
    run = make_run(hang_s=0.5, ready_timeout_s=1e9)

    def is_writing():
        path = run.paths.stacks_of("controller")
        text = path.read_text() if path.exists() else ""
        return bool(text) and "most recent call first" not in text

    set_clock(run, BeatClock(run, silent="controller", holds=is_writing))
    hangs = """
import faulthandler
if first('hung'):
    (run / 'stacks').mkdir(); faulthandler.register(signal.SIGUSR1, open(run / 'stacks' / (name + '.txt'), 'w'))
    ready(); beat(); time.sleep(600)
ready(); write(names / 'done', '')
"""
    outcome = run(controller=hangs, server_0=SERVE, trainer_0=LIVES_UNTIL_DONE)
    assert outcome.status == "completed"
    assert "most recent call first" in run.paths.stacks_of("controller").read_text()


def test_a_process_without_heartbeats_is_not_hung(make_run):
    outcome = make_run(hang_s=0.2)(trainer_0="ready(); time.sleep(1.5)")
    assert (outcome.status, outcome.restarts) == ("completed", {})


def test_a_process_that_is_not_ready_in_time_after_a_restart_counts_as_dead(make_run, set_clock):
    run = make_run(ready_timeout_s=200.0)
    set_clock(run, lambda: time.monotonic() + 300.0 * (run.names / "late").exists())
    server = (
        "if first('died'): wait_for('ready/controller.json'); wait_for('ready/trainer-0.json'); ready(); die()\n"
        "if first('late'): time.sleep(600)\nready(); write(names / 'done', ''); live()"
    )
    outcome = run(controller=SERVE, server_0=server, trainer_0=UNTIL_DONE)
    assert outcome.status == "completed"
    assert "was not ready after 200 s (launcher.ready_timeout_s), and was killed" in outcome.restarts["server-0"][1]


def test_a_restarted_controller_gets_the_number_of_servers(run):
    controller = DIES_ONCE + "note(str(context['num_servers'])); ready(); write(names / 'done', ''); live()"
    run(controller=controller, server_0=SERVE, server_1=SERVE, trainer_0=UNTIL_DONE)
    assert run.notes() == ["2"]


def test_the_outcome_can_be_written_as_json(make_run):
    run = make_run(stop_grace_s=60.0)
    controller = DIES_ONCE + "ready(); write(names / 'done', '')"
    outcome = run(controller=controller, server_0=SERVE, trainer_0=UNTIL_DONE)
    assert json.loads(json.dumps(outcome.restarts)) == outcome.restarts
    assert outcome.exit_codes == {"controller": 0, "server-0": -signal.SIGTERM, "trainer-0": 0}


def test_a_stall_is_explained(make_run):
    run = make_run(stall_s=1.0, status_interval_s=0.1)

    def end_after_the_report():
        run.until(lambda: str(run.folder / "stacks") in run.screen.getvalue())
        (run.names / "done").touch()

    thread = threading.Thread(target=end_after_the_report)
    thread.start()
    outcome = run(server_0=SERVE, controller=SERVE, trainer_0="ready(); live(step=7, until='done')")
    thread.join()
    assert outcome.status == "completed"


def test_a_process_that_survives_sigkill_is_reported(make_run, set_clock, monkeypatch):
    monkeypatch.setattr(supervisor, "_STUCK_S", 0.2)
    monkeypatch.setattr(backend.os, "killpg", lambda pid, number: None)
    run = make_run(hang_s=0.5, ready_timeout_s=1e9)
    set_clock(run, BeatClock(run, silent="server-0"))

    def interrupt():
        run.until(lambda: "0.2 s" in run.screen.getvalue())
        run.interruptions.add(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = run(controller=SERVE, server_0="ready(); beat(); time.sleep(600)", trainer_0=SERVE)
    thread.join()
    assert outcome.status == "interrupted"
    assert sum(in_order(line, "server-0", "0.2 s", "SIGKILL") for line in run.screen.getvalue().splitlines()) == 1


def test_a_server_without_restarts_left_is_removed_while_another_one_serves(make_run):
    run = make_run(retries=1)
    dies = (
        "wait_for('ready/server-0.json'); ready(); write(names / ('once' if first('died') else 'start-1'), ''); die()"
    )
    trainer = "ready(); wait_for('start-1')\nwhile (names / 'ready' / 'server-1.json').exists(): time.sleep(0.01)"
    outcome = run(server_0=SERVE, server_1=dies, trainer_0=trainer)
    assert outcome.status == "completed"
    assert len(outcome.restarts["server-1"]) == 1
    assert outcome.exit_codes["server-1"] == -signal.SIGKILL
