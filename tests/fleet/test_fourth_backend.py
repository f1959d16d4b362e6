"""An inference backend is one record in one table: a fourth one is planned, checked, started and used through it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from areal.api.config import GenerationHyperparameters, GRPOConfig, OptimizerConfig, PPOActorConfig, TrainDatasetConfig
from areal.api.config.rollout import InferenceEngineConfig
from areal.api.data import GenerationRequest, WeightUpdate
from areal.api.errors import ConfigError
from areal.api.registry import Entry, FunctionRef, entries
from areal.fleet.fleet import Fleet
from areal.fleet.replica import AnswerForm, Chunks, PartChunk, PauseMode, Replica, ReplicaInfo, ReplicaLoad
from areal.fleet.server_backend import (
    FlagRules,
    ServerBackend,
    ServerCommand,
    backend_named,
    foreign_command,
    replica_factory,
)
from areal.fleet.server_client import ServerClient
from areal.launcher.job import make_plan
from areal.launcher.placement import Machine
from areal.system.discovery import FileRegistry
from areal.system.network import bind_socket, http_address

AREAL = Path(__file__).resolve().parents[2] / "areal"


class EchoReplica(Replica):
    """The client of a server that answers with the prompt, again and again."""

    has_second_copy = False

    def __init__(self, name: str, address: str, token: str, form: AnswerForm) -> None:
        self._client = ServerClient(name, address, token=token)

    async def generate(self, requests: Sequence[GenerationRequest]) -> Chunks:
        [part] = requests
        body = {"prompt": part.input_ids, "count": part.gconfig.max_new_tokens}
        yield 0, self._client.parsed(await self._client.post("/echo", body), lambda result: PartChunk(**result))

    async def abort(self, request_id: str) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def prepare_weights(self, update: WeightUpdate, *, rank: int) -> None: ...
    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None: ...
    async def abandon_update(self) -> None: ...

    async def info(self) -> ReplicaInfo:
        return self._client.parsed(await self._client.get("/info"), lambda result: ReplicaInfo(**result))

    async def load(self) -> ReplicaLoad:
        return ReplicaLoad(running=0, queued=0, cache_usage=0.0, generated_tokens=0)

    async def load_adapter(self, name: str, path: str) -> None: ...
    async def unload_adapter(self, name: str) -> None: ...

    async def close(self) -> None:
        self._client.close()


def echo_command(config: Any, on_gpu: bool) -> ServerCommand:
    program = ("-m", "echo", ECHO.model(config))
    return foreign_command(config, ECHO, program=program, defaults={"loud": True}, owned={}, env={"ECHO": "1"})


def echo_limits(gconfig: GenerationHyperparameters, flags: Any, needs_logprobs: bool) -> Any:
    if gconfig.stop:
        yield "stop", "echo has no stop strings: remove it"


ECHO = ServerBackend(
    name="echo",
    title="Echo",
    client=EchoReplica,
    command=echo_command,
    model_key="model",
    context_key="max_len",
    sampling_problems=echo_limits,
    flags=FlagRules(seed="seed", tokenizer="tokenizer", owned={"port": "areal chooses it"}, fixed={}, negatable=False),
)


@dataclass(frozen=True, kw_only=True)
class EchoConfig(GRPOConfig):
    """A script may give a fourth backend a section of its own."""

    echo: dict[str, Any] = field(default_factory=dict[str, Any])


@pytest.fixture(autouse=True)
def fourth_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package of a backend registers."""
    monkeypatch.setitem(
        entries("backends"), "echo", Entry(name="echo", target=FunctionRef(name="ECHO", module=__name__))
    )


def config_of(**changes: Any) -> EchoConfig:
    return EchoConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode="echo:d2+fsdp:d1",
        train_dataset=TrainDatasetConfig(path="x", batch_size=8),
        actor=PPOActorConfig(path="org/model", optimizer=OptimizerConfig()),
        **changes,
    )


def test_its_flags_and_limits_are_checked_like_those_of_the_others() -> None:
    config = config_of(echo={"port": 3, "max_len": 8}, gconfig=GenerationHyperparameters(max_new_tokens=8, stop=["x"]))
    result = [path for path, _ in backend_named(config.server_backend).problems(config)]
    assert result == ["echo.port", "gconfig.max_new_tokens", "gconfig.stop"]


def test_it_is_planned_like_the_others() -> None:
    server = make_plan(config_of(echo={"shout": 2}), [Machine(cores=4)]).processes[1]
    assert server.argv[server.argv.index("--backend") + 1] == "echo"
    assert {"org/model", "--loud", "--shout=2", "--port={port}"} < set(server.argv)
    assert server.env["ECHO"] == "1"


async def test_the_fleet_generates_with_it(tmp_path: Path) -> None:
    async def echo(request: web.Request) -> web.Response:
        body = await request.json()
        ids = [body["prompt"][i % len(body["prompt"])] for i in range(body["count"])]
        chunk = {"token_ids": ids, "logprobs": [-1.0] * len(ids), "versions": [3] * len(ids), "finish_reason": "length"}
        return web.json_response(chunk)

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"version": 3, "vocab_size": 10, "context_length": 99, "weights_whole": True})

    app = web.Application()
    app.add_routes([web.post("/echo", echo), web.get("/info", info)])
    runner = web.AppRunner(app)
    await runner.setup()
    bound = bind_socket()
    await web.SockSite(runner, bound).start()
    registry = FileRegistry(tmp_path)
    registry.add("servers/0", f'{{"address": "{http_address(bound)}", "pid": 1}}')
    fleet = Fleet(registry, 1, InferenceEngineConfig(health_check_interval_s=0.05), replica_factory("echo"))
    try:
        await fleet.start()
        gconfig = GenerationHyperparameters(max_new_tokens=5)
        request = GenerationRequest(request_id="r", input_ids=[7, 8], gconfig=gconfig)
        answers = [await fleet.agenerate(request), *await fleet.agenerate_group([request, request])]
        assert [(answer.output_ids, answer.output_versions) for answer in answers] == [([7, 8, 7, 8, 7], [3] * 5)] * 3
    finally:
        await fleet.close()
        await runner.cleanup()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="'none'") as error:
        backend_named("none")
    assert error.value.code == "config.bad_reference"


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_few_modules_know_a_backend_by_name(name: str) -> None:
    """A backend is its own modules, its registration and its section."""
    shared = {"fleet/registered.py", "api/config/experiment.py"}
    legacy = {"api/config/legacy.py"}  # keys of AReaL's files
    result: set[str] = set()
    for path in AREAL.rglob("*.py"):
        where = path.relative_to(AREAL).as_posix()
        text = path.read_text(encoding="utf-8")
        if where.startswith((f"fleet/{name}", "server_side/", "importers/")) or name not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            is_name = isinstance(node, ast.Constant) and node.value == name
            is_import = isinstance(node, ast.ImportFrom) and name in (node.module or "")
            is_field = isinstance(node, ast.AnnAssign | ast.Attribute) and name in ast.unparse(node).split(":")[0]
            if is_name or is_import or is_field:
                result.add(where)
    assert result - legacy == shared
