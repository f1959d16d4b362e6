"""The choice of a replica for a request.

Requests with the same group id (the samples of a group, the turns of an episode) stay on one replica as long as it
serves, and share cached prefixes there. The policy places the first request of a group and requests without one: on
the least loaded replica, in turn, or by `prefix_affinity` on the replica that was sent the longest prefix of the
prompt, except replicas that are much busier than the least busy one (`OVERLOAD_FACTOR`), so that a prefix that all
prompts share spreads over the fleet.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

from areal.api.data import GenerationRequest

MAX_GROUPS = 65536
"""Maximum groups whose replica is remembered; the least recently used one is forgotten first."""
BLOCK_TOKENS = 64
"""Prefixes are compared in whole blocks of this many tokens."""
MAX_BLOCKS = 16384
"""Maximum blocks remembered for each replica: a million tokens."""
OVERLOAD_FACTOR = 1.5
OVERLOAD_SLACK = 8
"""A replica is overloaded while it runs more than factor x (requests of the least busy replica) + slack."""


class PrefixMemory:
    """The prefixes of prompts that a replica was sent, which its cache may hold. Cleared when that cache is emptied.

    A prefix is identified by the chained hashes of its blocks. The least recently used block is forgotten first; a use
    marks the later blocks of a prompt before the earlier ones, so the known blocks of a prompt are always a prefix.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def num_known(self, blocks: Sequence[int]) -> int:
        """Number of leading blocks that it knows."""
        return bisect_left(blocks, True, key=lambda block: block not in self._blocks)

    def add(self, blocks: Sequence[int]) -> None:
        known = self._blocks
        for block in reversed(blocks[: self._max_blocks]):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


def prefix_blocks(request: GenerationRequest) -> list[int]:
    """One hash for each whole block of the prompt, of all tokens up to the end of the block."""
    ids = request.input_ids
    chained = hash(request.adapter)  # each adapter has its own keys and values
    blocks: list[int] = []
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        chained = hash((chained, tuple(ids[end - BLOCK_TOKENS : end])))
        blocks.append(chained)
    return blocks


class Candidate(Protocol):
    """The attributes of a replica that routing uses."""

    name: str
    num_running: int
    prefixes: PrefixMemory


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Router:
    """Chooses among serving replicas; `policy` as in rollout.schedule_policy."""

    def __init__(self, policy: str, max_groups: int = MAX_GROUPS) -> None:
        self._policy = policy
        self._max_groups = max_groups
        self._turn = 0
        self._replica_of: OrderedDict[str, str] = OrderedDict()

    def pick(self, candidates: Sequence[CandidateT], request: GenerationRequest, avoid: str = "") -> CandidateT:
        """One of `candidates` (at least one). `avoid` is chosen only when there is no other."""
        if len(candidates) > 1 and avoid:
            candidates = [candidate for candidate in candidates if candidate.name != avoid]
        group_id = request.group_id
        if not group_id:
            return self._choose(candidates, request)
        bound = self._replica_of.get(group_id)
        chosen = next((candidate for candidate in candidates if candidate.name == bound), None)
        if chosen is None:
            chosen = self._choose(candidates, request)
        self._replica_of[group_id] = chosen.name
        self._replica_of.move_to_end(group_id)
        if len(self._replica_of) > self._max_groups:
            self._replica_of.popitem(last=False)
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
        limit = OVERLOAD_FACTOR * min(candidate.num_running for candidate in candidates) + OVERLOAD_SLACK
        able = [candidate for candidate in candidates if candidate.num_running <= limit]
        known = [candidate.prefixes.num_known(blocks) for candidate in able]
        longest = max(known)  # the least busy one is never overloaded
        chosen = self._least_loaded([one for one, count in zip(able, known, strict=True) if count == longest])
        chosen.prefixes.add(blocks)
        return chosen
