"""Owns the second look at age, taken when a batch is made. Pure.

Admission bounds how many episodes are begun per policy version; it does not bound the age of one: a straggler keeps
its place while others pass it. The age of an episode is the consuming version less the oldest version among its
tokens; `rollout.on_stale` says what happens to one older than max_head_offpolicyness.
"""

from __future__ import annotations

from typing import Literal

OnStale = Literal["train", "mask", "drop", "wait"]


def episode_age(min_version: int, consuming_version: int) -> int:
    """0 for an episode without generated tokens (min_version -1)."""
    return consuming_version - min_version if min_version >= 0 else 0


def is_dropped(policy: str, *, min_version: int, consuming_version: int, max_staleness: int) -> bool:
    """Whether an accepted episode is rejected as stale. Its age only grows, so this may be asked before its batch."""
    return policy == "drop" and episode_age(min_version, consuming_version) > max_staleness


def mask_before(policy: str, *, consuming_version: int, max_staleness: int) -> int:
    """Tokens made by versions below this leave the loss; 0 = none."""
    return max(0, consuming_version - max_staleness) if policy == "mask" else 0


def is_in_order(policy: str) -> bool:
    """Whether batches take episodes strictly in order of admission. Then admission alone does bound every age."""
    return policy == "wait"
