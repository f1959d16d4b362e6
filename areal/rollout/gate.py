"""Owns the admission rule: whether one more episode may start, and why not. Pure: numbers in, a number out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """What bounds admission over a whole run."""

    batch_size: int
    """Episodes of one train step (B)."""
    max_concurrent: int
    """Most episodes running at once."""
    max_staleness: int
    """Largest version lag planned for (eta)."""
    total_episodes: int
    """Accepted episodes that all train steps of the run need together."""

    def open_until(self, version: int) -> int:
        """How many episodes may be accepted or running while the policy is at `version`."""
        by_version = (self.max_staleness + version + 1) * self.batch_size
        return by_version if by_version < self.total_episodes else self.total_episodes


def room(limits: GateLimits, *, running: int, accepted: int, version: int) -> int:
    """Episodes that may start now, 0 when closed.

    `accepted` counts all episodes ever accepted, less those dropped later; a rejected or failed one is in neither
    number, so its room is back at once.
    """
    by_staleness = limits.open_until(version) - accepted - running
    by_concurrency = limits.max_concurrent - running
    free = by_staleness if by_staleness < by_concurrency else by_concurrency
    return free if free > 0 else 0


def why_closed(limits: GateLimits, *, running: int, accepted: int, version: int) -> str:
    """One sentence on why nothing may start; empty while the gate is open."""
    if room(limits, running=running, accepted=accepted, version=version) > 0:
        return ""
    if running >= limits.max_concurrent:
        return f"{running} episodes are running, and max_concurrent_rollouts={limits.max_concurrent}"
    started = f"{accepted} accepted + {running} running episodes"
    if accepted + running >= limits.total_episodes:
        return f"{started} are all that the run needs ({limits.total_episodes})"
    return (
        f"{started} reach ({limits.max_staleness} + {version} + 1) x {limits.batch_size} = "
        f"{limits.open_until(version)}: policy version {version + 1} must be published first"
    )
