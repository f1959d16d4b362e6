"""When the explainer speaks, and what it says in which situation."""

from copy import deepcopy
from pathlib import Path

import pytest

from areal.launcher.stall import StallWatch
from areal.system.heartbeat import Beat

STACKS = "/runs/r/stacks"


def replica(name, *, state="serving", version=42, running=0, reason="", queued=0):
    load = {"running": running - queued, "queued": queued, "cache_usage": 0.5, "generated_tokens": 1000}
    return {"name": name, "state": state, "version": version, "running": running, "reason": reason, "load": load}


def status_of(awaited="batch 42: 7 of 32 episodes accepted, 3 running", *, shut="", replicas=None, **more):
    """What the controller answers, by default at version 42 with two good servers."""
    replicas = [replica("server-0"), replica("server-1")] if replicas is None else replicas
    fleet = {"replicas": replicas, "waiting_requests": more.pop("queued", 0), "generated_tokens": 1000}
    answer = {"step": 42, "version": 42, "updating_to": None, "running": 0, "replicas": fleet, "catching_up": False}
    return answer | {"awaited": awaited, "gate_closed_because": shut, "waiting_since_s": None} | more


def beat(pid, doing, for_s=312.0, step=None, beats=1):
    return Beat(pid=pid, beats=beats, doing=doing, for_s=for_s, step=step)


ROLLOUT = {0: ("rollout", 42), 1: ("rollout", 42)}
PIDS = {"controller": 10, "server-0": 20, "server-1": 21, "trainer-0": 30, "trainer-1": 31}


class Watched:
    """A run that is looked at once a second of a clock that the test turns."""

    def __init__(self, stall_s=60.0):
        self.now_s = 0.0
        self.signalled = []
        self.status = status_of()
        self.pids = dict(PIDS)
        self.beats = {name: beat(pid, "serves") for name, pid in PIDS.items()}
        self.trainers(ROLLOUT)
        self.silent, self.silent_s = set(), {}
        self._beats = 0
        self.watch = StallWatch(stall_s, Path(STACKS), self._request_stacks, clock=lambda: self.now_s)

    def _request_stacks(self, name, reason):
        self.signalled.append((name, reason))

    def trainers(self, doing, for_s=0.0):
        for rank, (what, step) in doing.items():
            self.beats[f"trainer-{rank}"] = beat(30 + rank, what, for_s, step)

    def look(self):
        """One second later."""
        self.now_s += 1.0
        self._beats += 1
        for name, last in self.beats.items():
            if name not in self.silent:
                self.beats[name] = beat(last.pid, last.doing, last.for_s + 1.0, last.step, self._beats)
            self.silent_s[name] = self.silent_s.get(name, -1.0) + 1.0 if name in self.silent else 0.0
        return self.watch.look(deepcopy(self.status), self.beats, self.silent_s, self.pids)

    def told_within(self, seconds):
        return [(n, line) for n in range(1, seconds + 1) if (line := self.look()) is not None]

    def line(self):
        """What is said once the run has stood still long enough, without frame."""
        told = self.told_within(61)
        assert len(told) == 1
        start, end = "areal: no progress for 60 s: ", f". Stacks of all processes: {STACKS}"
        assert told[0][1].startswith(start)
        assert told[0][1].endswith(end)
        return told[0][1][len(start) : -len(end)]


def test_a_trainer_that_waits_for_a_batch_and_episodes_that_wait_for_rewards():
    run = Watched()
    run.status |= {"running": 3, "waiting_since_s": 61.4}
    assert run.line() == (
        "3 episodes run without a request to a server: they wait for rewards or in workflow code; "
        "the controller has waited 61 s for batch 42: 7 of 32 episodes accepted, 3 running; "
        "each of trainer-0 and trainer-1 has waited 61 s for batch 42"
    )


def two_trainers(run, doing, step):
    run.trainers({0: (doing, step), 1: (doing, step)})


def gate_shut(run):
    run.status = status_of("the trainer", shut="30 accepted + 2 running episodes reach 32", running=2)
    two_trainers(run, "update", 41)


def one_rank_behind(run):
    run.status = status_of("the trainer")
    run.trainers({0: ("publish_weights", 41), 1: ("update", 41)}, for_s=5.0)
    run.beats["trainer-1"] = beat(31, "update", 40.0, 41)


def one_rank_a_step_behind(run):
    run.status = status_of("batch 42: 0 of 32 episodes accepted, 0 running")
    run.trainers({0: ("rollout", 42), 1: ("after_step", 41)})


