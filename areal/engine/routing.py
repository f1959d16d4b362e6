"""Owns the choice of a replica for a request: by load or in turn, with the requests of a group on one replica."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

MAX_GROUPS = 65536
"""Groups whose replica is remembered; the one not used for longest is forgotten first."""


class Candidate(Protocol):
    """What routing must know of a replica."""

    @property
    def name(self) -> str: ...
    @property
    def num_running(self) -> int: ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Router:
    """Picks among live replicas. Siblings of a group share a prompt: on one replica they share its cached prefix."""

    def __init__(self, policy: Literal["round_robin", "least_loaded"], max_groups: int = MAX_GROUPS) -> None:
        self._by_load = policy == "least_loaded"
        self._max_groups = max_groups
        self._turn = 0
        self._replica_of: OrderedDict[str, str] = OrderedDict()

    def pick(self, candidates: Sequence[CandidateT], group_id: str, avoid: str = "") -> CandidateT:
        """One of `candidates` (at least one); `avoid` is taken only when there is no other."""
        if len(candidates) > 1 and avoid:
            candidates = [candidate for candidate in candidates if candidate.name != avoid]
        if group_id:
            bound = self._replica_of.get(group_id)
            for candidate in candidates:
                if candidate.name == bound:
                    self._replica_of.move_to_end(group_id)
                    return candidate
        chosen = self._choose(candidates)
        if group_id:
            self._remember(group_id, chosen.name)
        return chosen

    def _choose(self, candidates: Sequence[CandidateT]) -> CandidateT:
        self._turn += 1
        if not self._by_load:
            return candidates[self._turn % len(candidates)]
        # Equal loads are taken in turn, so that an idle fleet fills evenly.
        shift = self._turn % len(candidates)
        return min((*candidates[shift:], *candidates[:shift]), key=lambda candidate: candidate.num_running)

    def _remember(self, group_id: str, name: str) -> None:
        self._replica_of[group_id] = name
        self._replica_of.move_to_end(group_id)
        if len(self._replica_of) > self._max_groups:
            self._replica_of.popitem(last=False)
