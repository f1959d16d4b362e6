"""Trainers, controller, launcher and servers die at any call, and the ledger loses its end: the run completes.

A model of two trainer ranks makes the calls of real ones over HTTP. No call of theirs may be refused for being out of
order, whatever died before. Every episode is in the final policy at most once.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import orjson
from aiohttp import ClientError, ClientSession
from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal.api.errors import LedgerError
from areal.ledger.audit import audit
from areal.ledger.ledger import Ledger
from areal.observe.http_log import HttpLogger
from areal.rollout.controller_process import make_app
from areal.system.run_paths import RunPaths
from tests.attack.ledger import cut, flip, groups_of, newest
from tests.conftest import SteadyLoop
from tests.rollout import rollout_kit
from tests.rollout.http_kit import listening
from tests.run_token import BEARER, TOKEN

CONFIG = rollout_kit.make_config(dp_size=2)
RUN = RunPaths.of(CONFIG)
STEPS, RANKS, KEPT = 5, 2, 2
JSON = {"Content-Type": "application/json"}
LIMIT_S = 15.0

FAULTS = [
    "controller before", "controller meanwhile", "controller after", "trainers before", "trainers after",
    "launcher before", "launcher after", "servers", "servers and controller", "ledger and controller",
    "ledger and launcher",
]  # fmt: skip
"""What dies before, during or after a call. `ledger`: its newest groups are lost with the process."""
DAMAGE = {
    "a changed event": ("events-*.jsonl", flip),
    "a changed payload": ("payload-*.bin", flip),
    "a payload file that is too short": ("payload-*.bin", cut),
    "an events file that is too short": ("events-*.jsonl", cut),
    "a missing payload file": ("payload-*.bin", lambda path, _: path.unlink()),
    "a missing events file": ("events-*.jsonl", lambda path, _: path.unlink()),
}
FOUND = {"ledger.damaged", "ledger.bad_payload"}


class TrainersDied(Exception):
    """The trainer ranks start again from a checkpoint."""


class CheckpointAhead(Exception):
    """All checkpoints need lost events: a user has to decide (checkpoint.ahead_of_ledger)."""


class DamageFound(Exception):
    """The controller refuses what is on disk, with this code."""


class Fleet(rollout_kit.FakeFleet):
    """Servers that lose their weights when they die."""

    is_empty = False

    async def agenerate(self, request):
        while self.is_empty:
            await asyncio.sleep(0.001)
        return await super().agenerate(request)

    async def update_weights(self, update):
        await super().update_weights(update)
        self.is_empty = False

    def status(self):
        return {"needs_weights": self.is_empty}


class Run:
    """One run folder, its processes, and the calls of its trainers."""

    def __init__(self, folder: Path, faults: dict[int, tuple[str, int]]):
        """`faults`: number of a call -> what happens, and how much of the ledger or of the call is lost."""
        self._folder, self._faults = folder, faults
        self._fleet = Fleet()
        self._num_calls, self._run_id = 0, 0
        self._checkpoints: list[int] = []
        self._parts = contextlib.AsyncExitStack()
        self.log: list[str] = []

    # ---- processes

    async def start(self):
        workflow = rollout_kit.ScriptedWorkflow(lambda index: rollout_kit.Script(token_s=0.0))
        try:
            ledger = Ledger.open(self._folder)
        except LedgerError as error:
            raise DamageFound(error.code) from error
        controller = rollout_kit.make_controller(
            ledger,
            config=CONFIG,
            total_steps=STEPS,
            workflow=workflow,
            fleet=self._fleet,
            eval_sets={"": [{"index": 2}]},
            eval_workflows={"greedy": workflow},
        )
        await controller.start()
        self._parts.push_async_callback(controller.close)
        app = make_app(controller, token=TOKEN, poll_s=0.02)
        self._address = await self._parts.enter_async_context(listening(app, logger=HttpLogger()))
        self._session = await self._parts.enter_async_context(ClientSession(headers={**BEARER, **JSON}))

    async def stop(self):
        await self._parts.aclose()

    async def restart(self, damage=lambda: None):
        await self.stop()
        damage()
        await self.start()

    def lose(self, num_groups):
        """The newest groups of the ledger."""
        path = newest(self._folder, "events-*.jsonl")
        offsets = [offset for offset, _ in groups_of(path)]
        cut(path, offsets[max(len(offsets) - num_groups, 0)])

    def damage(self, kind, place):
        """`place`: from 0, the first byte, to 1."""
        pattern, change = DAMAGE[kind]
        path = newest(self._folder, pattern)
        change(path, int(place * (path.stat().st_size - 1)))

    async def strike(self, what, size):
        """Everything but the death of the trainers."""
        if "servers" in what:
            self._fleet.is_empty = True
        if "ledger" in what:
            await self.restart(lambda: self.lose(1 + size))
        elif what in DAMAGE:
            await self.restart(lambda: self.damage(what, size))
        elif "controller" in what or "launcher" in what:
            await self.restart()
        if "launcher" in what:
            self._fleet.version, self._fleet.is_empty = 0, False
            self._run_id = -1
        if "trainers" in what or "launcher" in what:
            raise TrainersDied

    # ---- calls

    async def call(self, route, /, **fields):
        """The status of the answer, 200 or 409 for weights; strikes once when it is this call's turn."""
        what, size = self._faults.get(self._num_calls, ("", 0))
        self._num_calls += 1
        self.log.append(f"{self._num_calls - 1}: run {self._run_id} {route} {fields} {what}")
        if what and "after" not in what and "meanwhile" not in what:
            await self.strike(what, size)
        if "meanwhile" in what:
            sending = asyncio.create_task(self.send(route, fields))
            for _ in range(size * 3):
                await asyncio.sleep(0)
            await self.restart()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        result = await self.send(route, fields)
        if "after" in what:
            await self.strike(what, size)
            result = await self.send(route, fields) if route != "/finish" else result
        return result

    async def send(self, route, fields):
        body = orjson.dumps({**fields, "run_id": self._run_id})
        while True:
            async with self._session.post(self._address + route, data=body) as answer:
                text = await answer.read()
            if answer.status == 204:
                continue
            code = orjson.loads(text)["code"] if answer.status >= 400 else ""
            if code in FOUND:
                raise DamageFound(code)
            if answer.status == 412:
                self.log.append(f"    {code}")
                raise TrainersDied
            assert (answer.status, code) in ((200, ""), (409, "rollout.weights_needed")), (text, *self.log)
            return answer.status

    async def publish(self, version):
        path = str(RUN.weights / f"v{version:06d}-{self._num_calls}")  # an equal publication is not done again
        update = {"version": version, "kind": "disk", "path": path}
        assert await self.call("/publish", update=update) == 200

    async def ask(self, routes, version):
        """Every rank gets its answer; a version that the servers lost is published again."""
        waiting = list(routes)
        while waiting:
            waiting = [item for item in waiting if await self.call(item[0], **item[1]) != 200]
            if waiting:
                await self.publish(version)

    async def newest_step(self):
        async with self._session.get(self._address + "/status") as answer:
            return (await answer.json())["newest_step"]

    # ---- the trainers

    async def train(self):
        """From the newest checkpoint that the ledger leads to, to the end of the run."""
        limit = await self.newest_step()
        ahead = [step for step in self._checkpoints if limit is not None and step > limit]
        kept = [step for step in self._checkpoints if step not in ahead]
        if ahead and not kept:
            raise CheckpointAhead
        self._checkpoints = kept
        start = kept[-1] if kept else 0
        if start < STEPS:
            if kept or self._run_id > 0:
                await self.publish(start)
            for rank in range(RANKS):
                where = {"world_size": RANKS, "dp_size": RANKS, "step": start, "version": start}
                await self.call("/attach", rank=rank, **where)
        if not kept:
            await self.evaluate(0)
        for step in range(start, STEPS):
            shares = [("/batch", {"step": step, "dp_rank": rank, "dp_size": RANKS}) for rank in range(RANKS)]
            await self.ask(shares, step)
            await self.publish(step + 1)
            await self.call("/consumed", step=step, version=step + 1, weights_checksum=f"{step:02x}")
            if step % 2:
                await self.evaluate(step + 1)
                self._checkpoints = [*self._checkpoints, step + 1][-KEPT:]
                await self.call("/committed", step=step + 1, path=str(RUN.recover / f"step-{step + 1:06d}"))
        await self.call("/finish", steps=STEPS)

    async def evaluate(self, step):
        await self.ask([("/evaluate", {"step": step, "mode": "greedy"})] * RANKS, step)

    async def run(self):
        await self.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    with contextlib.suppress(TrainersDied, ClientError):
                        await self.train()
                        return
                    self._run_id += 1
        except TimeoutError:
            raise AssertionError(("no progress", *self.log)) from None
        finally:
            await self.stop()


