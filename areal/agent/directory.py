"""The sessions of a process by their keys, and the places that programs from outside may take."""

import asyncio
import hashlib
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from areal.agent.session import Session
from areal.agent.turns import SessionTurns, TurnRefused
from areal.api.errors import RewardError

# What the session server needs of the sessions: find one by its key, open one from outside, end one with a reward.


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """The wish of a program that areal does not start for a session (POST /sessions with the admin token)."""

    group: str = ""  # Sessions with the same non-empty group are rewarded against each other; empty: a group of one.
    row: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the session is about. Recorded, and given to the reward function; not shown to the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    key: str  # The secret of the session: part of its URL, Bearer token or x-api-key.
    session_id: str  # Its name in logs and in the ledger; no secret.
    timeout_s: float  # Seconds after which it ends without a reward.
    row: dict[str, Any] = field(default_factory=dict[str, Any])
    """What it is about: the row of the wish, or that of the episode whose place it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReward:
    """The rewards that a program reports (POST /sessions/KEY/reward) and whether its session ends."""

    reward: float | None = None  # The session's reward; None: not known, or the function of the run computes it.
    parts: dict[str, float] = field(default_factory=dict[str, float])  # Named parts, which become metrics.
    turns: dict[str, float] = field(default_factory=dict[str, float])
    """Reward of single turns, by turn id (the `id` of the answer)."""
    final: bool = True  # The session ends: no further turn is answered.


class SessionDirectory(Protocol):
    def find(self, key: str) -> SessionTurns | None:
        """The session of a key; None: there is none. Takes the same time for every key of the same length."""
        ...

    async def open(self, wish: OpenRequest) -> OpenedSession:
        """A new session. TurnRefused: 429 with retry_after_s when no session is admitted now, 503 without a server."""
        ...

    async def finish(self, key: str, reward: SessionReward) -> None:
        """Record a reward. TurnRefused: 404 for an unknown key, 409 for a session whose reward window has ended."""


RETRY_AFTER_S = 1.0
_MAX_REMEMBERED = 4096  # Ended sessions whose keys are still known, to explain a late reward.


@dataclass(slots=True, eq=False)
class Entry:
    """A session in the directory, with what was reported about it by POST."""

    key: str
    session: Session
    reported: SessionReward = field(default_factory=SessionReward)
    is_final: asyncio.Event = field(default_factory=asyncio.Event)  # Set by a report that ends the session.


@dataclass(slots=True, eq=False)
class Place:
    """A place for a session from outside. The episode that offers it waits for `taken`."""

    episode: str
    new_session: Callable[[], Session]
    row: dict[str, Any]
    timeout_s: float
    taken: asyncio.Future[Entry]
    group: str = ""


class Sessions:
    """Implements SessionDirectory. Used on one event loop only."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._ended: deque[bytes] = deque(maxlen=_MAX_REMEMBERED)
        self._places: list[Place] = []
        self._groups: dict[str, str] = {}  # Group of sessions from outside -> the episode that it fills.

    @property
    def num_open(self) -> int:
        return len(self._entries)

    def add(self, session: Session) -> Entry:
        """Make a session known, under a new secret key."""
        entry = Entry(secrets.token_urlsafe(24), session)
        self._entries[_digest(entry.key)] = entry
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget a session. A later reward gets 409."""
        if self._entries.pop(_digest(entry.key), None) is not None:
            self._ended.append(_digest(entry.key))

    def find(self, key: str) -> Session | None:
        entry = self._entries.get(_digest(key))
        return None if entry is None else entry.session

    def offer(self, place: Place) -> None:
        """Let a program from outside take a place."""
        self._places.append(place)

    def withdraw(self, place: Place) -> None:
        """Take an offer back; does nothing when the place is taken."""
        if place in self._places:
            self._places.remove(place)
        if not any(other.episode == place.episode for other in self._places):
            self._groups = {group: episode for group, episode in self._groups.items() if episode != place.episode}

    async def open(self, wish: OpenRequest) -> OpenedSession:
        """A session in a free place. A group takes all its places in one episode while that has any."""
        taken = set(self._groups.values())
        episode = self._groups.get(wish.group) if wish.group else None
        fitting = [
            place for place in self._places if (place.episode == episode if episode else place.episode not in taken)
        ]
        if not fitting:
            text = "no episode waits for a session: the policy trains on those that it has"
            raise TurnRefused(text, code="agent.no_place", status=429, retry_after_s=RETRY_AFTER_S)
        place = fitting[0]
        entry = self.add(place.new_session())
        place.row, place.group = wish.row or place.row, wish.group
        if wish.group:
            self._groups[wish.group] = place.episode
        place.taken.set_result(entry)
        self.withdraw(place)
        return OpenedSession(
            key=entry.key, session_id=entry.session.session_id, timeout_s=place.timeout_s, row=place.row
        )

    async def finish(self, key: str, reward: SessionReward) -> None:
        """Record what is reported: later numbers of the same name replace earlier ones."""
        digest = _digest(key)
        if (entry := self._entries.get(digest)) is None:
            if digest in self._ended:
                text = "this session has ended, and with it its time for rewards (agent.reward_window_s)"
                raise TurnRefused(text, code="agent.reward_too_late", status=409)
            raise TurnRefused("this session does not exist", code="agent.unknown_session", status=404)
        try:
            for name in reward.turns:
                entry.session.turn_of(name)
        except RewardError as error:
            raise TurnRefused(str(error), code=error.code, status=400, param="turns") from error
        before = entry.reported
        entry.reported = replace(
            before,
            reward=before.reward if reward.reward is None else reward.reward,
            parts=before.parts | reward.parts,
            turns=before.turns | reward.turns,
        )
        if reward.final:
            entry.session.is_finished = True
            entry.is_final.set()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
