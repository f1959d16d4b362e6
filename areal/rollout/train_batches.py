"""Composes train batch k when a trainer requests it, and serves recorded batches again after a restart.

No payload is read here unless a trainer rank cannot read the files of the ledger: the statistics of a batch are in the
events of its episodes.

A request waits until enough accepted episodes exist, at most for its time limit. `compose_if_ready` wakes it; the
controller calls that after every accepted episode, train step and new policy version.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import mul

import numpy as np

from areal.api.batch import BatchShare
from areal.api.table import StoredColumn, joined, union
from areal.data.balance import Partition, balanced_parts
from areal.data.tree_shares import tree_parts
from areal.ledger.ledger import Ledger
from areal.ledger.payload import PayloadHead, payload_head, table_of
from areal.ledger.state import REJECTED, WAITING, AcceptedEpisode, BatchRecord, TokenCounts
from areal.rollout.executor import ProducerStats
from areal.rollout.setpoint import SetPoint

# ----------------------------------------------------------------------------------------------------------------------
# Splits a train batch into shares, one per data-parallel rank, and computes its statistics. Pure.
#
# A batch depends only on its ledger record and the payloads of its episodes, so it can be rebuilt byte for byte.

MAX_STALENESS_BIN = 8
"""Staleness from this value on shares one bin of the histogram."""


@dataclass(frozen=True, slots=True)
class SharePart:
    """Which episodes of a batch are the share of one rank."""

    indices: list[int]
    """Positions in the batch, ascending."""
    columns: tuple[StoredColumn, ...] = ()
    """Those of any episode of the whole batch."""


def share_parts(heads: Sequence[PayloadHead], dp_size: int) -> list[SharePart]:
    """The share of each rank, with whole groups: balanced by tokens, or by those of trees if the heads have these."""
    trees = [head.tree for head in heads if head.tree is not None]
    parts = tree_parts(trees, dp_size) if trees else balanced_parts([head.num_tokens for head in heads], dp_size)
    return as_shares(heads, parts)


def as_shares(heads: Sequence[PayloadHead], parts: Sequence[list[int]]) -> list[SharePart]:
    """The parts of a batch as shares. Raises LedgerError when episodes have one column in two forms."""
    columns = union([head.columns for head in heads])
    return [SharePart(part, columns) for part in parts]


def build_share(
    payloads: Sequence[bytes],
    part: SharePart,
    *,
    step: int,
    version: int,
    mask_before: int,
    stats: dict[str, float] | None = None,
) -> BatchShare:
    """The share of one rank, of the payloads of its episodes, which are checked."""
    tables = [table_of(payload) for payload in payloads]
    table = joined(tables, part.columns)
    if mask_before > 0:
        table = replace(table, loss_mask=table.loss_mask * (table.output_versions >= mask_before))
    sizes = [len(each.lengths) for each in tables]
    group_index = np.repeat(np.array(part.indices, dtype="<i4"), sizes)
    return BatchShare(step=step, version=version, table=table, group_index=group_index, stats=stats or {})


def token_stats(
    episodes: Sequence[TokenCounts], *, version: int, mask_before: int, max_staleness: int
) -> dict[str, float]:
    """Sizes and mean reward of a batch, and the staleness of its generated tokens, including masked ones.

    `version` trains on it; tokens of versions below `mask_before` are excluded from the loss.
    """
    num_trajectories, num_sessions, num_finished, longest, reward, by_version = _joined(episodes)
    by_staleness = Counter[int]()
    num_tokens = num_trained = 0
    for made_by, tokens, trained in by_version:
        num_tokens += tokens
        num_trained += trained if made_by >= mask_before or not mask_before else 0
        if made_by >= 0:
            by_staleness[version - made_by] += tokens
    num_generated = by_staleness.total()
    stats = {
        "num_trajectories": float(num_trajectories),
        "num_sessions": float(num_sessions),
        "tokens": float(num_tokens),
        "generated_tokens": float(num_generated),
        "trained_tokens": float(num_trained),
        "length_mean": num_tokens / num_trajectories,
        "length_max": float(longest),
        "finished_frac": num_finished / num_sessions,
        "reward": reward,
    }
    if num_generated == 0:
        return stats | {"staleness_mean": 0.0, "staleness_max": 0.0, "stale_tokens_frac": 0.0}
    num_stale = sum(tokens for staleness, tokens in by_staleness.items() if staleness > max_staleness)
    stats |= {
        "staleness_mean": sum(staleness * tokens for staleness, tokens in by_staleness.items()) / num_generated,
        "staleness_max": float(max(by_staleness)),
        "stale_tokens_frac": num_stale / num_generated,
    }
    bins = [0] * (min(max(*by_staleness, 0), MAX_STALENESS_BIN) + 1)
    for staleness, tokens in by_staleness.items():
        bins[min(max(staleness, 0), MAX_STALENESS_BIN)] += tokens
    return stats | {f"staleness_frac/{value}": tokens / num_generated for value, tokens in enumerate(bins)}


def _joined(episodes: Sequence[TokenCounts]) -> TokenCounts:
    """The counts of several episodes as those of one."""
    trajectories, sessions, finished, longest, rewards, by_version = zip(*episodes, strict=True)
    num_sessions = sum(sessions)
    tokens, trained = Counter[int](), Counter[int]()
    for (version, made, used), times in Counter(chain.from_iterable(by_version)).items():
        tokens[version] += made * times
        trained[version] += used * times
    return TokenCounts(
        sum(trajectories),
        num_sessions,
        sum(finished),
        max(longest),
        sum(map(mul, rewards, sessions)) / num_sessions,
        tuple((version, tokens[version], trained[version]) for version in sorted(tokens)),
    )


class BatchSums:
    """The statistics of a batch, added block by block."""

    def __init__(self) -> None:
        self.episodes: list[AcceptedEpisode] = []
        self._blocks: list[TokenCounts] = []
        self._values: dict[str, list[float]] = {}

    def add(self, episodes: Sequence[AcceptedEpisode], counts: Sequence[TokenCounts]) -> None:
        self.episodes += episodes
        self._blocks.append(_joined(counts))
        for episode in [episode for episode in episodes if episode.stats]:
            for name, value in episode.stats.items():
                self._values.setdefault(name, []).append(value)

    def stats(self, *, version: int, mask_before: int, max_staleness: int) -> dict[str, float]:
        """`token_stats` of all, and the mean of each statistic of the workflow over the episodes that have it."""
        stats = token_stats(self._blocks, version=version, mask_before=mask_before, max_staleness=max_staleness)
        means = {f"episode/{name}": sum(values) / len(values) for name, values in self._values.items()}
        return stats | means


BLOCK = 4096
"""Episodes whose statistics are added in one turn of the loop: about 10 ms."""
READ_BLOCK = 256
"""Payloads that one call of a thread reads."""
MERGES = 512
"""Steps of a partition in one turn of the loop: about 2 ms."""
CACHED_STEPS = 2
"""Batches whose partition is kept in memory."""


class TrainBatches:
    """The batches of a run, by train step."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        batch_size: int,
        smallest_batch: int | None = None,
        max_staleness: int,
        on_stale: str,
        by_tree: bool = False,
        setpoint: SetPoint | None = None,
        producer: ProducerStats,
        on_fatal: Callable[[Exception], None],
    ) -> None:
        """`by_tree`: data ranks compute tokens that rows share once, and get about equally many of these."""
        self._ledger = ledger
        self._setpoint = setpoint
        self._by_tree = by_tree
        self._batch_size = batch_size
        self._smallest_batch = smallest_batch
        self._max_staleness = max_staleness
        self._on_stale = on_stale
        self._producer = producer
        self._on_fatal = on_fatal
        self._parts: dict[tuple[int, int], list[SharePart]] = {}  # by (step, dp_size)
        self._partitioning = asyncio.Lock()
        self._wanted: dict[int, asyncio.Future[None]] = {}
        self._requested_s: dict[int, float] = {}
        self._composing: asyncio.Task[None] | None = None
        self.last: BatchRecord | None = None
        """The batch served last; it may be a recorded one."""

    @property
    def wanted_step(self) -> int | None:
        """The train step whose batch a trainer waits for."""
        return min(self._wanted, default=None)

    async def get(self, step: int, *, timeout_s: float) -> BatchRecord | None:
        """The composition of a batch; it and its payloads are durable. None: not ready in time."""
        if step not in self._ledger.state.batches:
            await self._wait_for(step, timeout_s)
            if step not in self._ledger.state.batches:
                return None
        await self._ledger.durable()
        self.last = self._ledger.state.batches[step]
        return self.last

    async def part(self, record: BatchRecord, dp_rank: int, dp_size: int) -> SharePart:
        """The share of one rank. Raises LedgerError when a payload of the batch is missing or damaged."""
        key = record.step, dp_size
        async with self._partitioning:  # all ranks ask at the same time
            if key not in self._parts:
                self._parts[key] = await self._partition(record, dp_size)
                while len(self._parts) > CACHED_STEPS:
                    self._parts.pop(next(iter(self._parts)))
            return self._parts[key][dp_rank]

    async def _partition(self, record: BatchRecord, dp_size: int) -> list[SharePart]:
        """The shares of all ranks, computed in turns of the loop.

        A thread would stall the loop: it holds the interpreter lock for 5 ms each time that the loop waits for it, once
        for each timer and each received piece of data.
        """
        heads: list[PayloadHead] = []
        for start in range(0, len(record.payloads), READ_BLOCK):
            heads += await asyncio.to_thread(self._heads, record, start)
        if record.by_tree:  # mostly in numpy, which does not hold the lock
            return await asyncio.to_thread(share_parts, heads, dp_size)
        partition = Partition([head.num_tokens for head in heads], dp_size)
        while not partition.merge(MERGES):
            await asyncio.sleep(0)
        return as_shares(heads, partition.parts())

    def _heads(self, record: BatchRecord, start: int) -> list[PayloadHead]:
        """The heads of one block of the payloads, which are checked."""
        end = start + READ_BLOCK
        places = zip(record.episode_ids[start:end], record.payloads[start:end], strict=True)
        return [payload_head(self._ledger.payload(*place), with_tree=record.by_tree) for place in places]

    async def payload(self, record: BatchRecord, index: int) -> bytes:
        """One payload of a batch, read in a thread: a batch may be larger than the memory that is free."""
        return await asyncio.to_thread(self._ledger.payload, record.episode_ids[index], record.payloads[index])

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
        finished the previous step; the servers may still have the version before."""
        state = self._ledger.state
        if not self._wanted or (self._smallest_batch is None and state.counts[WAITING] < self._batch_size):
            return
        step = state.next_step
        is_next = step in self._wanted and step == state.trained_steps and not state.is_catching_up
        if not is_next or not self._size() or self._composing is not None:
            return
        if self._batch_size > BLOCK:
            self._composing = asyncio.create_task(self._compose_in_turns(step), name=f"compose batch {step}")
            return
        try:
            if ids := self._chosen():
                sums = BatchSums()
                self._add(sums, ids)
                self._record(step, ids, sums)
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

    async def close(self) -> None:
        """Stop composing."""
        if self._composing is not None:
            self._composing.cancel()
            await asyncio.gather(self._composing, return_exceptions=True)

    def _size(self) -> int:
        """Episodes of the next batch; 0 while it is not ready.

        With a smallest batch, rejected episodes count: the batch is what was accepted once as many episodes were
        accepted or rejected as the steps so far need.
        """
        state, size, smallest = self._ledger.state, self._batch_size, self._smallest_batch
        waiting = state.counts[WAITING]
        if waiting >= size:
            return size
        if smallest is None or waiting < smallest:
            return 0
        decided = state.num_accepted + state.counts[REJECTED]
        return waiting if decided >= (len(state.batches) + 1) * size else 0

    def _chosen(self) -> list[int]:
        """The episodes of the next batch; empty while there are not enough."""
        size = self._size()
        # "wait" takes episodes strictly in order of admission, which bounds the staleness of each
        ids = self._ledger.state.oldest_waiting(size, in_order=self._on_stale == "wait")
        return ids if len(ids) == size else []

    async def _compose_in_turns(self, step: int) -> None:
        """Compose a large batch without stopping the loop for long: its statistics are added block by block."""
        try:
            state = self._ledger.state
            while ids := self._chosen():
                sums, version = BatchSums(), state.trainer_version
                for start in range(0, len(ids), BLOCK):
                    await asyncio.sleep(0)
                    if step not in self._wanted or step != state.next_step or state.trainer_version != version:
                        return  # the trainer went back; its next request composes
                    if not self._add(sums, ids[start : start + BLOCK]):
                        break
                else:
                    if state.waiting.keys() >= set(ids):
                        self._record(step, ids, sums)
                        while sums.episodes:  # to free all at once takes 0.1 s
                            await asyncio.sleep(0)
                            del sums.episodes[-BLOCK:]
                        return
        except Exception as error:  # noqa: BLE001 - a batch that cannot be composed ends the run, with its cause
            self._on_fatal(error)
        finally:
            self._composing = None
            self.compose_if_ready()  # for a request that came meanwhile

    def _add(self, sums: BatchSums, ids: list[int]) -> bool:
        """Add waiting episodes. False, without a change, when one does not wait any more."""
        waiting = self._ledger.state.waiting
        episodes = [waiting[episode_id] for episode_id in ids if episode_id in waiting]
        if len(episodes) == len(ids):
            sums.add(episodes, [episode.counts for episode in episodes])
        return len(episodes) == len(ids)

    def _record(self, step: int, ids: list[int], sums: BatchSums) -> None:
        state, now_s = self._ledger.state, asyncio.get_running_loop().time()
        version = state.trainer_version
        floor = max(0, version - self._max_staleness) if self._on_stale == "mask" else 0
        stats = sums.stats(version=version, mask_before=floor, max_staleness=self._max_staleness)
        stats["wait_s"] = now_s - self._requested_s.pop(step, now_s)
        stats["queue_length"] = float(len(state.waiting) - len(ids))
        stats["running"] = float(len(state.running))
        if self._setpoint is not None:
            stats |= self._setpoint.stats(state, sums.episodes, stats["staleness_mean"])
        stats |= self._producer.since_last_batch(now_s, [episode.num_tokens for episode in sums.episodes])
        self._ledger.batched(
            step=step, version=version, mask_before=floor, episode_ids=ids, stats=stats, by_tree=self._by_tree
        )
        composed = self._wanted.pop(step)
        if not composed.done():
            composed.set_result(None)
