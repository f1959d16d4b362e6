"""The controller is killed at every moment of a short run, without close or flush, and restarted from its files.

Trainers and servers continue. Nothing is lost, skipped or trained on twice."""

import asyncio
import contextlib
import gc
import logging
import random

import pytest

from areal.api.data import WeightUpdate
from areal.api.errors import WeightSyncError
from areal.data.prompt_stream import PromptStream
from areal.ledger.audit import audit
from areal.ledger.event_files import LedgerReader, read_payload, recover_folder
from areal.ledger.ledger import Ledger
from areal.ledger.payload import table_of
from areal.ledger.state import LedgerState
from areal.rollout.gate import GateLimits
from areal.rollout.share_codec import WeightsNeeded
from tests.rollout import rollout_kit

STEPS, BATCH, ROWS, MAX_STALENESS = 4, 2, 5, 1
RANKS = 2
OUTCOMES = ["accept", "reject", "accept", "accept", "fail"]
MODE = "greedy"


class Life:
    """One controller process."""

    def __init__(self, number):
        self.number = number
        self.died = asyncio.Event()
        self.controller = None


class World:
    """What survives the controller: files, servers, trainers."""

    def __init__(self, folder, kind, kill_at, totals):
        self.folder, self.kind = folder, kind
        self.totals = totals  # the steps of the run for each controller, the last one for all later ones
        self.kill_at = set(kill_at)
        self.num_moments = 0
        self.moments = []
        self.servers = {"server-0": 0, "server-1": 0}
        self.life = None
        self.born = asyncio.Event()
        self.answers = {}  # of batches and evaluations, by what was asked
        self.left_behind = []  # durable state at each death

    def moment(self, life, name):
        if life.died.is_set():
            raise rollout_kit.Killed
        self.num_moments += 1
        self.moments.append(name)
        if self.num_moments in self.kill_at:
            life.died.set()
            raise rollout_kit.Killed

    def begin_life(self, number):
        life = Life(number)

        def moment(name):
            self.moment(life, name)

        log = rollout_kit.FileLog(self.folder, moment)
        ledger = Ledger(log, state=log.state, read_payload=lambda where: read_payload(self.folder, where))
        workflow = rollout_kit.ScriptedWorkflow(
            lambda index: rollout_kit.Script(outcome=OUTCOMES[index], token_s=0.03 * (1 + index), num_tokens=2)
        )
        life.controller = rollout_kit.make_controller(
            ledger,
            config=rollout_kit.make_config(batch_size=BATCH, max_staleness=MAX_STALENESS),
            workflow=workflow,
            fleet=make_view(self, life),
            num_rows=ROWS,
            total_steps=self.totals[min(number, len(self.totals) - 1)],
            eval_sets={"": [{"index": 0}, {"index": 2}]},
            eval_workflows={MODE: workflow},
        )
        self.life = life
        return life

    async def keep_alive(self):
        """The launcher."""
        for number in range(10):
            life = self.begin_life(number)
            with contextlib.suppress(rollout_kit.Killed):
                starting = asyncio.create_task(life.controller.start())
                self.born.set()
                await asyncio.wait([starting, asyncio.create_task(life.died.wait())], return_when="FIRST_COMPLETED")
                if starting.done():
                    starting.result()
                await life.died.wait()
            self.born.clear()
            theirs = [task for task in asyncio.all_tasks() if not task.get_name().startswith(("trainer", "main"))]
            for task in theirs:
                task.cancel()
            await asyncio.gather(*theirs, return_exceptions=True)
            self.left_behind.append(recover_folder(self.folder).state)
            self.left_behind[-1].check_integrity()
            await asyncio.sleep(0.5)
        raise AssertionError("too many deaths")

    async def call(self, ask, *arguments, **options):
        """Like the client: repeat the call until a living controller answers it."""
        while True:
            await self.born.wait()
            life = self.life
            owner = life.controller.weights if ask in ("publish", "start") else life.controller
            asking = asyncio.create_task(getattr(owner, ask)(*arguments, **options))
            death = asyncio.create_task(life.died.wait())
            await asyncio.wait([asking, death], return_when="FIRST_COMPLETED")
            death.cancel()
            if life.died.is_set():
                await asyncio.gather(asking, return_exceptions=True)
                await asyncio.sleep(0.2)
                continue
            try:
                answer = asking.result()
                self.moment(life, f"answer to {ask}")
            except rollout_kit.Killed:
                continue
            if answer is None and "timeout_s" in options:
                continue
            return answer