_SCHEDULES = st.dictionaries(
    st.integers(0, 45), st.tuples(st.sampled_from(FAULTS), st.integers(0, 5)), min_size=1, max_size=6
)


def test_no_call_of_a_trainer_is_refused_whatever_died_before(tmp_path_factory):
    @settings(max_examples=settings.default.max_examples // 6)  # each takes one or two seconds
    @given(_SCHEDULES)
    @example({27: ("trainers before", 0), 1: ("trainers before", 0), 41: ("ledger and controller", 2)})
    def attacked(faults):
        folder = tmp_path_factory.mktemp("ledger")
        run = Run(folder, faults)
        with asyncio.Runner(loop_factory=SteadyLoop) as runner, contextlib.suppress(CheckpointAhead):
            runner.run(run.run())
        report = audit(folder)
        assert report.is_clean, (report.lines(), *run.log)

    attacked()


_DAMAGE = st.tuples(st.sampled_from(sorted(DAMAGE)), st.floats(0, 1))


def test_a_damaged_ledger_is_found_or_harmless_while_the_trainers_live(tmp_path_factory):
    @settings(max_examples=settings.default.max_examples // 6)
    @given(st.integers(1, 35), _DAMAGE)
    def attacked(number, damage):
        folder = tmp_path_factory.mktemp("ledger")
        run, codes = Run(folder, {number: damage}), set()
        with asyncio.Runner(loop_factory=SteadyLoop) as runner:
            try:
                runner.run(run.run())
            except DamageFound as error:
                codes = set(error.args)
            except CheckpointAhead:
                codes = {"checkpoint.ahead_of_ledger"}
        report = audit(folder)
        if not codes:  # the audit reads also payloads that no later step needs
            assert {violation.rule for violation in report.violations} <= {"payload"}, (report.lines(), *run.log)

    attacked()
