"""When a stall is reported, and which values the report holds in which situation."""

from copy import deepcopy
from pathlib import Path

import pytest

from areal.launcher.status import StallWatch
from areal.system.heartbeat import Beat
from tests.expect import in_order

STACKS = "/runs/r/stacks"
BATCH = "batch 42: 7 of 32 episodes accepted, 3 running"
IN_ROLLOUT = ("trainer-0", "trainer-1", 61, 42)


def replica(name, *, state="serving", version=42, running=0, reason="", queued=0):
    load = {"running": running - queued, "queued": queued, "cache_usage": 0.5, "generated_tokens": 1000}
    return {"name": name, "state": state, "version": version, "running": running, "reason": reason, "load": load}


def status_of(awaited=BATCH, *, shut="", replicas=None, **more):
    """What the controller answers, by default at version 42 with two good servers."""
    replicas = [replica("server-0"), replica("server-1")] if replicas is None else replicas
    fleet = {"replicas": replicas, "waiting_requests": more.pop("queued", 0), "generated_tokens": 1000}
    answer = {"step": 42, "version": 42, "updating_to": None, "running": 0, "replicas": fleet, "catching_up": False}
    return answer | {"awaited": awaited, "gate_closed_because": shut, "waiting_since_s": None} | more


def beat(pid, doing, for_s=312.0, step=None, beats=1):
    return Beat(pid=pid, beats=beats, doing=doing, for_s=for_s, step=step)


ROLLOUT = {0: ("wait_batch", 42), 1: ("wait_batch", 42)}
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
        """The report after a stall of 61 s."""
        ((_, line),) = self.told_within(61)
        return line


def explains(line, *clauses):
    """Whether the report has these clauses: of each, the values in their order."""
    head, _, text = line.partition(" 60 s: ")
    parts = text.split("; ")
    is_complete = head.startswith("areal: ") and parts[-1].endswith(STACKS) and len(parts) == len(clauses)
    return is_complete and all(in_order(part, *values) for part, values in zip(parts, clauses, strict=True))


def test_a_trainer_that_waits_for_a_batch_and_episodes_that_wait_for_rewards():
    run = Watched()
    run.status |= {"running": 3, "waiting_since_s": 61.4}
    assert explains(run.line(), (3,), (61, BATCH), IN_ROLLOUT)


def test_reward_calls_that_bound_the_run_are_named_instead():
    run, text = Watched(), "1,536 reward calls wait for 1 worker, 3.0 s each: increase reward.workers"
    run.status |= {"running": 96, "rewards": text}
    assert text in (line := run.line())
    assert "workflow code" not in line


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
    run.trainers({0: ("wait_batch", 42), 1: ("after_step", 41)})


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


@pytest.mark.parametrize(
    ("situation", "clauses"),
    [
        (
            gate_shut,
            [
                ("trainer-0", "trainer-1", "update", 41, 61),
                ("the trainer", "30 accepted + 2 running episodes reach 32"),
            ],
        ),
        (
            one_rank_behind,
            [("trainer-1", "update", 41, 101), ("trainer-0", "publish_weights", 41, 66), ("the trainer",)],
        ),
        (
            one_rank_a_step_behind,
            [
                ("trainer-1", "after_step", 41, 61),
                ("trainer-0", 61, 42),
                ("batch 42: 0 of 32 episodes accepted, 0 running",),
            ],
        ),
        (replica_at_an_old_version, [("server-1", "stale", 41, 42), (2, "server-0", 1), (BATCH,), IN_ROLLOUT]),
        (
            no_replica_serves,
            [
                ("server-0", "absent", "Connection refused"),
                ("server-1", "stale", "an update failed midway"),
                (5,),
                (BATCH,),
                IN_ROLLOUT,
            ],
        ),
        (
            evaluation,
            [
                (5, "server-0", 2),
                ("the evaluation: greedy after step 42, 3 of 8 rows done",),
                ("trainer-0", "trainer-1", "after_step", 41, 61),
            ],
        ),
        (controller_silent, [("controller", "pid 10", 60), ("controller", 60), (BATCH,), IN_ROLLOUT]),
        (controller_busy, [("controller", 60), (BATCH,), IN_ROLLOUT]),
        (
            replica_hangs_in_publication,
            [
                ("server-1", "pid 21", 60),
                ("server-1", 42, 43),
                ("the servers to take policy version 43",),
                ("trainer-0", "trainer-1", "publish_weights", 42, 61),
            ],
        ),
        (slow_phase, [("trainer-0", "trainer-1", "update", 41, 61), ("the trainer",)]),
        (not_begun, [("trainer-0", "trainer-1", "loads the models", 61), ("a trainer to attach",)]),
    ],
)
def test_explanations_of_stalls(situation, clauses):
    run = Watched()
    situation(run)
    assert explains(run.line(), *clauses)


