"""Owns the options of the rollout side: concurrency, staleness, requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from areal.api.config.fields import Problems, choice, number


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
    schedule_policy: str = choice("least_loaded", "round_robin", "least_loaded", "prefix_affinity")
    """How a server is picked: in turn, fewest requests, or longest known start of the prompt; groups stay together."""
    check_trajectory_format: bool = False
    """Check every returned trajectory (lengths, masks, finite numbers) and fail the episode that breaks a rule."""
    enable_rollout_tracing: bool = False
    """Log every admission and end of an episode with the gate's counters."""
    should_accept_fn: str = ""
    """Filter of scored groups: a registered name (mixed_rewards) or module:function; empty = accept all."""
    max_rejected_per_step: int | None = number(None, low=1)
    """Groups that may be rejected while those of one train step are accepted; one more ends the run; null = any."""
    server_addrs: list[str] = field(default_factory=list[str])
    """Servers that already run, as host:port or http://host:port, one for each of allocation_mode; [] = start them."""
    setup_timeout: float = number(300.0, above=0)
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

    def problems(self) -> Problems:
        for text, problem in address_problems(self.server_addrs):
            yield "server_addrs", f"{text!r} {problem}"


def address_problems(addresses: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(address as written, what is wrong with it) for each that cannot be the address of a server of its own."""
    seen: set[str] = set()
    for text in addresses:
        try:
            url = server_url(text)
        except ValueError as error:
            yield text, f"is no address of a server ({error}): write host:port or http://host:port"
            continue
        if url in seen:
            yield text, "is given twice: every server needs an address of its own"
        seen.add(url)


def server_url(text: str) -> str:
    """http://host:port of an address that may lack the http://. ValueError, saying why, when it is none."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise ValueError(f"areal speaks plain HTTP, not {parts.scheme}")
    if not parts.hostname or parts.username is not None or any(character.isspace() for character in text):
        raise ValueError("it names no host")
    if not parts.port:
        raise ValueError("it names no port")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("something follows the port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{parts.port}"
