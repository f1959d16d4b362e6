import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from areal.launcher import supervisor
from areal.launcher.supervisor import Interruptions
from tests.expect import in_order
from tests.launcher.fake_run import DONE, SERVE, alive


def test_run_ends_when_controller_and_trainers_end(make_run):
    run = make_run(stop_grace_s=60.0)
    outcome = run(controller=DONE, server_0=SERVE, trainer_0=DONE, trainer_1=DONE)
    assert outcome.status == "completed"
    assert outcome.was_ready
    assert outcome.exit_codes == {"controller": 0, "server-0": -signal.SIGTERM, "trainer-0": 0, "trainer-1": 0}
    assert outcome.restarts == {}
    assert run.log("trainer-1") == "bye\n"
    assert outcome.peak_rss_bytes > 10 * 2**20


def test_the_first_death_is_reported_first_and_stops_all(make_run):
    run = make_run(stop_grace_s=60.0)
    fails = "ready(); wait_for('ready/server-0.json'); print('areal: error: row 7 has no answer'); sys.exit(2)"
    outcome = run(controller=SERVE, server_0=SERVE, trainer_0=fails)
    assert outcome.status == "failed"
    assert in_order(outcome.cause, "trainer-0", 2, "row 7 has no answer", "trainer-0.log")
    assert outcome.exit_codes["trainer-0"] == 2
    assert outcome.exit_codes["controller"] == -signal.SIGTERM


def test_cause_is_the_earliest_of_deaths_that_follow_each_other(run, monkeypatch):
    monkeypatch.setattr(supervisor, "_SETTLE_S", 100.0)
    first = (
        "ready(); wait_for('ready/trainer-0.json'); other = pid_of('trainer-0')\n"
        "print('gone bad', flush=True); time.sleep(.02); write(names / 'dead', '')  # logs tell times in ticks\n"
        "wait_for_the_end_of(other); sys.exit(3)"
    )
    then = "ready(); wait_for('dead'); print('areal: error: connection lost'); sys.exit(2)"
    outcome = run(trainer_0=then, trainer_1=first)
    first, second = outcome.cause.splitlines()
    assert in_order(first, "trainer-1", 3, "gone bad")
    assert in_order(second, "trainer-0", 2, "connection lost")


def test_traceback_is_quoted(run):
    outcome = run(trainer_0="raise ValueError('a bug of ours')")
    assert in_order(outcome.cause, "trainer-0", 1, "ValueError: a bug of ours", "\n    Traceback")


def test_killed_trainer_is_named_with_its_signal(make_run):
    outcome = make_run(retries=0)(trainer_0="print('WARNING of long ago'); ready(); die()", controller=SERVE)
    assert in_order(outcome.cause, "trainer-0", "SIGKILL", "trainer-0.log")
    assert "long ago" not in outcome.cause, "its last line is not the reason of its death"


def test_server_that_never_got_ready_ends_the_run_at_once(run):
    outcome = run(controller=SERVE, server_0="print('areal: error: no such model'); sys.exit(2)", trainer_0=SERVE)
    assert in_order(outcome.cause, "server-0", 2, "no such model")
    assert outcome.restarts == {}
    assert not outcome.was_ready


def test_process_that_is_not_ready_in_time_is_named(make_run):
    outcome = make_run(ready_timeout_s=0.5)(trainer_0="print('loading'); time.sleep(600)")
    assert in_order(outcome.cause, "trainer-0", "0.5 s", "launcher.ready_timeout_s")


def test_the_status_names_the_awaited_process(run):

    def continue_after_the_status():
        run.until(lambda: "trainer-0" in run.screen.getvalue())
        run.names.mkdir(exist_ok=True)
        (run.names / "named").touch()

    thread = threading.Thread(target=continue_after_the_status)
    thread.start()
    assert run(trainer_0="wait_for('named'); ready()").status == "completed"
    thread.join()


