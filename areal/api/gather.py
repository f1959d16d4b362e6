"""Runs several awaitables at the same time."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """All results. When one fails, the others are cancelled before its exception is raised."""
    if len(awaitables) < 2:
        return [await one for one in awaitables]
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
