"""The choice of a replica for a request.

Requests with the same group id (the samples of a group, the turns of an episode) stay on one replica as long as it
serves, and share cached prefixes there. The policy places the first request of a group and requests without one: on
the least loaded replica, in turn, or by `prefix_affinity` on the replica that was sent the longest prefix of the
prompt, except replicas that are much busier than the least busy one (`OVERLOAD_FACTOR`), so that a prefix that all
prompts share spreads over the fleet.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from areal.api.data import GenerationRequest

# ----------------------------------------------------------------------------------------------------------------------
# The serving replicas in the order of their load, and the prefixes that they were sent.
#
# Both are indexes that change with each request: a choice never looks at every replica, so its cost is the same for ten
# and for a thousand.

MAX_BLOCKS = 16384
"""Maximum blocks remembered for each replica: a million tokens."""


class Candidate(Protocol):
    """The attributes of a replica that routing uses. A name is unique in the fleet."""

    name: str
    num_running: int


CandidateT = TypeVar("CandidateT", bound=Candidate)


class LoadOrder(Generic[CandidateT]):
    """The serving replicas by number of running requests. Equal ones are in turn: the one chosen last is the last."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, CandidateT]] = {}  # never empty
        self._least = 0
        """The lowest key of `_levels`; any number while there is none."""
        self._members: OrderedDict[str, CandidateT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> CandidateT | None:
        return self._members.get(name)

    @property
    def least_load(self) -> int:
        """Running requests of the least busy replica. There must be one."""
        return self._least

    def add(self, candidate: CandidateT) -> None:
        if candidate.name not in self._members:
            self._members[candidate.name] = candidate
            self._insert(candidate)

    def remove(self, candidate: CandidateT) -> None:
        if self.get(candidate.name) is candidate:
            del self._members[candidate.name]
            self._take_out(candidate)

    def change(self, candidate: CandidateT, difference: int) -> None:
        """Count running requests, also of a replica that does not serve."""
        is_member = self.get(candidate.name) is candidate  # a removed replica may have a successor of that name
        if is_member:
            self._take_out(candidate)
        candidate.num_running += difference
        if is_member:
            self._insert(candidate)

    def chosen(self, candidate: CandidateT) -> None:
        """The others come before it from now on, among its equals and in turn."""
        self._levels[candidate.num_running].move_to_end(candidate.name)
        self._members.move_to_end(candidate.name)

    def in_turn(self) -> Iterator[CandidateT]:
        """The replicas in order, from the one that was chosen longest ago."""
        return iter(self._members.values())

    def ascending(self) -> Iterator[CandidateT]:
        """The replicas in order, from the least busy one."""
        if self._members:
            yield from self._levels[self._least].values()
            for level in sorted(self._levels.keys() - {self._least}):
                yield from self._levels[level].values()

    def _insert(self, candidate: CandidateT) -> None:
        load = candidate.num_running
        if not self._levels or load < self._least:
            self._least = load
        self._levels.setdefault(load, OrderedDict())[candidate.name] = candidate

    def _take_out(self, candidate: CandidateT) -> None:
        load = candidate.num_running
        level = self._levels[load]
        del level[candidate.name]
        if not level:
            del self._levels[load]
            if load == self._least and self._levels:
                self._least = min(self._levels)


_NO_BLOCKS: OrderedDict[int, None] = OrderedDict()


class PrefixIndex:
    """Which replicas were sent which prefixes of prompts, so that their caches may hold them.

    A prefix is identified by the chained hashes of its blocks. Of each replica the least recently used block is
    forgotten first; a use marks the later blocks of a prompt before the earlier ones, so the blocks of a prompt that a
    replica knows are always a prefix.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks_of: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, dict[str, None]] = {}
        """Block -> names; a name counts only while `_blocks_of` has the block too."""
        self._forgotten: deque[tuple[str, OrderedDict[int, None]]] = deque()
        """Blocks whose names are still in `_holders`. They are removed a few at a time, because a weight update makes
        all replicas forget at the same moment."""

    def num_blocks(self, name: str) -> int:
        """How many blocks it remembers of a replica."""
        return len(self._blocks_of.get(name, ()))

    def add(self, name: str, blocks: Sequence[int]) -> None:
        """The replica is sent a prompt of these blocks."""
        known = self._blocks_of.setdefault(name, OrderedDict())
        for block in reversed(blocks[: self._max_blocks]):
            if block not in known:
                known[block] = None
                self._holders.setdefault(block, {})[name] = None
            known.move_to_end(block)
        while len(known) > self._max_blocks:
            self._release(name, known.popitem(last=False)[0])
        for _ in range(4 * len(blocks)):
            if not self._forgotten:
                break
            self._release_one()

    def forget(self, name: str) -> None:
        """The cache of the replica is empty."""
        blocks = self._blocks_of.pop(name, None)
        if blocks:
            self._forgotten.append((name, blocks))

    def deepest(self, blocks: Sequence[int], is_able: Callable[[str], bool]) -> int | None:
        """The last of the leading blocks that any able replica knows; None when none knows the first."""
        count = bisect_left(blocks, True, key=lambda block: not any(map(is_able, self.holders(block))))
        return blocks[count - 1] if count else None

    def knows(self, name: str, block: int) -> bool:
        return block in self._blocks_of.get(name, _NO_BLOCKS)

    def holders(self, block: int) -> Iterator[str]:
        """The replicas that know a block."""
        return (name for name in self._holders.get(block, ()) if self.knows(name, block))

    def max_holders(self, block: int) -> int:
        """Upper limit of the number of replicas that know a block, found without counting them."""
        return len(self._holders.get(block, ()))

    def _release(self, name: str, block: int) -> None:
        holders = self._holders.get(block)
        if holders is not None:
            holders.pop(name, None)
            if not holders:
                del self._holders[block]

    def _release_one(self) -> None:
        name, blocks = self._forgotten[0]
        block, _ = blocks.popitem()
        if not self.knows(name, block):
            self._release(name, block)
        if not blocks:
            self._forgotten.popleft()


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
            ascending = (replica for replica in self.serving.ascending() if self.prefixes.knows(replica.name, block))
            return _first(ascending, avoid)
        able = [self.serving.get(name) for name in self.prefixes.holders(block) if is_able(name)]
        return min((replica for replica in able if replica is not None), key=lambda replica: replica.num_running)


def _first(candidates: Iterator[CandidateT], avoid: str) -> CandidateT:
    return next(candidate for candidate in candidates if candidate.name != avoid)
