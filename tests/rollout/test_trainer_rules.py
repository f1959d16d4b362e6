"""Which request each state of a run allows, and that a refused request changes nothing."""

import asyncio
import contextlib
import copy
import dataclasses

import orjson
import pytest
from aiohttp import ClientSession
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.ledger.audit import audit
from areal.ledger.ledger import Ledger
from areal.rollout.controller_process import make_app
from areal.system.run_paths import RunPaths
from tests.attack.controller import VALID, attacks
from tests.conftest import SteadyLoop
from tests.rollout import rollout_kit
from tests.rollout.http_kit import listening
from tests.run_token import BEARER, TOKEN

RUN = RunPaths.of(rollout_kit.make_config())
STEPS = 3
JSON = {"Content-Type": "application/json"}
MOMENTS = ("no trainer", "attached", "batch served", "published", "consumed", "committed", "restarted", "reattached")
"""The states of a run in which a request may arrive, in order."""


def client():
    return ClientSession(headers=BEARER)


class Trainer:
    """A trainer of one rank that speaks HTTP by hand."""

    def __init__(self, session, address, run_id=0):
        self._session, self._address, self._run_id = session, address, run_id

    async def send(self, route, /, **fields):
        body = {**VALID[route], **fields, "run_id": self._run_id}
        while True:
            async with self._session.post(self._address + route, data=orjson.dumps(body), headers=JSON) as answer:
                text = await answer.read()
                if answer.status != 204:
                    code = orjson.loads(text)["code"] if answer.status >= 400 else ""
                    return answer.status, code

    async def must(self, route, /, **fields):
        assert await self.send(route, **fields) == (200, "")

    async def publish(self, version):
        folder = str(RUN.weights / f"v{version:06d}")
        return await self.send("/publish", update={"version": version, "kind": "disk", "path": folder})

    async def step(self, step, stop_after=""):
        await self.must("/batch", step=step)
        if stop_after == "batch served":
            return
        assert await self.publish(step + 1) == (200, "")
        if stop_after == "published":
            return
        await self.must("/consumed", step=step, version=step + 1)

    async def finish_from(self, start):
        """As a restarted trainer: publish, attach, train what is left."""
        assert await self.publish(start) == (200, "")
        await self.must("/attach", step=start, version=start)
        for step in range(start, STEPS):
            await self.step(step)
        await self.must("/committed", step=STEPS, path=str(RUN.recover / f"step-{STEPS:06d}"))
        await self.must("/finish", steps=STEPS)


@contextlib.asynccontextmanager
async def run_at(moment, folder):
    """A controller over HTTP whose run is at `moment`, in its second step: controller, trainer, session, address."""
    options = {"total_steps": STEPS, "eval_sets": {"": [{"index": 2}]}}
    options["eval_workflows"] = {"greedy": rollout_kit.ScriptedWorkflow()}
    controller = rollout_kit.make_controller(Ledger.open(folder), **options)
    await controller.start()
    async with (
        listening(make_app(controller, token=TOKEN, poll_s=0.01)) as address,
        ClientSession(headers=BEARER) as session,
    ):
        trainer = Trainer(session, address)
        if moment != "no trainer":
            await trainer.must("/attach")
            await trainer.step(0)
        if moment in ("batch served", "published"):
            await trainer.step(1, moment)
        elif moment in MOMENTS[4:]:
            await trainer.step(1)
        if moment in MOMENTS[5:]:
            await trainer.must("/committed", step=2, path=str(RUN.recover / "step-000002"))
        if moment in ("restarted", "reattached"):
            trainer = Trainer(session, address, run_id=1)
            assert await trainer.publish(1) == (200, "")
        if moment == "reattached":
            await trainer.must("/attach", step=1, version=1)
        yield controller, trainer, session, address
    await controller.close()


