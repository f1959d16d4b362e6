"""The rules for stale episodes (`rollout.on_stale`), applied when a batch is composed. Pure functions.

Admission bounds the number of episodes started per policy version. It does not bound the staleness of one episode: a
slow episode keeps its place while others overtake it. The staleness of an episode is the version that trains on it
minus the oldest version among its tokens.
"""

from __future__ import annotations


def is_dropped(policy: str, *, min_version: int, training_version: int, max_staleness: int) -> bool:
    """Whether an accepted episode is rejected as stale. Its staleness only grows, so this may be decided early.

    `min_version` -1: the episode has no generated tokens and is never stale.
    """
    return policy == "drop" and min_version >= 0 and training_version - min_version > max_staleness


def mask_before(policy: str, *, training_version: int, max_staleness: int) -> int:
    """Tokens of versions below this are excluded from the loss; 0 = none."""
    return max(0, training_version - max_staleness) if policy == "mask" else 0


def is_in_order(policy: str) -> bool:
    """Whether batches take episodes strictly in order of admission, which bounds the staleness of each."""
    return policy == "wait"