def replica_at_an_old_version(run):
    old = replica("server-1", state="stale", version=41, reason="holds version 41 while 42 is current")
    run.status = status_of(running=3, replicas=[replica("server-0", running=2), old], queued=1)


def no_replica_serves(run):
    absent = replica("server-0", state="absent", version=42, reason="Connection refused")
    mixed = replica("server-1", state="stale", version=42, reason="an update failed midway")
    run.status = status_of(running=3, replicas=[absent, mixed], queued=5)


def evaluation(run):
    run.status = status_of("the evaluation: greedy after step 42, 3 of 8 rows done", running=0)
    run.status["replicas"]["replicas"][0] = replica("server-0", running=5, queued=2)
    two_trainers(run, "after_step", 41)


def controller_dead(run):
    run.status = None
    run.look()
    del run.pids["controller"]


def controller_silent(run):
    run.status = None
    run.beats["controller"] = beat(10, "batch 42: 7 of 32 episodes accepted, 3 running")
    run.silent = {"controller"}


def controller_busy(run):
    run.status = None
    run.beats["controller"] = beat(10, "batch 42: 7 of 32 episodes accepted, 3 running")


def replica_hangs_in_publication(run):
    slow = replica("server-1", state="updating", version=42, reason="takes in version 43")
    run.status = status_of(
        "the servers to take policy version 43", replicas=[replica("server-0"), slow], updating_to=43
    )
    run.silent = {"server-1"}
    two_trainers(run, "publish_weights", 42)


def slow_phase(run):
    run.status = status_of("the trainer")
    two_trainers(run, "update", 41)


def server_starts_again(run):
    run.look()
    run.pids["server-1"] = 77
    absent = replica("server-1", state="absent", reason="not registered")
    run.status = status_of(running=3, replicas=[replica("server-0", running=3), absent])


def not_begun(run):
    run.status = status_of("a trainer to attach", replicas=[])
    two_trainers(run, "loads the models", None)


IN_ROLLOUT = "each of trainer-0 and trainer-1 has waited 61 s for batch 42"
BATCH = "the controller waits for batch 42: 7 of 32 episodes accepted, 3 running"


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (
            gate_shut,
            "each of trainer-0 and trainer-1 has been in update of step 41 for 61 s; the controller waits for the "
            "trainer, and no episode starts because 30 accepted + 2 running episodes reach 32",
        ),
        (
            one_rank_behind,
            "trainer-1 has been in update of step 41 for 101 s, and the other ranks wait for it; "
            "trainer-0 has been in publish_weights of step 41 for 66 s; the controller waits for the trainer",
        ),
        (
            one_rank_a_step_behind,
            "trainer-1 has been in after_step of step 41 for 61 s, and the other ranks wait for it; "
            "trainer-0 has waited 61 s for batch 42; "
            "the controller waits for batch 42: 0 of 32 episodes accepted, 0 running",
        ),
        (
            replica_at_an_old_version,
            "server-1 is stale at version 41 while 42 is current; requests receive no token: 2 at server-0, 1 "
            f"without a server; {BATCH}; {IN_ROLLOUT}",
        ),
        (
            no_replica_serves,
            "no server serves: server-0 is absent: Connection refused; server-1 is stale: an update failed midway; "
            f"5 requests wait for a server; {BATCH}; {IN_ROLLOUT}",
        ),
        (
            evaluation,
            "requests receive no token: 5 at server-0 (2 in its queue); the controller waits for the evaluation: "
            "greedy after step 42, 3 of 8 rows done; each of trainer-0 and trainer-1 has been in after_step of step 41 "
            "for 61 s",
        ),
        (controller_silent, None),
        (controller_busy, None),
        (
            replica_hangs_in_publication,
            "server-1 (pid 21) has sent no heartbeat for 60 s; server-1 is at version 42 and has not installed 43 "
            "yet; the controller waits for the servers to take policy version 43; "
            "each of trainer-0 and trainer-1 has been in publish_weights of step 42 for 61 s",
        ),
        (
            slow_phase,
            "each of trainer-0 and trainer-1 has been in update of step 41 for 61 s; "
            "the controller waits for the trainer",
        ),
        (
            not_begun,
            "each of trainer-0 and trainer-1 loads the models (for 61 s); the controller waits for a trainer to attach",
        ),
    ],
)
def test_explanations_of_stalls(situation, expected):
    run = Watched()
    situation(run)
    if situation is controller_silent:
        expected = (
            "controller (pid 10) has sent no heartbeat for 60 s; the controller has not answered for 60 s; its last "
            "heartbeat says that it waits for batch 42: 7 of 32 episodes accepted, 3 running; " + IN_ROLLOUT
        )
    if situation is controller_busy:
        expected = (
            "the controller has not answered for 60 s; its last heartbeat says that it waits for batch 42: 7 of 32 "
            "episodes accepted, 3 running; " + IN_ROLLOUT
        )
    assert run.line() == expected


