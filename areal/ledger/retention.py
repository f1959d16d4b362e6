"""Which payload segments and image files of a run are deleted (rollout.keep_payloads), and how.

The `pruned` event is durable before the first file is deleted: files that a crash leaves are deleted at the next start.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from areal.api.errors import LedgerError
from areal.ledger.event_files import LedgerReader, PayloadReader, payload_path, segment_numbers
from areal.ledger.kept import kept_names, read_kept
from areal.ledger.payload import check_payload, images
from areal.ledger.session_columns import session_columns
from areal.ledger.state import LedgerState
from areal.system.durable import fsync_path
from areal.system.image_files import ImageFiles

_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


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


def delete_unused_images(folder: Path, files: ImageFiles) -> int:
    """Delete the images that no existing payload of the ledger in `folder` refers to; returns their number.

    Call it before the first episode: an image is stored before the payload that refers to it. Raises OSError, and
    LedgerError when a payload is damaged; then all images stay.
    """
    if not files.unreachable(()):
        return 0
    used = {digest for payload in _existing_payloads(folder) for digest in _images_of(payload)}
    unused = files.unreachable(used)
    for path in unused:
        path.unlink(missing_ok=True)
    return len(unused)


def _existing_payloads(folder: Path) -> Iterator[bytes]:
    """The payloads of accepted episodes, and those kept for readers. LedgerError for a damaged one of the former."""
    segments = set(segment_numbers(folder))
    with PayloadReader(folder) as reader:
        for event in LedgerReader(folder).events():
            if event["event"] == "accepted" and event["payload"][0] in segments:
                segment, offset, size = event["payload"]
                payload = reader.read((segment, offset, size))
                check_payload(event["id"], payload)
                yield payload
    for episode_id, attempt in kept_names(folder):
        with suppress(LedgerError):  # no reader can show a damaged one
            if (kept := read_kept(folder, episode_id, attempt)) is not None:
                yield kept


def _images_of(payload: bytes) -> Iterator[str]:
    """Digests of the images of the trajectories, and of those in the messages of recorded sessions."""
    for row in images(payload):
        yield from (image.sha256 for image in row)
    sessions = session_columns(payload)
    yield from () if sessions is None else _DIGEST.findall(sessions.record)