def recorded(controller):
    """The part of the state that only requests of trainers change."""
    state = controller.state
    return copy.deepcopy(
        (state.version, state.highest_version, state.trained_steps, state.consumed_steps, state.committed_step,
         state.last_published, sorted(state.batches), sorted(state.evaluations), controller.is_over)
    )  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_refused_request_changes_nothing_and_the_run_completes(moment, tmp_path_factory):
    @settings(max_examples=max(3, settings.default.max_examples // 30))
    @given(st.lists(attacks(str(RUN.root)), min_size=6, max_size=10))
    def attacked(requests):
        folder = tmp_path_factory.mktemp("ledger")

        async def main():
            async with run_at(moment, folder) as (controller, _, session, address):
                is_changed = False
                for method, path, body in requests:
                    before = recorded(controller)
                    async with session.request(method, address + path, data=body or None, headers=JSON) as answer:
                        text = await answer.read()
                    assert answer.status in (200, 204, 400, 409, 410, 412, 413, 415), (path, body[:200], text)
                    if answer.status >= 400:
                        assert set(orjson.loads(text)) == {"error", "code"}
                        assert recorded(controller) == before
                    elif method == "POST" and path not in ("/batch", "/evaluate", "/background"):
                        is_changed = True  # it was valid here
                        break
                if not controller.is_over and not is_changed:
                    trained = controller.state.trained_steps
                    again = Trainer(session, address, run_id=1_000_000)
                    await again.finish_from(trained or 0)
                    assert controller.is_over

        with asyncio.Runner(loop_factory=SteadyLoop) as runner:
            runner.run(main())
        report = audit(folder)
        assert report.is_clean, report.lines()

    attacked()


SHARED = {"version": 1, "kind": "http", "path": f"file://{RUN.weights / 'v1'}"}
REFUSED = [
    ("attached", "/publish", {"update": {"version": -1, "kind": "disk", "path": str(RUN.weights / "v")}}, 400),
    ("attached", "/publish", {"update": {"version": 1.5, "kind": "disk", "path": str(RUN.weights / "v")}}, 400),
    ("attached", "/publish", {"update": {"version": 0, "kind": "disk", "path": str(RUN.weights / "v")}}, 409),
    ("attached", "/publish", {"update": {"version": 3, "kind": "disk", "path": str(RUN.weights / "v")}}, 412),
    ("attached", "/publish", {"update": {"version": 1, "kind": "disk", "path": "/etc"}}, 400),
    ("attached", "/publish", {"update": {"version": 1, "kind": "http", "path": "file:///etc/v1"}}, 400),
    ("attached", "/publish", {"update": {**SHARED, "path": "file:///etc/v1"}}, 400),
    ("attached", "/publish", {"update": {**SHARED, "deltas": {"v0": "file:///etc/delta_v1"}}}, 400),
    ("attached", "/publish", {"update": {**SHARED, "version": 3}}, 412),
    ("attached", "/attach", {"step": 0, "version": 0}, 409),
    ("attached", "/attach", {"step": 1, "version": 1, "rank": 7}, 400),
    ("attached", "/attach", {"step": 1, "version": 1, "dp_size": 2}, 400),
    ("committed", "/consumed", {"step": 0, "version": 1}, 409),
    ("attached", "/consumed", {"step": 1, "version": 2}, 412),
    ("attached", "/batch", {"step": 1, "dp_size": 10_000_000}, 400),
    ("attached", "/batch", {"step": 0}, 409),
    ("no trainer", "/batch", {"step": 0}, 412),
    ("attached", "/evaluate", {"step": 0}, 409),
    ("attached", "/background", {"step": 0, "begins": True}, 409),
    ("attached", "/background", {"step": 2}, 412),
    ("attached", "/committed", {"step": 1, "path": "/etc/passwd"}, 400),
    ("attached", "/committed", {"step": 1, "path": str(RUN.root / "../../x")}, 400),
    ("attached", "/committed", {"step": 2, "path": str(RUN.recover / "step-000002")}, 412),
    ("attached", "/finish", {}, 409),
    ("attached", "/finish", {"steps": 3}, 412),
    ("restarted", "/attach", {"step": 2, "version": 2}, 409),
    ("restarted", "/batch", {"step": 1}, 409),
]


@pytest.mark.parametrize(("moment", "path", "fields", "status"), REFUSED)
async def test_a_wrong_request_is_refused(moment, path, fields, status, tmp_path):
    async with run_at(moment, tmp_path) as (controller, trainer, _, _):
        before = recorded(controller)
        code = {400: "request.invalid_field", 409: "rollout.out_of_order", 412: "ledger.behind_trainer"}[status]
        assert await trainer.send(path, **fields) == (status, code)
        assert recorded(controller) == before


async def test_a_trainer_of_an_earlier_start_is_refused(tmp_path):
    async with run_at("reattached", tmp_path) as (_, _, session, address):
        old = Trainer(session, address, run_id=0)
        for path in ("/batch", "/consumed", "/committed", "/finish", "/attach"):
            fields = {"path": str(RUN.recover / "x")} if path == "/committed" else {}
            assert await old.send(path, **fields) == (409, "rollout.old_trainer")


async def test_a_repeated_report_changes_nothing(tmp_path):
    async with run_at("consumed", tmp_path) as (controller, trainer, _, _):
        before = recorded(controller)
        await trainer.must("/consumed", step=1, version=2)
        assert recorded(controller) == before


async def test_a_step_is_reported_while_the_servers_install_its_version(tmp_path):
    async with run_at("batch served", tmp_path) as (controller, trainer, _, _):
        folder = str(RUN.weights / "v000002")
        await trainer.must("/publish", update={"version": 2, "kind": "disk", "path": folder}, waits=False)
        await trainer.must("/consumed", step=1, version=2)
        await trainer.must("/batch", step=2)
        assert controller.state.batches[2].version == 2
        assert await trainer.publish(2) == (200, "")
        await trainer.must("/consumed", step=2, version=3)
    report = audit(tmp_path)
    assert report.is_clean, report.lines()


async def test_a_run_that_reached_its_goal_may_finish_early(tmp_path):
    async with run_at("consumed", tmp_path) as (controller, trainer, _, _):
        await trainer.must("/evaluate", step=2)
        reward = controller.state.evaluations[2, "greedy"]["reward"]
        controller.shape = dataclasses.replace(controller.shape, goals={"greedy": reward + 1})
        assert await trainer.send("/finish", steps=2) == (409, "rollout.out_of_order")
        controller.shape = dataclasses.replace(controller.shape, goals={"greedy": reward})
        await trainer.must("/finish", steps=2)
        assert controller.is_over


@contextlib.asynccontextmanager
async def restarted_controller(folder):
    """A trainer that did not start again, whose controller did."""
    controller = rollout_kit.make_controller(Ledger.open(folder), total_steps=STEPS)
    await controller.start()
    async with (
        listening(make_app(controller, token=TOKEN, poll_s=0.01)) as address,
        ClientSession(headers=BEARER) as session,
    ):
        yield Trainer(session, address)
    await controller.close()


async def test_a_restarted_controller_takes_the_calls_of_a_trainer_that_trains(tmp_path):
    async with run_at("batch served", tmp_path):
        pass
    async with restarted_controller(tmp_path) as trainer:
        assert await trainer.publish(2) == (200, "")
        await trainer.must("/consumed", step=1, version=2)
        assert (await trainer.publish(1))[0] == 409
        await trainer.step(2)


async def test_a_restarted_controller_takes_a_repeated_publication_and_all_later_steps(tmp_path):
    """The servers lost the weights too; the controller died while the trainer published them again."""
    async with run_at("attached", tmp_path):
        pass
    async with restarted_controller(tmp_path) as trainer:
        assert await trainer.publish(1) == (200, "")
        await trainer.step(1)
        await trainer.must("/committed", step=2, path=str(RUN.recover / "step-000002"))
        await trainer.step(2)