@pytest.mark.parametrize(
    ("situation", "first"),
    [
        (controller_dead, "controller is not running"),
        (server_starts_again, "server-1 is starting or ending, without a heartbeat"),
    ],
)
def test_a_process_that_is_missing_is_named_first(situation, first):
    run = Watched()
    situation(run)
    assert run.line().startswith(first)


def test_stacks_are_requested_only_from_processes_with_heartbeats():
    run = Watched()
    del run.beats["server-0"]  # starts: it would die of the signal
    run.beats["server-1"] = beat(999, "serves")  # of its predecessor
    run.line()
    assert [name for name, _ in run.signalled] == ["controller", "trainer-0", "trainer-1"]
    assert {reason for _, reason in run.signalled} == {"no progress for 60 s"}


def step_of_trainer(run):
    run.trainers({0: ("rollout", 42 + int(run.now_s))})


def phase_of_one_rank(run):
    run.trainers({1: (("update", "rollout")[int(run.now_s / 30) % 2], 42)})


def short_phase_before(run):
    """Seen early in the phase before, and late in this one."""
    run.trainers({0: (f"phase {run.now_s}", 42)}, for_s=2.0 * run.now_s)


def same_phase_again(run):
    run.beats["trainer-0"] = beat(30, "rollout", 0.0, 42)


def process_started(run):
    run.pids["server-1"] = int(run.now_s)


@pytest.mark.parametrize(
    "move",
    [
        *("step", "version", "admitted", "accepted", "rejected", "failed", "batched", "consumed", "generated_tokens"),
        *("awaited", "updating_to", "tokens of the fleet"),
        *(step_of_trainer, phase_of_one_rank, short_phase_before, same_phase_again, process_started),
    ],
)
def test_no_report_while_anything_changes(move):
    run = Watched()
    for _ in range(10):
        if callable(move):
            move(run)
        elif move == "tokens of the fleet":
            run.status["replicas"]["generated_tokens"] += 1
        else:
            run.status = run.status | {move: run.now_s}
        assert run.told_within(50) == []
    assert len(run.told_within(61)) == 1, "and it speaks once that stops"


def test_one_report_per_stall_time_and_one_when_progress_resumes():
    run = Watched()
    told = run.told_within(200)
    assert [seconds for seconds, _ in told] == [61, 121, 181]
    assert [line.split(":")[1] for _, line in told] == [f" no progress for {s} s" for s in (60, 120, 180)]
    assert len(run.signalled) == 3 * 5
    run.status = run.status | {"accepted": 8}
    assert run.look() == "areal: progress again, after 199 s without"
    assert run.told_within(59) == []
    run.status = run.status | {"accepted": 9}
    assert run.told_within(60) == [], "a move that ends no standstill is not told"
    assert [seconds for seconds, _ in run.told_within(2)] == [1]


def test_occasional_failed_answers_are_neither_progress_nor_silence():
    run = Watched()
    answer, told = run.status, []
    for second in range(61):
        run.status = None if second % 3 else answer
        told.append(run.look())
    assert [line is None for line in told] == [True] * 60 + [False]
    assert "has not answered" not in told[-1]


def test_time_when_the_launcher_was_stopped_is_not_counted():
    run = Watched()
    run.look()
    run.now_s += 10_000.0
    assert run.look() is None
    assert run.told_within(44) == []
    (told,) = run.told_within(10)
    assert "no heartbeat" not in told[1]


def test_a_run_without_a_controller_is_explained_by_its_ranks():
    run = Watched()
    run.status = None
    for name in ("controller", "server-0", "server-1"):
        del run.pids[name], run.beats[name]
    run.trainers({0: ("update", 3), 1: ("data", 3)}, for_s=2.0)
    run.beats["trainer-1"] = beat(31, "data", 8.0, 3)
    assert run.line() == (
        "trainer-1 has been in data of step 3 for 69 s, and the other ranks wait for it; "
        "trainer-0 has been in update of step 3 for 63 s"
    )
