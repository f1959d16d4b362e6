"""Makes the fake servers importable by the tests of this folder; runs what concerns every backend over each of them.

A test that takes `kit` runs once per class in FAKES; `native_kit` is the native one alone. What a fake of another
server must bring, in a module of its own (fake_sglang.py, fake_vllm.py) that is then added to FAKES:

- a subclass of `fake_server.FakeServer` with `dialect`, `client` (makes the adapter under test), `routes` and `error`.
  Its handlers only translate: dialect's JSON -> the acts of FakeServer (`pause`, `resume`, `load`, `join`, `leave`,
  `receive`, `commit`, `running` with `make`) -> dialect's JSON. The behaviour the tests steer (hold, hang, die, failing
  updates, empty aborts) is in those acts, so nothing of it is written twice.
- every handler waits in `answers()` first, the health check too: that is how a server that hangs is played.
- generation: one `Asked` per request (`request_id` is the part's id), handled inside `async with self.running(asked)`;
  `make` yields tokens with their versions one by one; `tokens` and `spans` put them in numbers. A stream sends chunks
  of at most the part's stream_interval tokens. An abort ends an answer with finish reason abort and what it has.
- a paused server lets new requests wait (`make` does so).
- it describes itself with its `version`, a vocabulary of 5000 tokens and a context length of 4096, and tells its load
  with `num_running`, a cache that is a quarter full, and `generated_tokens`; with `fail_load` it fails that call.
- an update is `load(path)` then `commit(version)`, or per bucket `receive()` and after the last `commit(version)`;
  `midway_status` is what the real server answers when one fails after weights were touched.
- servers that tell versions only at the end of an answer do so here too, so that `part_versions` are used.

Keys and statuses are compared with the recordings of the real servers in the fakes' own tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fleet.fake_native import FakeNative
from tests.fleet.fake_server import FakeServer, FleetKit
from tests.fleet.fake_sglang import FakeSGLang
from tests.fleet.fake_vllm import FakeVLLM

FAKES: list[type[FakeServer]] = [FakeNative, FakeSGLang, FakeVLLM]


@pytest.fixture(params=FAKES, ids=lambda fake: fake.dialect)
async def kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FleetKit]:
    """Servers of every dialect in turn."""
    made = FleetKit(tmp_path, request.param)
    yield made
    await made.close()


@pytest.fixture
async def native_kit(tmp_path: Path) -> AsyncIterator[FleetKit]:
    made = FleetKit(tmp_path, FakeNative)
    yield made
    await made.close()
