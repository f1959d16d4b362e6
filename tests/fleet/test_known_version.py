"""What a client knows of its server's version, which the tokens of an unfinished answer are told to be of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.fake_server import FakeServer, FleetKit
from tests.fleet.fake_sglang import FakeSGLang
from tests.fleet.fake_vllm import FakeVLLM
from tests.fleet.generation_parts import Chunks, a_part


@pytest.fixture(params=[FakeSGLang, FakeVLLM], ids=lambda fake: fake.dialect)
async def kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FleetKit]:
    made = FleetKit(tmp_path, request.param)
    yield made
    await made.close()


async def first_versions(server: FakeServer, replica: Any) -> list[int]:
    """Of the tokens that come before the server tells."""
    chunks = await Chunks().collect(replica, a_part(9, seed=None), 2)
    return [version for chunk in chunks[:-1] for version in chunk.versions]


async def test_a_health_check_from_before_an_update_changes_nothing_after_it(kit: FleetKit) -> None:
    server = await kit.server(0, version=3)
    replica: Any = kit.server_class.client("server-0", server.address)
    await replica.info()
    get, asked, may_come = replica._client.get, asyncio.Event(), asyncio.Event()

    async def late(path: str) -> bytes:
        answer = await get(path)
        if path in ("/model_info", "/weight_info"):
            asked.set()
            await may_come.wait()
        return answer

    replica._client.get = late
    checking = asyncio.create_task(replica.info())
    await asked.wait()
    await replica.update_weights(kit.disk(4), rank=0, mode="abort")
    may_come.set()
    await checking
    assert set(await first_versions(server, replica)) == {4}
    await replica.close()
