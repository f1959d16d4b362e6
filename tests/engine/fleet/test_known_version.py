"""What a client knows of its server's version, which the tokens of an unfinished answer are told to be of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, FleetKit, until
from fake_sglang import FakeSGLang
from fake_vllm import FakeVLLM
from generation_parts import a_part

from areal.engine.replica import PartChunk


@pytest.fixture(params=[FakeSGLang, FakeVLLM], ids=lambda fake: fake.dialect)
async def kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FleetKit]:
    made = FleetKit(tmp_path, request.param)
    yield made
    await made.close()


async def first_versions(server: FakeServer, replica: Any) -> list[int]:
    """Of the tokens that come before the server tells."""
    chunks: list[PartChunk] = []
    await replica.generate(a_part(9, seed=None, stream_interval=2), chunks.append)
    return [version for chunk in chunks[:-1] for version in chunk.versions]


async def test_an_answer_from_before_an_update_is_no_news_after_it(kit: FleetKit) -> None:
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
    await replica.update_weights(kit.disk(4), rank=0)
    may_come.set()
    await checking
    assert set(await first_versions(server, replica)) == {4}
    await replica.close()


async def test_a_stream_under_older_weights_says_so(tmp_path: Path) -> None:
    """The trainer went back: what comes after may not count as of the newer policy. Only SGLang's is told meanwhile."""
    kit = FleetKit(tmp_path, FakeSGLang)
    server = await kit.server(0, version=5, hold_at=3)
    replica: Any = kit.server_class.client("server-0", server.address)
    await replica.info()
    chunks: list[PartChunk] = []
    running = asyncio.create_task(replica.generate(a_part(9, seed=None, stream_interval=2), chunks.append))
    await until(lambda: server.num_held == 1)
    await replica.pause("retract")
    await replica.update_weights(kit.disk(4), rank=0)
    await replica.resume()
    server.release()
    await running
    assert chunks[-2].versions == [4, 4]
    await replica.close()
    await kit.close()
