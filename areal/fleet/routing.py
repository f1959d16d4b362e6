"""Owns the choice of a replica for a request: the requests of a group together, and groups by load, in turn or by the
prompts that replicas have seen.

Under every policy siblings of a group and turns of an episode (equal group ids) stay on one replica as long as it
serves; there they share cached prefixes. The policy places everything else: a first request of a group, and requests
without one. `prefix_affinity` takes the replica that knows the longest beginning of the prompt, the least loaded of
several. A replica far busier than the least busy one has no affinity, however much it knows (`_is_overloaded`), so a
prefix that all prompts share spreads over the fleet instead of drowning one replica.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

from areal.api.data import GenerationRequest

MAX_GROUPS = 65536
"""Groups whose replica is remembered; the one not used for longest is forgotten first."""
BLOCK_TOKENS = 64
"""Beginnings of prompts are compared in whole blocks of this many tokens."""
MAX_BLOCKS = 16384
"""Blocks remembered of each replica, a million tokens."""
OVERLOAD_FACTOR = 1.5
OVERLOAD_SLACK = 8
"""A replica has no affinity while it runs more than factor x (requests of the least busy replica) + slack."""


class PrefixMemory:
    """The beginnings of prompts that a replica was sent, and so may have in its cache. Whoever owns the replica clears
    it where that cache is emptied.

    A beginning is known by the chained hashes of its blocks. The block not used for longest is forgotten first; a use
    counts for the later blocks of a prompt before the earlier ones, so what is known of a prompt has no holes.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def num_known(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks it knows."""
        return bisect_left(blocks, True, key=lambda block: block not in self._blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """A prompt with these blocks is sent to the replica."""
        known = self._blocks
        for block in reversed(blocks[: self._max_blocks]):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


def prefix_blocks(request: GenerationRequest) -> list[int]:
    """A hash for each whole block of the prompt that stands for all tokens up to the block's end."""
    ids = request.input_ids
    chained = hash(request.adapter)  # each adapter has keys and values of its own
    blocks: list[int] = []
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        chained = hash((chained, tuple(ids[end - BLOCK_TOKENS : end])))
        blocks.append(chained)
    return blocks


class Candidate(Protocol):
    """What routing must know of a replica."""

    @property
    def name(self) -> str: ...
    @property
    def num_running(self) -> int: ...
    @property
    def prefixes(self) -> PrefixMemory: ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Router:
    """Picks among live replicas."""

    def __init__(self, policy: str, max_groups: int = MAX_GROUPS) -> None:
        """`policy` as in rollout.schedule_policy."""
        self._policy = policy
        self._max_groups = max_groups
        self._turn = 0
        self._replica_of: OrderedDict[str, str] = OrderedDict()

    def pick(self, candidates: Sequence[CandidateT], request: GenerationRequest, avoid: str = "") -> CandidateT:
        """One of `candidates` (at least one); `avoid` is taken only when there is no other."""
        if len(candidates) > 1 and avoid:
            candidates = [candidate for candidate in candidates if candidate.name != avoid]
        group_id = request.group_id
        if group_id:
            bound = self._replica_of.get(group_id)
            for candidate in candidates:
                if candidate.name == bound:
                    self._replica_of.move_to_end(group_id)
                    return candidate
        chosen = self._choose(candidates, request)
        if group_id:
            self._remember(group_id, chosen.name)
        return chosen

    def _choose(self, candidates: Sequence[CandidateT], request: GenerationRequest) -> CandidateT:
        self._turn += 1
        if self._policy == "round_robin":
            return candidates[self._turn % len(candidates)]
        if self._policy == "prefix_affinity":
            return self._by_prefix(candidates, prefix_blocks(request))
        return self._least_loaded(candidates)

    def _least_loaded(self, candidates: Sequence[CandidateT]) -> CandidateT:
        # Equal loads are taken in turn, so that an idle fleet fills evenly.
        shift = self._turn % len(candidates)
        return min((*candidates[shift:], *candidates[:shift]), key=lambda candidate: candidate.num_running)

    def _by_prefix(self, candidates: Sequence[CandidateT], blocks: list[int]) -> CandidateT:
        least = min(candidate.num_running for candidate in candidates)
        able = [candidate for candidate in candidates if not _is_overloaded(candidate.num_running, least)]
        known = [candidate.prefixes.num_known(blocks) for candidate in able]
        longest = max(known)  # the least busy one is never overloaded
        chosen = self._least_loaded([one for one, count in zip(able, known, strict=True) if count == longest])
        chosen.prefixes.add(blocks)
        return chosen

    def _remember(self, group_id: str, name: str) -> None:
        self._replica_of[group_id] = name
        self._replica_of.move_to_end(group_id)
        if len(self._replica_of) > self._max_groups:
            self._replica_of.popitem(last=False)


def _is_overloaded(num_running: int, least: int) -> bool:
    return num_running > OVERLOAD_FACTOR * least + OVERLOAD_SLACK
