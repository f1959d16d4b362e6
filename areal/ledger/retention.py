"""Which payload segments of a ledger are deleted (rollout.keep_payloads), and how.

The `pruned` event is durable before the first file is deleted: files that a crash leaves are deleted at the next start.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from areal.ledger.event_files import payload_path, segment_numbers
from areal.ledger.state import LedgerState
from areal.system.durable import fsync_path


@dataclass(frozen=True, slots=True)
class Retention:
    """What stays besides waiting episodes and the batches since the second newest recovery checkpoint."""

    is_all: bool = True
    num_steps: int = 0
    """Batches of the newest train steps that stay too."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """all, recover, or a number of steps. ValueError for other texts."""
        if text in ("all", "recover"):
            return cls(is_all=text == "all")
        return cls(is_all=False, num_steps=int(text))

    def first_kept_step(self, state: LedgerState) -> int:
        """The first train step whose batch stays; 0 = all stay."""
        if self.is_all or state.trained_steps is None:
            return 0
        second = max((step for step in state.committed_steps if step < state.committed_step), default=0)
        return max(0, min(second, state.trained_steps - self.num_steps)) if self.num_steps else second


def prunable(state: LedgerState, first_kept_step: int, segments: Collection[int]) -> list[int]:
    """Those of the existing segments that hold nothing which must stay, ascending. The newest always stays."""
    if first_kept_step <= 0:
        return []
    needed = state.needed_segments(first_kept_step)
    return sorted(one for one in segments if one < state.last_segment and one not in needed | state.pruned_segments)


def delete_segments(folder: Path, segments: Collection[int]) -> None:
    """Delete the files of pruned segments that still exist. Raises OSError."""
    found = [number for number in segment_numbers(folder) if number in segments]
    for number in found:
        payload_path(folder, number).unlink(missing_ok=True)
    if found:
        fsync_path(folder)
