"""Options of the rollout controller: concurrency, staleness, requests."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from areal.api.config.fields import Problems, choice, number, option


@dataclass(frozen=True, kw_only=True)
class InferenceEngineConfig:
    """How the rollout controller runs episodes and talks to the inference servers."""

    max_concurrent_rollouts: int | None = number(None, low=1)
    """Maximum episodes in flight; null = train_dataset.batch_size x (max_head_offpolicyness + 1)."""
    queue_size: int | None = number(None, low=1)
    """Maximum episodes that run or wait for a train step, at least train_dataset.batch_size; null = no such limit."""
    consumer_batch_size: int | None = number(None, low=1)
    """Accepted for AReaL files: episodes per train step, must equal train_dataset.batch_size; null = that value."""
    max_head_offpolicyness: int = number(0, low=0, also="ROLL: async_generation_ratio")
    """Maximum staleness, in policy versions, that the admission gate allows; 0 = synchronous RL."""
    on_stale: str = choice("train", "train", "mask", "drop", "wait")
    """Above max_head_offpolicyness: train, mask = exclude old tokens, drop = reject; wait = in admission order."""
    weight_update: str = choice("interrupt", "interrupt", "keep", "keep_cache")
    """Requests at a weight update: interrupt = sent again, keep = KV cache recomputed, keep_cache = KV cache kept."""
    canary: str = choice("on", "on", "off")
    """After each weight update compare the servers' answers to a fixed probe; restart a server that differs."""
    schedule_policy: str = choice("least_loaded", "round_robin", "least_loaded", "prefix_affinity")
    """Server of a request: in turn, fewest running requests, or longest cached prefix; groups stay on one server."""
    check_trajectory_format: bool = False
    """Check lengths, masks and finite numbers of every trajectory and fail the episode of an invalid one."""
    enable_rollout_tracing: bool = False
    """Log every start and end of an episode with the policy version and the numbers of episodes in each state."""
    should_accept_fn: str = ""
    """Filter of scored groups: a registered name (mixed_rewards) or module:function; empty = accept all groups."""
    max_rejected_per_step: int | None = number(None, low=1)
    """Maximum rejected groups per train step; the run fails above it; null = no limit."""
    dynamic_bs: bool = option(False, also="AReaL 1.0: dynamic_bs")
    """Start a step once batch_size groups are accepted or rejected; train on those accepted, one or more per rank."""
    batch_transfer: str = choice("auto", "auto", "files", "http")
    """Source of the batches of a rank: files = the ledger folder, http = the controller, auto = files if readable."""
    keep_rejected: int = number(32, low=0)
    """Newest rejected and failed episodes whose answers are kept in the ledger for `areal show`; 0 = none."""
    keep_payloads: str = option("all")
    """Trajectories kept: all; recover = since the second newest recovery checkpoint; N = also of the newest N steps."""
    server_addrs: list[str] = field(default_factory=list[str])
    """Running servers to use (host:port or http://host:port), one per server of allocation_mode; [] = start servers."""
    setup_timeout: float = number(300.0, above=0)
    """Maximum seconds until all servers, once they have loaded, are healthy; the default grows with the checkpoint."""
    stream_interval: int = number(32, low=1)
    """Tokens per event of a streamed answer; a request whose server fails loses at most this many tokens."""
    request_timeout: float = number(3600.0, above=0)
    """Maximum seconds of a generation request on one server; it then continues on another."""
    request_retries: int = number(3, low=1)
    """Maximum server failures of one request before its episode fails."""
    pause_grace_period: float = number(0.0, low=0)
    """Seconds between pausing the servers and the weight update."""
    health_check_interval_s: float = number(1.0, above=0)
    """Seconds between two health checks of a server; a hung server is detected within eleven intervals."""
    weight_update_timeout_s: float = number(300.0, above=0)
    """Maximum seconds of a weight update on one server before the server is treated as failed."""

    def problems(self) -> Problems:
        if not re.fullmatch(r"all|recover|[1-9]\d*", self.keep_payloads):
            yield "keep_payloads", f"is {self.keep_payloads!r}: write all, recover, or a number of train steps from 1"
        if self.dynamic_bs and self.on_stale in ("drop", "wait"):
            yield (
                "dynamic_bs",
                f"makes batches of what is accepted first, which on_stale={self.on_stale} does not allow",
            )
        if self.dynamic_bs and self.max_rejected_per_step is not None:
            yield "dynamic_bs", "counts rejected groups as part of a step: remove max_rejected_per_step"
        for text, problem in address_problems(self.server_addrs):
            yield "server_addrs", f"{text!r} {problem}"


def address_problems(addresses: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(address, what is wrong with it) for every invalid or repeated server address."""
    seen: set[str] = set()
    for text in addresses:
        try:
            url = server_url(text)
        except ValueError as error:
            yield text, f"is not a server address ({error}): write host:port or http://host:port"
            continue
        if url in seen:
            yield text, "is listed twice: every server needs its own address"
        seen.add(url)


def server_url(text: str) -> str:
    """`text` as http://host:port. Raises ValueError with the reason if it is not a server address."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise ValueError(f"only http is supported, not {parts.scheme}")
    if not parts.hostname or parts.username is not None or any(character.isspace() for character in text):
        raise ValueError("it has no host")
    if not parts.port:
        raise ValueError("it has no port")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("there is text after the port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{parts.port}"