@pytest.mark.parametrize(("situation", "first"), [(controller_dead, "controller "), (server_starts_again, "server-1 ")])
def test_a_process_that_is_missing_is_named_first(situation, first):
    run = Watched()
    situation(run)
    assert run.line().partition(" 60 s: ")[2].startswith(first)


def test_stacks_are_requested_only_from_processes_with_heartbeats():
    run = Watched()
    del run.beats["server-0"]  # starts: it would die of the signal
    run.beats["server-1"] = beat(999, "serves")  # of its predecessor
    run.line()
    assert [name for name, _ in run.signalled] == ["controller", "trainer-0", "trainer-1"]
    assert all("60 s" in reason for _, reason in run.signalled)


def step_of_trainer(run):
    run.trainers({0: ("wait_batch", 42 + int(run.now_s))})


def phase_of_one_rank(run):
    run.trainers({1: (("update", "wait_batch")[int(run.now_s / 30) % 2], 42)})


def short_phase_before(run):
    """Seen early in the phase before, and late in this one."""
    run.trainers({0: (f"phase {run.now_s}", 42)}, for_s=2.0 * run.now_s)


def same_phase_again(run):
    run.beats["trainer-0"] = beat(30, "wait_batch", 0.0, 42)


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
    assert len(run.told_within(61)) == 1, "one report after the last change"


def test_one_report_per_stall_time_and_one_when_progress_resumes():
    run = Watched()
    told = run.told_within(200)
    assert [seconds for seconds, _ in told] == [61, 121, 181]
    assert all(in_order(line, f" {s} s") for (_, line), s in zip(told, (60, 120, 180), strict=True))
    assert len(run.signalled) == 3 * 5
    run.status = run.status | {"accepted": 8}
    assert in_order(run.look(), "199 s")
    assert run.told_within(59) == []
    run.status = run.status | {"accepted": 9}
    assert run.told_within(60) == [], "a change that ends no stall is not reported"
    assert [seconds for seconds, _ in run.told_within(2)] == [1]


def test_occasional_failed_answers_are_neither_progress_nor_silence():
    run = Watched()
    answer, told = run.status, []
    for second in range(61):
        run.status = None if second % 3 else answer
        told.append(run.look())
    assert [line is None for line in told] == [True] * 60 + [False]
    assert explains(told[-1], (BATCH,), IN_ROLLOUT)


def test_time_when_the_launcher_was_stopped_is_not_counted():
    run = Watched()
    run.look()
    run.now_s += 10_000.0
    assert run.look() is None
    assert run.told_within(44) == []
    ((_, line),) = run.told_within(10)
    assert explains(line, (BATCH,), ("trainer-0", "trainer-1", 42))


def test_a_run_without_a_controller_is_explained_by_its_ranks():
    run = Watched()
    run.status = None
    for name in ("controller", "server-0", "server-1"):
        del run.pids[name], run.beats[name]
    run.trainers({0: ("update", 3), 1: ("data", 3)}, for_s=2.0)
    run.beats["trainer-1"] = beat(31, "data", 8.0, 3)
    assert explains(run.line(), ("trainer-1", "data", 3, 69), ("trainer-0", "update", 3, 63))


def steps(run, number, seconds):
    """Train steps of `seconds`, in each of which episodes end."""
    reports = []
    for _ in range(number):
        for _ in range(seconds):
            run.status["admitted"] = run.status.get("admitted", 0) + 1
            reports.append(run.look())
        run.status["step"] += 1
    return [line for line in reports if line]


@pytest.mark.parametrize(("step_s", "after_s"), [(2, 30), (5, 50)])
def test_a_slow_step_is_explained_once_although_episodes_end(step_s, after_s):
    run = Watched(stall_s=300.0)
    assert steps(run, 5, step_s) == []
    (line,) = steps(run, 1, 3 * after_s)
    assert in_order(line, f"no train step for {after_s} s", BATCH, STACKS)
    assert steps(run, 1, step_s) == []


def test_an_evaluation_and_the_first_steps_are_not_slow():
    run = Watched(stall_s=300.0)
    assert steps(run, 3, 60) == []
    run = Watched(stall_s=300.0)
    steps(run, 5, 2)
    run.status["awaited"] = "the evaluation: greedy after step 5, 3 of 9 answers done"
    assert steps(run, 1, 100) == []
    run.status["awaited"] = BATCH
    assert steps(run, 1, 29) == []
