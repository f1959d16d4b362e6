"""Sessions of programs from outside at the gate of a real controller, and rollout.on_stale for their old turns."""

import asyncio
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio

from areal.api.config import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, WeightUpdate
from areal.rollout.controller import Controller
from areal.rollout.share_codec import decode_share
from areal.workflow.agent import AgentWorkflow
from tests.agent.policies import ScriptedEngine, tool_tokenizer
from tests.rollout import rollout_kit

ADMIN = {"Authorization": "Bearer admin"}
QUESTION = {"role": "user", "content": "6*7"}


class Fleet(rollout_kit.FakeFleet):
    """Answers every turn at once, under the version of that moment."""

    def __init__(self) -> None:
        super().__init__()
        self._engine = ScriptedEngine(lambda prompt: "42")

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        response = await self._engine.agenerate(request)
        return replace(response, output_versions=[self.version] * len(response.output_ids), replicas=["server-0"])


class Outside:
    """A program from outside, and the trainer of the run. A batch is one session."""

    def __init__(self, controller: Controller, http: httpx.AsyncClient) -> None:
        self.controller = controller
        self.state = controller._ledger.state
        self._http = http

    async def try_to_open(self) -> httpx.Response:
        return await self._http.post("/sessions", json={}, headers=ADMIN)

    async def open(self) -> dict:
        """A session, once an episode has a place for it."""
        while (reply := await self.try_to_open()).status_code == 429:
            await asyncio.sleep(0)
        return reply.raise_for_status().json() | {"messages": [QUESTION]}

    async def turn(self, session: dict) -> None:
        body = {"model": "policy", "messages": session["messages"]}
        reply = await self._http.post(f"/sessions/{session['key']}/v1/chat/completions", json=body)
        session["messages"] += [reply.raise_for_status().json()["choices"][0]["message"], QUESTION]

    async def end(self, session: dict) -> None:
        (await self._http.post(f"/sessions/{session['key']}/reward", json={"reward": 1.0})).raise_for_status()

    async def whole_session(self) -> None:
        session = await self.open()
        await self.turn(session)
        await self.end(session)

    async def train(self, step: int) -> tuple[int, set[int]]:
        """One train step. Returns the session's episode and the versions of its trained tokens."""
        share = decode_share(await rollout_kit.answer(self.controller, step))
        update = WeightUpdate(version=step + 1, kind="disk", path=f"v{step + 1}")
        await self.controller.weights.publish(update, timeout_s=60.0)
        await self.controller.consumed(step, step + 1)
        return self.state.batches[step].episode_ids[0], set(
            share.table.output_versions[share.table.loss_mask == 1].tolist()
        )


@pytest_asyncio.fixture
async def outside(request, monkeypatch):
    monkeypatch.setenv("AREAL_SERVER_TOKEN", "admin")
    gconfig = GenerationHyperparameters(n_samples=1, max_new_tokens=20, max_tokens=2000)
    workflow = AgentWorkflow(gconfig, tool_tokenizer(), online=True)
    config = rollout_kit.make_config(batch_size=1, **request.param)
    ledger = rollout_kit.memory_ledger()
    controller = rollout_kit.make_controller(ledger, config=config, workflow=workflow, fleet=Fleet())
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await workflow._services.start()
    async with httpx.AsyncClient(base_url=workflow._services.base_url) as http:
        yield Outside(controller, http)
    await controller.close()


@pytest.mark.parametrize("outside", [{"max_staleness": 0}], indirect=True)
async def test_a_session_is_one_admission_and_a_full_gate_answers_429(outside) -> None:
    async def is_refused() -> bool:
        reply = await outside.try_to_open()
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "agent.no_place"
        return float(reply.headers["Retry-After"]) > 0

    session = await outside.open()
    assert (outside.state.num_admitted, len(outside.state.running)) == (1, 1)
    assert await is_refused(), "the session has the only place"
    await outside.turn(session)
    await outside.end(session)
    await outside.controller.next_batch(0, timeout_s=60.0)
    assert await is_refused(), "the gate waits for the next version"
    assert await outside.train(0) == (0, {0})
    await outside.whole_session()
    assert await outside.train(1) == (1, {1})
    assert outside.state.num_admitted <= 3


@pytest.mark.parametrize(
    ("outside", "trained"),
    [({"on_stale": "train"}, {0, 2}), ({"on_stale": "mask"}, {2}), ({"on_stale": "drop"}, None)],
    indirect=["outside"],
)
async def test_a_session_is_as_stale_as_its_oldest_turn(outside, trained) -> None:
    """Its first turn is of version 0 and its second of version 2, where max_head_offpolicyness is 1."""
    session = await outside.open()
    await outside.turn(session)
    for step in range(2):
        await outside.whole_session()
        assert await outside.train(step) == (step + 1, {step})
    await outside.turn(session)
    await outside.end(session)
    if trained is None:
        await outside.whole_session()
        assert await outside.train(2) == (3, {2})
        assert outside.state.reasons["rejected: stale"] == 1
    else:
        assert await outside.train(2) == (0, trained)


@pytest.mark.parametrize("outside", [{"on_stale": "wait"}], indirect=True)
async def test_batches_wait_for_the_oldest_session(outside) -> None:
    session = await outside.open()
    await outside.whole_session()
    while not outside.state.waiting:
        await asyncio.sleep(0)
    assert not outside.state.batches
    await outside.turn(session)
    await outside.end(session)
    assert [await outside.train(step) for step in range(2)] == [(0, {0}), (1, {0})]
