"""The choice of a replica for a request.

Requests with the same group id (the samples of a group, the turns of an episode) stay on one replica as long as it
serves, and share cached prefixes there. The policy places the first request of a group and requests without one: on
the least loaded replica, in turn, or by `prefix_affinity` on the replica that was sent the longest prefix of the
prompt, except replicas that are much busier than the least busy one (`OVERLOAD_FACTOR`), so that a prefix that all
prompts share spreads over the fleet.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic

from areal.api.data import GenerationRequest
from areal.fleet.load_order import CandidateT, LoadOrder, PrefixIndex

MAX_GROUPS = 65536
"""Maximum groups whose replica is remembered; the least recently used one is forgotten first."""
BLOCK_TOKENS = 64
"""Prefixes are compared in whole blocks of this many tokens."""
OVERLOAD_FACTOR = 1.5
OVERLOAD_SLACK = 8
"""A replica is overloaded while it runs more than factor x (requests of the least busy replica) + slack."""
FEW_HOLDERS = 32
"""Up to this many replicas that know a prefix are compared with each other; more are searched in the order of load."""


def prefix_blocks(request: GenerationRequest) -> list[int]:
    """One hash for each whole block of the prompt, of all tokens up to the end of the block."""
    ids = request.input_ids
    chained = hash(request.adapter)  # each adapter has its own keys and values
    blocks: list[int] = []
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        chained = hash((chained, tuple(ids[end - BLOCK_TOKENS : end])))
        blocks.append(chained)
    return blocks


class Router(Generic[CandidateT]):
    """The serving replicas and the choice among them; `policy` as in rollout.schedule_policy."""

    def __init__(self, policy: str, *, max_groups: int = MAX_GROUPS) -> None:
        self._policy = policy
        self._max_groups = max_groups
        self.serving: LoadOrder[CandidateT] = LoadOrder()
        self.prefixes = PrefixIndex()
        self._replica_of: OrderedDict[str, str] = OrderedDict()

    def pick(self, request: GenerationRequest, avoid: str = "") -> CandidateT:
        """One of the serving replicas, of which there is one at least. `avoid` only when there is no other."""
        if len(self.serving) == 1:
            avoid = ""
        group_id = request.group_id
        if not group_id:
            return self._choose(request, avoid)
        bound = self._replica_of.get(group_id, "")
        chosen = self.serving.get(bound) if bound != avoid else None
        if chosen is None:
            chosen = self._choose(request, avoid)
        self._replica_of[group_id] = chosen.name
        self._replica_of.move_to_end(group_id)
        if len(self._replica_of) > self._max_groups:
            self._replica_of.popitem(last=False)
        return chosen

    def _choose(self, request: GenerationRequest, avoid: str) -> CandidateT:
        if self._policy == "round_robin":
            chosen = _first(self.serving.in_turn(), avoid)
        elif self._policy == "prefix_affinity":
            blocks = prefix_blocks(request)
            chosen = self._by_prefix(blocks, avoid) or _first(self.serving.ascending(), avoid)
            self.prefixes.add(chosen.name, blocks)
        else:
            chosen = _first(self.serving.ascending(), avoid)
        self.serving.chosen(chosen)
        return chosen

    def _by_prefix(self, blocks: list[int], avoid: str) -> CandidateT | None:
        """The least loaded of the replicas that know the longest prefix and are not overloaded; None: none knows it."""
        limit = OVERLOAD_FACTOR * self.serving.least_load + OVERLOAD_SLACK

        def is_able(name: str) -> bool:
            candidate = self.serving.get(name)
            return candidate is not None and candidate.num_running <= limit and name != avoid

        block = self.prefixes.deepest(blocks, is_able)
        if block is None:
            return None
        if self.prefixes.max_holders(block) > FEW_HOLDERS:
            ascending = (one for one in self.serving.ascending() if self.prefixes.knows(one.name, block))
            return _first(ascending, avoid)
        able = [self.serving.get(name) for name in self.prefixes.holders(block) if is_able(name)]
        return min((one for one in able if one is not None), key=lambda one: one.num_running)


def _first(candidates: Iterator[CandidateT], avoid: str) -> CandidateT:
    return next(candidate for candidate in candidates if candidate.name != avoid)