def test_trainer_that_hangs_after_the_others_ended_is_named(make_run, set_clock):
    run = make_run(ready_timeout_s=200.0)
    looks = itertools.count()

    def leaps_once_trainer_0_has_ended():
        return time.monotonic() + (10.0 * next(looks) if (run.names / "ended").exists() else 0.0)

    set_clock(run, leaps_once_trainer_0_has_ended)
    wait_for_the_end = "other = pid_of('trainer-0'); write(names / 'read', ''); wait_for_the_end_of(other)"
    outcome = run(
        trainer_0="ready(); wait_for('read')",
        trainer_1=f"ready(); wait_for('ready/trainer-0.json'); {wait_for_the_end}; write(names / 'ended', ''); live()",
    )
    assert in_order(outcome.cause, "trainer-1", "200 s")
    assert "trainer-0" not in outcome.cause


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
write(names / "grandchild", str(child.pid))
ready(); time.sleep(600)
"""


@pytest.mark.parametrize("grace_s", [0.2, 1000.0])
def test_interruption_leaves_no_process(make_run, grace_s):
    run = make_run(stop_grace_s=grace_s)
    pids = []

    def interrupt():
        polite = [run.pid_of(name) for name in ("controller", "trainer-0")]
        pids.extend([*polite, run.pid_of("server-0"), int((run.names / "grandchild").read_text())])
        run.interruptions.add(signal.SIGINT)
        if grace_s > 1:  # impatient: the second request ends the polite part
            run.until(lambda: not any(alive(pid) for pid in polite))
            run.interruptions.add(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = run(controller=SERVE, server_0=STUBBORN, trainer_0=SERVE)
    thread.join()
    assert outcome.status == "interrupted"
    assert in_order(run.screen.getvalue(), 3, f"{grace_s:g} s")
    assert outcome.exit_codes["server-0"] == -signal.SIGKILL
    if grace_s > 1:  # in a short time one that gets no CPU is killed, too
        assert outcome.exit_codes["controller"] == outcome.exit_codes["trainer-0"] == -signal.SIGTERM
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("ending", ["saved", "again", "died", "limit"])
def test_the_first_interruption_waits_for_a_checkpoint_of_the_step(make_run, ending):
    run = make_run(**({"save_grace_s": 0.2} if ending == "limit" else {}))
    run.write_checkpoint(3)
    run.paths.metrics.write_text('{"step": 4}\n')

    def interrupt():
        run.until(lambda: "trainer-0" in ready_names(run))
        run.interruptions.add(signal.SIGINT)
        run.until(run.paths.checkpoint_request.exists)
        if ending == "saved":
            run.write_checkpoint(4)
        elif ending == "again":
            run.interruptions.add(signal.SIGINT)
        elif ending == "died":
            os.kill(run.pid_of("trainer-0"), signal.SIGKILL)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = run(controller=SERVE, server_0=SERVE, trainer_0=SERVE)
    thread.join()
    assert (outcome.status, outcome.steps_done) == ("interrupted", 4)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 4), (signal.SIGINT, 3), (signal.SIGINT, 0)])
def test_without_an_unsaved_step_and_after_sigterm_the_run_ends_at_once(make_run, number, step):
    run = make_run()
    run.write_checkpoint(3)
    run.paths.metrics.write_text(f'{{"step": {step}}}\n')

    def interrupt():
        run.until(lambda: "trainer-0" in ready_names(run))
        run.interruptions.add(number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = run(controller=SERVE, server_0=SERVE, trainer_0=SERVE)
    thread.join()
    assert outcome.status == "interrupted"
    assert not run.paths.checkpoint_request.exists()


def ready_names(run):
    return [path.stem for path in (run.names / "ready").glob("*.json")]


def test_two_interruptions_between_two_polls_count_twice(make_run):
    """Also when both come before the launcher looks."""
    run = make_run(stop_grace_s=1000.0)

    def interrupt():
        run.pid_of("server-0")
        run.interruptions.count += 2

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = run(controller=SERVE, server_0=STUBBORN, trainer_0=SERVE)
    thread.join()
    assert (outcome.status, outcome.exit_codes["server-0"]) == ("interrupted", -signal.SIGKILL)


def test_a_terminal_that_closes_interrupts_once():
    interruptions = Interruptions()
    for number, count in ((signal.SIGHUP, 1), (signal.SIGHUP, 1), (signal.SIGINT, 2), (signal.SIGHUP, 2)):
        interruptions.add(number)
        assert interruptions.count == count


def test_the_group_of_a_dead_process_is_killed(run):
    leaves = (
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "write(names / 'orphan', str(child.pid)); ready(); sys.exit(2)"
    )
    run(controller=leaves, trainer_0=SERVE)
    orphan = int((run.names / "orphan").read_text())
    run.until(lambda: not alive(orphan))


def test_log_of_an_earlier_attempt_is_not_quoted(run):
    (run.folder / "logs").mkdir(parents=True)
    (run.folder / "logs" / "trainer-0.log").write_text("areal: error: old story\n")
    outcome = run(trainer_0="sys.exit(4)")
    assert in_order(outcome.cause, "trainer-0", 4)
    assert "old story" not in outcome.cause
    assert os.path.exists(run.folder / "logs" / "trainer-0.log")
    assert json.dumps(outcome.exit_codes) == '{"trainer-0": 4}'


def test_one_error_of_several_processes_is_reported_once(run):
    code = "print('areal: error: reward_fn is not known', flush=True); sys.exit(2)"
    outcome = run(controller=code, trainer_0=code)
    assert "\n" not in outcome.cause
    raises = run(controller="raise ValueError('of the user')", trainer_0="raise ValueError('of the user')")
    assert raises.cause.count("\n    ValueError: of the user") == 1


def test_a_process_that_ends_before_it_is_ready_fails_the_run(run):
    outcome = run(controller=SERVE, trainer_0="print('hello')")
    assert outcome.status == "failed"
    assert in_order(outcome.cause, "trainer-0", "train(...)")


RECORDED = json.loads((Path(__file__).parents[1] / "fleet" / "recordings" / "start_errors.json").read_text())


@pytest.mark.parametrize(
    ("name", "first", "count"),
    [
        ("vllm-0.32.0 unknown", "main.py: error: unrecognized arguments: --max-modle-len=8", 1),
        ("sglang-0.5.23 unknown", "sglang serve: error: unrecognized arguments: --max-modle-len=8", 1),
        ("vllm-0.32.0 model", "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig", 2),
    ],
)
def test_the_error_of_a_foreign_server_is_printed_above_the_error_of_the_run(run, name, first, count):
    run.words = ("-m", "areal.fleet.server_host", "--backend", "vllm")
    ours = "areal: error: the server ended with exit code 2"
    code = f"print({chr(10).join([*RECORDED[name], ours])!r}, flush=True); sys.exit(1)"
    outcome = run(controller=SERVE, server_0=code, trainer_0=SERVE)
    assert outcome.status == "failed"
    assert in_order(outcome.cause, "server-0", 1, ours.rpartition(": ")[2], "server-0.log")
    assert "\n" not in outcome.cause
    assert len(outcome.server_error) == count
    assert outcome.server_error[0] == first
    assert run.screen.getvalue().splitlines()[-count:] == outcome.server_error
