"""The stages of every turn of a run, on disk before an episode adopts it: intent, generated, delivered.

One file for each controller process, JSON lines, below RunPaths.turns. The event `accepted` of the ledger is the last
stage, adopted. A line is written at once, so the end of the process loses none; `durable` waits for the disk.
"""

import asyncio
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from areal.api.data import tokens_checksum


class TurnJournal:
    """The journal of one process. Implements TurnEvents."""

    def __init__(self, folder: Path) -> None:
        """Make the next file in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        taken = {path.stem for path in folder.glob("*.jsonl")}
        name = next(name for number in itertools.count(1) if (name := f"{number:06d}") not in taken)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        self._file = os.open(folder / f"{name}.jsonl", flags, 0o644)
        self._num_written = self._num_durable = 0
        self._sync: asyncio.Task[None] | None = None

    def intent(self, turn_ids: Sequence[str]) -> None:
        self._write({"event": "intent", "turns": turn_ids})

    def generated(self, turn_id: str, token_ids: Sequence[int]) -> None:
        self._write(
            {"event": "generated", "turn": turn_id, "tokens": len(token_ids), "crc": tokens_checksum(token_ids)}
        )

    def delivered(self, turn_ids: Sequence[str]) -> None:
        self._write({"event": "delivered", "turns": turn_ids})

    def _write(self, event: dict[str, Any]) -> None:
        os.write(self._file, orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE))
        self._num_written += 1

    async def durable(self) -> None:
        """Return when all lines so far are on disk. Callers at the same time share one sync."""
        wanted = self._num_written
        while self._num_durable < wanted:
            if self._sync is None:
                self._sync = asyncio.create_task(self._to_disk(), name="turn-journal-sync")
            await asyncio.shield(self._sync)

    async def _to_disk(self) -> None:
        reached = self._num_written
        try:
            await asyncio.to_thread(os.fsync, self._file)
            self._num_durable = reached
        finally:
            self._sync = None

    async def aclose(self) -> None:
        if self._sync is not None:
            await asyncio.gather(self._sync, return_exceptions=True)
        os.close(self._file)
