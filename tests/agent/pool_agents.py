"""Agents that never call the policy, for tests of their processes."""

import asyncio
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from areal.workflow import log_metric


async def rewards(row: dict[str, Any], client: Any, session: Any) -> dict[str, Any]:
    log_metric("looked_up", 2)
    session.reward(0.5, of=0)
    return {"reward": 1.0, "format": 0.5, "note": "text is no part", "turns": {"a.0": 0.25}}


def plain(row: dict[str, Any], client: Any, session: Any) -> float:
    log_metric("looked_up", 3)
    return float(type(client).__name__ == "OpenAI" and client.api_key == session.key)


async def sees_token(row: dict[str, Any], client: Any, session: Any) -> float:
    return float("AREAL_SERVER_TOKEN" in os.environ or "AREAL_TEACHER_TOKEN" in os.environ)


async def raises(row: dict[str, Any], client: Any, session: Any) -> float:
    raise LookupError("no such page")


async def waits(row: dict[str, Any], client: Any, session: Any) -> float:
    await asyncio.Event().wait()
    return 1.0


async def works(row: dict[str, Any], client: Any, session: Any) -> float:
    """Runs a little, again and again."""
    Path(row["folder"], secrets.token_hex(4)).touch()
    while True:
        await asyncio.sleep(0)


async def dies(row: dict[str, Any], client: Any, session: Any) -> float:
    """Ends its process when two others work in it."""
    while len(os.listdir(row["folder"])) < 2:
        await asyncio.sleep(0)
    if row["how"] == "thread":
        await asyncio.to_thread(os._exit, 3)
    if row["how"] == "task":
        await asyncio.create_task(_ends())
    if row["how"] == "abort":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


async def _ends() -> None:
    os._exit(3)


async def interrupts(row: dict[str, Any], client: Any, session: Any) -> float:
    raise KeyboardInterrupt


async def exits_in_a_task(row: dict[str, Any], client: Any, session: Any) -> float:
    async def end() -> None:
        sys.exit(3)

    await asyncio.create_task(end())
    return 1.0


async def process_id(row: dict[str, Any], client: Any, session: Any) -> float:
    return float(os.getpid())