def make_view(world, life):
    class View(rollout_kit.FakeFleet):
        """The fleet of one controller, over servers that survive it."""

        def __init__(self):
            super().__init__(-1)
            self.kind = None
            self.lock = asyncio.Lock()

        async def start(self):
            await asyncio.sleep(0.3)
            self.version = max(world.servers.values())

        def ids(self):
            return {f"{name}@{life.number}": name for name in world.servers}

        def live_replicas(self, version):
            holds = version == self.version
            return [item for item, name in self.ids().items() if not (holds and world.servers[name] == version)]

        def status(self):
            stale = any(version != self.version for version in world.servers.values())
            return {"replicas": [], "needs_weights": stale and self.kind != "disk"}

        async def update_weights(self, update):
            async with self.lock:
                await self.update(update)

        async def update(self, update):
            if update.kind == "collective" and (not update.replicas or not set(update.replicas) <= set(self.ids())):
                raise WeightSyncError("these replicas do not exist")
            members = [self.ids()[replica] for replica in update.replicas] or list(world.servers)
            for name in members:
                await asyncio.sleep(0.02)
                world.moment(life, f"{name} takes {update.version}")
                world.servers[name] = update.version
            self.version, self.kind = update.version, update.kind

    return View()


def disk(version):
    return WeightUpdate(version=version, kind="disk", path=f"v{version}")


class Trainers:
    """Two ranks in step; as PPOLoop over the two weight channels."""

    def __init__(self, world):
        self.world = world
        self.sent = None
        self.publishing = None

    async def send(self, version):
        """The servers install the version while the trainers continue."""
        self.sent = version
        if self.world.kind == "disk":
            await self.world.call("start", disk(version), timeout_s=5.0)
        else:
            self.publishing = asyncio.create_task(self.publish(version), name=f"trainer-publish-{version}")
            await asyncio.sleep(0.11)  # the servers have received the weights

    async def wait_served(self):
        version, self.sent = self.sent, None
        publishing, self.publishing = self.publishing, None
        if publishing is not None:
            await publishing
        elif version is not None:
            await self.publish(version)

    async def publish(self, version):
        world = self.world
        if world.kind == "disk":
            await world.call("publish", disk(version), timeout_s=5.0)
            return
        for attempt in range(6):
            replicas = await world.call("live_replicas", version, timeout_s=5.0)
            await asyncio.sleep(0.1)
            name = f"group-{version}-{attempt}-{world.life.number}" if replicas else ""
            update = WeightUpdate(version=version, kind="collective", group_name=name, replicas=replicas)
            with contextlib.suppress(WeightSyncError):
                await world.call("publish", update, timeout_s=5.0)
                return
        raise AssertionError(f"version {version} could not be published")

    async def ask(self, version, what, *arguments):
        """All ranks call; those without an answer publish together and call again."""
        answers = {}
        while len(answers) < RANKS:
            for rank in range(RANKS):
                if rank not in answers:
                    with contextlib.suppress(WeightsNeeded):
                        answers[rank] = await self.world.call(what, *arguments, timeout_s=5.0)
                        self.world.answers.setdefault((what, arguments, rank), []).append(answers[rank])
            if len(answers) < RANKS:
                await self.wait_served()
                await self.publish(version)
        return answers

    async def train(self, start, stop):
        world = self.world
        if start > 0 or self.world.answers:
            await self.publish(start)
        for rank in reversed(range(RANKS)):
            await world.call("attach", rank=rank, world_size=RANKS, dp_size=RANKS, step=start, version=start)
        for step in range(start, stop):
            await self.ask(step, "next_batch", step)
            await self.wait_served()
            await asyncio.sleep(0.1)
            await self.send(step + 1)
            await world.call("consumed", step, step + 1, f"{step:x}")
            if step % 2 == 1:
                await self.wait_served()
                answers = await self.ask(step + 1, "evaluate", step + 1, MODE)
                assert answers[0] == answers[1], "ranks decide by it"
            if step == 0:
                await world.call("committed", 1, "recover/step-1")
        await self.wait_served()


async def run(folder, kind, kill_at, totals):
    world = World(folder, kind, kill_at, totals)
    asyncio.current_task().set_name("main")
    keeping = asyncio.create_task(world.keep_alive(), name="main-launcher")
    trainers = Trainers(world)

    async def train():
        await trainers.train(0, 3)
        await trainers.train(1, STEPS)  # all ranks died and went back to the checkpoint

    training = asyncio.create_task(train(), name="trainer")
    async with asyncio.timeout(1000.0):
        await asyncio.wait([training, keeping], return_when="FIRST_COMPLETED")
        if keeping.done():
            keeping.result()
        training.result()
        await world.call("committed", STEPS, "recover/end")
        status = world.life.controller.status()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await world.life.controller.close()
    return world, status


