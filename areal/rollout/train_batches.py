"""Composes train batch k when a trainer requests it, and serves recorded batches again after a restart.

A request waits until enough accepted episodes exist, at most for its time limit. `compose_if_ready` wakes it; the
controller calls that after every accepted episode and every new policy version.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from areal.api.batch_share import BatchShare
from areal.ledger.ledger import Ledger
from areal.ledger.state import WAITING, AcceptedEpisode, BatchRecord
from areal.rollout.batching import build_shares, episode_stats, token_stats
from areal.rollout.producer_stats import ProducerStats
from areal.rollout.share_codec import encode_share

CACHED_STEPS = 2
"""Encoded batches kept in memory; older ones are rebuilt from the ledger."""


class TrainBatches:
    """The batches of a run, by train step."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        batch_size: int,
        max_staleness: int,
        on_stale: str,
        producer: ProducerStats,
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self._ledger = ledger
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._on_stale = on_stale
        self._producer = producer
        self._on_fatal = on_fatal
        self._shares: dict[tuple[int, int], list[bytes]] = {}  # by (step, dp_size)
        self._wanted: dict[int, asyncio.Future[None]] = {}
        self._dp_size = 1
        self._requested_s: dict[int, float] = {}
        self.last: BatchRecord | None = None
        """The batch served last; it may be a recorded one."""

    @property
    def wanted_step(self) -> int | None:
        """The train step whose batch a trainer waits for."""
        return min(self._wanted, default=None)

    async def get(self, step: int, dp_rank: int, dp_size: int, *, timeout_s: float) -> bytes | None:
        """The encoded share of one rank; the batch is durable before it is served. None: not ready in time."""
        if step not in self._ledger.state.batches:
            self._dp_size = dp_size
            await self._wait_for(step, timeout_s)
            if step not in self._ledger.state.batches:
                return None
        await self._ledger.durable()
        self.last = self._ledger.state.batches[step]
        return self._encoded(step, dp_size)[dp_rank]

    async def _wait_for(self, step: int, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._requested_s.setdefault(step, loop.time())
        composed = self._wanted.get(step)
        if composed is None:
            composed = self._wanted[step] = loop.create_future()
            self.compose_if_ready()
        await asyncio.wait([composed], timeout=timeout_s)

    def compose_if_ready(self) -> None:
        """Compose the requested batch if possible. Its version is the one that trains on it, so the trainer must have
        finished the previous step."""
        if not self._wanted:
            return
        state = self._ledger.state
        step = state.next_step
        if step in self._wanted and step == state.trained_steps and not state.is_catching_up:
            try:
                self._compose(step)
            except Exception as error:  # noqa: BLE001 - a batch that cannot be composed ends the run, with its cause
                self._on_fatal(error)

    def waiting_since_s(self, step: int) -> float | None:
        """Loop time of the first request for batch `step`, which is not ready."""
        return self._requested_s.get(step)

    def cancel_requests(self, beyond: int = -1) -> None:
        """End the waits for batches after step `beyond`, which will not be composed or whose trainer died."""
        for step in [step for step in self._wanted if step > beyond]:
            self._requested_s.pop(step, None)
            waiting = self._wanted.pop(step)
            if not waiting.done():
                waiting.set_result(None)

    def _compose(self, step: int) -> None:
        state = self._ledger.state
        if state.counts[WAITING] < self._batch_size:
            return
        # "wait" takes episodes strictly in order of admission, which bounds the staleness of each
        ids = state.oldest_waiting(self._batch_size, in_order=self._on_stale == "wait")
        if len(ids) < self._batch_size:
            return
        version = state.version
        floor = max(0, version - self._max_staleness) if self._on_stale == "mask" else 0
        episodes = [state.waiting[episode_id] for episode_id in ids]
        payloads = [self._ledger.payload(episode.episode_id, episode.payload) for episode in episodes]
        shares = build_shares(payloads, step=step, version=version, mask_before=floor, dp_size=self._dp_size)
        stats = token_stats(shares, max_staleness=self._max_staleness) | self._episode_stats(step, episodes)
        record = self._ledger.batched(step=step, version=version, mask_before=floor, episode_ids=ids, stats=stats)
        self._keep(record, shares)
        composed = self._wanted.pop(step)
        if not composed.done():
            composed.set_result(None)

    def _episode_stats(self, step: int, episodes: list[AcceptedEpisode]) -> dict[str, float]:
        state, now_s = self._ledger.state, asyncio.get_running_loop().time()
        stats = episode_stats(episodes)
        stats["wait_s"] = now_s - self._requested_s.pop(step, now_s)
        stats["queue_length"] = float(len(state.waiting) - len(episodes))
        stats["running"] = float(len(state.running))
        return stats | self._producer.since_last_batch(now_s, [episode.num_tokens for episode in episodes])

    def _encoded(self, step: int, dp_size: int) -> list[bytes]:
        if (step, dp_size) not in self._shares:
            record = self._ledger.state.batches[step]
            pairs = zip(record.episode_ids, record.payloads, strict=True)
            payloads = [self._ledger.payload(episode_id, where) for episode_id, where in pairs]
            shares = build_shares(
                payloads, step=step, version=record.version, mask_before=record.mask_before, dp_size=dp_size
            )
            self._keep(record, shares)
        return self._shares[step, dp_size]

    def _keep(self, record: BatchRecord, shares: list[BatchShare]) -> None:
        """Encode a batch once, so that repeated requests get identical bytes."""
        self._shares[record.step, len(shares)] = [encode_share(replace(share, stats=record.stats)) for share in shares]
        while len(self._shares) > CACHED_STEPS:
            self._shares.pop(next(iter(self._shares)))
        self._ledger.forget(record.episode_ids)
