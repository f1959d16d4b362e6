"""Owns the options of the rollout side: concurrency, staleness, requests, rewards."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import choice, number


@dataclass(frozen=True, kw_only=True)
class InferenceEngineConfig:
    """How the rollout controller runs episodes and talks to the inference servers."""

    max_concurrent_rollouts: int | None = number(None, low=1)
    """Most episodes in flight; null = consumer_batch_size x (max_head_offpolicyness + 1)."""
    consumer_batch_size: int | None = number(None, low=1)
    """Episodes of one train step; null = train_dataset.batch_size, and it may be nothing else."""
    max_head_offpolicyness: int = number(0, low=0)
    """Largest version lag the admission gate plans for; 0 = synchronous RL."""
    on_stale: str = choice("train", "train", "mask", "drop", "wait")
    """An episode older than the bound: train on it, mask its old tokens, drop it; wait = consume in admission order."""
    weight_update: str = choice("interrupt", "interrupt", "keep")
    """New weights and requests in flight: interrupt = return and continue, keep = recompute their cache in place."""
    schedule_policy: str = choice("least_loaded", "round_robin", "least_loaded")
    """How a replica is picked for a new group of requests; siblings always stay together."""
    check_trajectory_format: bool = False
    """Check every returned trajectory (lengths, masks, finite numbers) and fail the episode that breaks a rule."""
    enable_rollout_tracing: bool = False
    """Log every admission and end of an episode with the gate's counters."""
    should_accept_fn: str = ""
    """Filter of scored groups: a registered name (mixed_rewards) or module:function; empty = accept all."""
    setup_timeout: float = number(120.0, above=0)
    """Seconds to wait for the servers to get healthy."""
    stream_interval: int = number(32, low=1)
    """Tokens per event of a streamed answer, and the most that a running request loses with its replica."""
    request_timeout: float = number(3600.0, above=0)
    """Seconds after which a generation request is given up on one replica and continued elsewhere."""
    request_retries: int = number(3, low=1)
    """Replica failures one request survives before its episode fails."""
    pause_grace_period: float = number(0.0, low=0)
    """Seconds between the pause of the servers and the weight update."""
    health_check_interval_s: float = number(1.0, above=0)
    """Seconds between two health checks of a replica; nothing waits for a hung one longer than eleven of these."""
    weight_update_timeout_s: float = number(300.0, above=0)
    """Seconds a replica that answers its health checks may take for a weight update before it is declared dead."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The pool of processes that runs reward functions."""

    workers: int | None = number(None, low=1)
    """Worker processes; null = half of the cores, at least one."""
    timeout_s: float = number(15.0, above=0)
    """Seconds one call may take; its process is then killed and replaced."""
    on_error: str = choice("fail", "fail", "zero")
    """A reward that raised, timed out or is not finite: fail = the episode fails, zero = it scores 0 and is counted."""