def check(world, status):
    folder = world.folder
    report = audit(folder)
    assert report.is_clean, report.violations
    events = list(LedgerReader(folder).events())
    consumed = [event["step"] for event in events if event["event"] == "consumed"]
    assert consumed == list(range(STEPS)), "each batch is consumed once"
    again = [event["step"] for event in events if event["event"] == "trained_again"]
    assert again == [1, 2]
    evaluated = [event["step"] for event in events if event["event"] == "evaluated"]
    assert evaluated == [2, 4], "one result each, though asked by two ranks and again"
    assert set(world.servers.values()) == {STEPS}
    assert (status["version"], status["step"], status["catching_up"]) == (STEPS, STEPS, False)
    for asked, answers in world.answers.items():
        assert all(answer == answers[0] for answer in answers), asked
    check_admissions(world, events)
    state = LedgerState.replay(events)
    state.check_integrity()
    limits = GateLimits(
        batch_size=BATCH, max_concurrent=BATCH * (MAX_STALENESS + 1), max_staleness=MAX_STALENESS, total_episodes=99
    )
    recount = LedgerState()
    for event in events:
        recount.apply(event)
        if event["event"] == "admitted":
            assert not recount.is_catching_up
            assert recount.num_accepted + len(recount.running) <= limits.open_until(recount.version)
    for durable in world.left_behind:
        assert not set(durable.waiting) & set(state.running), "a finished trajectory is kept"
        assert all(state.batches[step] == batch for step, batch in durable.batches.items())
        for episode_id, running in durable.running.items():
            starts = [e["attempt"] for e in events if e["event"] == "admitted" and e["id"] == episode_id]
            assert starts == list(range(len(starts)))
            assert episode_id in state.running or len(starts) > running.attempt + 1, "run again, same id, next attempt"


def check_admissions(world, events):
    """Every admission got the row that its number says: none used twice in an epoch, none skipped."""
    rows = PromptStream([{"index": index} for index in range(ROWS)], seed=1, batch_size=BATCH)
    used = {}
    for event in events:
        if event["event"] == "accepted":
            payload = read_payload(world.folder, tuple(event["payload"]))
            used[event["id"]] = int(table_of(payload).token_ids[0])
    assert used == {episode_id: rows.index(episode_id) for episode_id in used}
    admitted = [event["id"] for event in events if event["event"] == "admitted" and event["attempt"] == 0]
    assert admitted == list(range(len(admitted)))
    assert len(admitted) > 2 * rows.rows_per_epoch, "several epochs"
    for epoch in range(len(admitted) // rows.rows_per_epoch):
        first = epoch * rows.rows_per_epoch
        assert len({rows.index(first + k) for k in range(rows.rows_per_epoch)}) == rows.rows_per_epoch


def survive(folder, kind, kill_at, totals=(STEPS,)):
    world, status = rollout_kit.run_virtual(run(folder, kind, kill_at, totals))
    try:
        assert len(world.left_behind) == len(kill_at)
        check(world, status)
    except AssertionError as error:
        raise AssertionError(f"killed at {[(at, world.moments[at - 1]) for at in kill_at]}") from error
    return world


@pytest.fixture(autouse=True)
def light(caplog, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # processes die here, not the machine
    caplog.set_level(logging.ERROR)  # hundreds of runs with failing episodes


@pytest.fixture(scope="module", autouse=True)
def free_memory():
    yield
    gc.collect()


def test_killed_at_every_moment_of_a_run(tmp_path):
    moments = survive(tmp_path / "unbroken", "disk", []).moments
    assert {"before published", "before consumed", "before evaluated", "writing", "written"} <= set(moments)
    assert {"server-1 takes 3", "answer to publish", "answer to consumed", "answer to evaluate"} <= set(moments)
    for moment in range(1, len(moments) + 1):
        survive(tmp_path / str(moment), "disk", [moment])


def test_a_controller_that_needs_fewer_steps_starts_no_new_episode_before_those_of_the_killed_one(tmp_path):
    moments = survive(tmp_path / "unbroken", "disk", [], totals=(9,)).moments
    interrupted = 0
    for moment in range(1, len(moments) + 1, 2):
        survive(tmp_path / str(moment), "disk", [moment], totals=(9, STEPS))
        interrupted += any("interrupted" in note for note in audit(tmp_path / str(moment)).notes)
    assert interrupted > 0, "some of these controllers do not need what was running"


def test_killed_at_every_moment_of_a_publication_over_a_collective(tmp_path):
    """What servers hold cannot be had from files, and the group goes with the controller that made it."""
    moments = survive(tmp_path / "unbroken", "collective", []).moments
    for moment, name in enumerate(moments, start=1):
        near = moments[max(0, moment - 3) : moment]
        if any("takes" in item or item in ("before published", "answer to publish") for item in [name, *near]):
            survive(tmp_path / str(moment), "collective", [moment])


def test_weights_are_not_sent_again_when_only_the_answer_was_lost(tmp_path):
    moments = survive(tmp_path / "unbroken", "collective", []).moments
    world = survive(tmp_path / "killed", "collective", [moments.index("answer to publish") + 1])
    assert world.moments.count("server-0 takes 1") == moments.count("server-0 takes 1")


@pytest.mark.parametrize("seed", range(12))
def test_killed_three_times(tmp_path, seed):
    generator = random.Random(seed)
    first = generator.randint(1, 120)
    kill_at = [first, first + generator.randint(1, 12), first + generator.randint(13, 60)]
    survive(tmp_path, generator.choice(["disk", "collective"]), kill_at)
