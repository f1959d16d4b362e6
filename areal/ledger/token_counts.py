"""The counts of an accepted episode, from which the statistics of a batch are computed."""

from typing import Any, NamedTuple

import numpy as np


class TokenCounts(NamedTuple):
    """What the statistics of a batch need of an episode, so that nobody reads its payload for them."""

    num_trajectories: int
    num_sessions: int
    num_finished: int
    """Sessions."""
    longest: int
    """Tokens of its longest trajectory."""
    reward: float
    """Mean over the sessions."""
    by_version: tuple[tuple[int, int, int], ...]
    """(policy version or -1 = not generated, tokens, trained tokens among them), ascending."""


def counts_of_event(event: dict[str, Any]) -> TokenCounts:
    """The counts of an `accepted` event that has them."""
    by_version = tuple((version, num_tokens, num_trained) for version, num_tokens, num_trained in event["by_version"])
    return TokenCounts(
        event["trajectories"], event["sessions"], event["finished"], event["longest"], event["reward"], by_version
    )


def count_by_version(versions: np.ndarray, loss_mask: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """See `TokenCounts.by_version`. versions, loss_mask: [T]. Neighbours mostly have the same version."""
    # without np.diff, which takes longer than everything else for a short answer
    starts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()]
    trained = np.add.reduceat(loss_mask != 0, starts, dtype=np.int64)
    found: dict[int, tuple[int, int]] = {}
    for version, start, end, used in zip(
        versions[starts].tolist(), starts, [*starts[1:], len(versions)], trained.tolist(), strict=True
    ):
        before = found.get(version, (0, 0))
        found[version] = (before[0] + end - start, before[1] + used)
    return tuple((version, *found[version]) for version in sorted(found))
