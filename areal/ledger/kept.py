"""The payloads of the newest rejected and failed episodes: for readers, never for training.

    RUN/ledger/rejected/000017-0.bin    payload of episode 17, attempt 0

No event refers to them, so conservation, recovery and replay do not depend on them. A file is written before the event
of its verdict: after a crash between the two the episode runs again as another attempt, and the file of the earlier
attempt is ignored until it is the oldest and removed.
"""

import math
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from areal.api.columns import Runs, joined
from areal.api.data import GenerationResponse, Trajectory
from areal.api.errors import LedgerError
from areal.ledger.payload import check_payload, encode_unscored

_NAME = re.compile(r"(\d{6,})-(\d+)\.bin")
FOLDER = "rejected"


class KeptPayloads:
    """The writer of the kept payloads of one run. For one thread at a time."""

    def __init__(self, ledger: Path, limit: int) -> None:
        """`limit`: number of files that stay; 0 = none. Nothing is written or removed before the first `write`."""
        self._folder = ledger / FOLDER
        self.limit = limit
        self._names: deque[str] | None = None  # read at the first write, oldest first

    def write(self, kept: Sequence[tuple[int, int, bytes]]) -> None:
        """Write the payloads of (episode, attempt) and remove the oldest beyond the limit. Raises OSError."""
        if self._names is None:
            self._folder.mkdir(exist_ok=True)
            files = [(path.stat().st_mtime_ns, path.name) for path in self._folder.iterdir() if _NAME.match(path.name)]
            self._names = deque(name for _, name in sorted(files))
        for episode_id, attempt, payload in kept[-self.limit :] if self.limit else kept[:0]:
            name = f"{episode_id:06d}-{attempt}.bin"
            (self._folder / name).write_bytes(payload)
            self._names.append(name)
        while len(self._names) > self.limit:
            (self._folder / self._names.popleft()).unlink(missing_ok=True)


def kept_names(ledger: Path) -> dict[tuple[int, int], Path]:
    """The kept payloads of a ledger by (episode, attempt)."""
    matches = [(path, _NAME.fullmatch(path.name)) for path in (ledger / FOLDER).glob("*.bin")]
    return {(int(match[1]), int(match[2])): path for path, match in matches if match}


def read_kept(ledger: Path, episode_id: int, attempt: int) -> bytes | None:
    """The kept payload of an episode, None when there is none. Raises LedgerError when it is damaged."""
    try:
        payload = (ledger / FOLDER / f"{episode_id:06d}-{attempt}.bin").read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        message = f"the kept payload of episode {episode_id} cannot be read: {error.strerror or error}"
        raise LedgerError(message, code="ledger.bad_payload") from error
    check_payload(episode_id, payload)
    return payload


def encode_answers(episode_id: int, answers: Sequence[GenerationResponse]) -> bytes:
    """The payload of an episode without trajectories: each answer after its prompt, not scored; empty = no answer.

    Raises TrajectoryError when an answer has lists of unequal lengths.
    """
    trajectories = [
        Trajectory(
            token_ids=joined("i", (answer.input_ids, answer.output_ids)),
            loss_mask=Runs([(0, len(answer.input_ids) + len(answer.output_ids))]),
            rollout_logprobs=joined("f", (Runs([(0.0, len(answer.input_ids))]), answer.output_logprobs)),
            output_versions=Runs([(-1, len(answer.input_ids))]) + answer.output_versions,
            reward=math.nan,
            finished=answer.stop_reason == "stop",
        )
        for answer in answers
    ]
    return encode_unscored(episode_id, trajectories) if trajectories else b""
