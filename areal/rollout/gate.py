"""The admission rule: how many episodes may start, and why none may. Pure; docs/async_rl.md has the proof."""

from dataclasses import dataclass
from typing import Self

from areal.api.config import PPOConfig
from areal.rollout.setpoint import SetPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """What bounds admission over a whole run."""

    batch_size: int
    """Episodes of one train step."""
    max_concurrent: int
    """Maximum number of running episodes."""
    max_staleness: int
    """Maximum staleness that admission allows for, in policy versions."""
    total_episodes: int
    """Accepted episodes that all train steps of the run need together."""
    smallest_batch: int | None = None
    """Episodes of the smallest batch, when rejected episodes count as part of a train step (rollout.dynamic_bs)."""
    queue_size: int | None = None
    """Maximum number of episodes that run or wait for a train step; None = no such limit."""
    setpoint: SetPoint | None = None
    """Paces admission below the maximum staleness (rollout.target_staleness)."""

    @classmethod
    def of(cls, config: PPOConfig, *, total_steps: int) -> Self:
        batch_size = config.train_dataset.batch_size
        return cls(
            batch_size=batch_size,
            max_concurrent=config.max_concurrent_rollouts,
            max_staleness=config.rollout.max_head_offpolicyness,
            total_episodes=total_steps * batch_size,
            smallest_batch=config.allocation.train[0].parallel.dp if config.rollout.dynamic_bs else None,
            queue_size=config.rollout.queue_size,
            setpoint=SetPoint.of(config),
        )

    def open_until(self, version: int) -> int:
        """How many episodes may be accepted or running while the policy is at `version`."""
        by_version = (self.max_staleness + version + 1) * self.batch_size
        return by_version if by_version < self.total_episodes else self.total_episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCounts:
    """The state of a run that admission depends on."""

    running: int
    accepted: int
    """Accepted episodes, without those dropped as stale. With a smallest batch, rejected episodes are included."""
    waiting: int
    """Accepted episodes that no train step has."""
    version: int
    """Policy version of the servers."""
    next_step: int
    """The first train step without a batch."""
    lead: int | None = None
    """Episodes that may start beyond those that `version` needs, by the set-point; None = no set-point."""

    def ahead(self, batch_size: int) -> int:
        """Episodes accepted or running beyond those that the batches up to `version` need; negative = some lack."""
        return self.accepted + self.running - (self.version + 1) * batch_size


def room(limits: GateLimits, counts: GateCounts) -> int:
    """Episodes that may start now, 0 when the gate is closed.

    The room of a failed episode is free immediately. So is that of a rejected one, but not with a smallest batch. Then
    rejected episodes can use up the room while the next batch has too few accepted ones. If that batch is for the
    served version, the missing episodes may start. If not, a newer version is published first and opens the gate.
    """
    running, waiting = counts.running, counts.waiting
    by_staleness = limits.open_until(counts.version) - counts.accepted - running
    by_concurrency = limits.max_concurrent - running
    free = by_staleness if by_staleness < by_concurrency else by_concurrency
    if limits.queue_size is not None and limits.queue_size - waiting - running < free:
        free = limits.queue_size - waiting - running
    if counts.lead is not None:
        free = min(free, counts.lead - counts.ahead(limits.batch_size))
    smallest = limits.smallest_batch
    if smallest is not None and waiting + running < smallest and counts.next_step == counts.version:
        free = max(free, min(smallest - waiting - running, by_concurrency))
    return free if free > 0 else 0


def why_closed(limits: GateLimits, counts: GateCounts) -> str:
    """Why no episode may start, as the end of a sentence; empty while the gate is open."""
    if room(limits, counts) > 0:
        return ""
    running, accepted, version, waiting = counts.running, counts.accepted, counts.version, counts.waiting
    if running >= limits.max_concurrent:
        return f"{running} episodes are running, the maximum (max_concurrent_rollouts={limits.max_concurrent})"
    counted = "accepted" if limits.smallest_batch is None else "accepted or rejected"
    started = f"{accepted} {counted} and {running} running episodes"
    if accepted + running >= limits.total_episodes:
        return f"the run needs no more than its {started}"
    if limits.queue_size is not None and waiting + running >= limits.queue_size:
        return (
            f"{waiting} waiting and {running} running episodes reach the limit rollout.queue_size={limits.queue_size}"
        )
    if counts.lead is not None and counts.ahead(limits.batch_size) >= counts.lead:
        lead = f"{counts.lead} episodes more than version {version} needs, which rollout.target_staleness allows now"
        return f"{started} are the {lead}, until policy version {version + 1} is published"
    return (
        f"{started} reach the limit ({limits.max_staleness} + {version} + 1) x {limits.batch_size} = "
        f"{limits.open_until(version)} until policy version {version + 1} is published"
    )
