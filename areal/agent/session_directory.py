"""What the session server needs of the sessions: find one by its key, open one from outside, end one with a reward."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from areal.agent.turns import SessionTurns


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """The wish of a program that areal does not start for a session (POST /sessions with the admin token)."""

    group: str = ""
    """Sessions with the same non-empty group are rewarded against each other; empty: a group of one."""
    row: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the session is about. Recorded, and given to the reward function; not shown to the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A session that was opened from outside."""

    key: str
    """The secret of the session: part of its URL, Bearer token or x-api-key."""
    session_id: str
    """Its name in logs and in the ledger; no secret."""
    timeout_s: float
    """Seconds after which it ends without a reward."""
    row: dict[str, Any] = field(default_factory=dict[str, Any])
    """What it is about: the row of the wish, or that of the episode whose place it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReward:
    """The rewards that a program reports (POST /sessions/KEY/reward) and whether its session ends."""

    reward: float | None = None
    """Of the session; None: not known, or the function of the run computes it."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Named parts, which become metrics."""
    turns: dict[str, float] = field(default_factory=dict[str, float])
    """Reward of single turns, by turn id (the `id` of the answer)."""
    final: bool = True
    """The session ends: no further turn is answered."""


class SessionDirectory(Protocol):
    """The sessions of this process."""

    def find(self, key: str) -> SessionTurns | None:
        """The session of a key; None: there is none. Takes the same time for every key of the same length."""
        ...

    async def open(self, wish: OpenRequest) -> OpenedSession:
        """A new session. TurnRefused: 429 with retry_after_s when no session is admitted now, 503 without a server."""
        ...

    async def finish(self, key: str, reward: SessionReward) -> None:
        """Record a reward. TurnRefused: 404 for an unknown key, 409 for a session whose reward window has ended."""
        ...
