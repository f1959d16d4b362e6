"""Agents that never call the policy, for tests of their processes."""

import asyncio
import os
from typing import Any

from areal.workflow import log_metric


async def rewards(row: dict[str, Any], client: Any, session: Any) -> dict[str, Any]:
    log_metric("looked_up", 2)
    session.reward(0.5, of=0)
    return {"reward": 1.0, "format": 0.5, "note": "text is no part", "turns": {"a.0": 0.25}}


async def sees_token(row: dict[str, Any], client: Any, session: Any) -> float:
    return float("AREAL_SERVER_TOKEN" in os.environ)


async def raises(row: dict[str, Any], client: Any, session: Any) -> float:
    raise LookupError("no such page")


async def waits(row: dict[str, Any], client: Any, session: Any) -> float:
    await asyncio.Event().wait()
    return 1.0


async def dies(row: dict[str, Any], client: Any, session: Any) -> float:
    os._exit(3)


async def process_id(row: dict[str, Any], client: Any, session: Any) -> float:
    return float(os.getpid())
