"""Cost of the ledger per episode, compared with SQLite in WAL mode for the same durable inserts in the same run.

    python benchmark/ledger_cost.py [--episodes 100000] [--realistic-episodes 2000] [--folder DIR]

Two kinds of episode: tiny ones (one trajectory of 16 tokens, as in the quickstart) and realistic ones (16 trajectories
of 200 tokens). Both sides write the same events (admitted, accepted, batched, published, consumed) and the same
payloads, and make them durable at the same moments: when a batch is served, when a version was published, when a step
was consumed. SQLite: one table of events and one of payloads, journal_mode=WAL, synchronous=FULL, one commit at each
of those moments. CPU time is that of the whole process with its writer thread and fsyncs; the encoding of trajectories,
which both need, is reported separately. Rebuilding reads all events and applies them to the state machine on both
sides. Audit and statistics also read every payload. Prints one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from areal.api.data import Trajectory, TrajectoryGroup
from areal.data.prompt_stream import PromptStream
from areal.ledger.audit import audit
from areal.ledger.event_files import recover_folder
from areal.ledger.ledger import Ledger
from areal.ledger.payload import EncodedEpisode, encode_episode
from areal.ledger.state import Event, LedgerState
from areal.ledger.stats import ledger_stats
from areal.rollout.controller_process import collecting_cycles

RIVAL = f"SQLite {sqlite3.sqlite_version} (WAL, synchronous=FULL)"


class SqliteLog:
    """An EventLog on SQLite, so that the same Ledger writes to it."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("CREATE TABLE events (number INTEGER PRIMARY KEY, body BLOB)")
        self._database.execute("CREATE TABLE payloads (number INTEGER PRIMARY KEY, body BLOB)")
        self._events: list[tuple[bytes]] = []
        self._payloads: list[tuple[int, bytes]] = []
        self._num_payloads = 0

    def start(self, on_failure: Callable[..., None]) -> None:
        return None

    def append(self, event: Event) -> None:
        self._events.append((orjson.dumps(event),))

    def append_payload(self, data: bytes) -> tuple[int, int, int]:
        self._num_payloads += 1
        self._payloads.append((self._num_payloads, data))
        return (0, self._num_payloads, len(data))

    def keep(self, episode_id: int, attempt: int, data: bytes) -> None:
        return None

    async def durable(self) -> None:
        if self._events:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT INTO payloads VALUES (?, ?)", self._payloads)
            self._database.executemany("INSERT INTO events (body) VALUES (?)", self._events)
            self._database.execute("COMMIT")
            self._events, self._payloads = [], []

    async def close(self) -> None:
        await self.durable()
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._database.close()


def rebuild_sqlite(path: Path) -> LedgerState:
    database = sqlite3.connect(path)
    rows = database.execute("SELECT body FROM events ORDER BY number")
    state = LedgerState.replay(orjson.loads(body) for (body,) in rows)
    database.close()
    return state


def make_group(num_trajectories: int, num_tokens: int, *, version: int) -> TrajectoryGroup:
    half = num_tokens // 2
    trajectory = Trajectory(
        token_ids=list(range(num_tokens)),
        loss_mask=[0] * half + [1] * (num_tokens - half),
        rollout_logprobs=[0.0] * half + [-0.5] * (num_tokens - half),
        output_versions=[-1] * half + [version] * (num_tokens - half),
        reward=1.0,
        finished=True,
    )
    return TrajectoryGroup(trajectories=[trajectory] * num_trajectories)


async def write_run(ledger: Ledger, episodes: list[EncodedEpisode], batch_size: int) -> float:
    """CPU seconds to record a run that trains on all `episodes`, batch by batch."""
    began_s = time.process_time()
    ledger.start(lambda failure: None)
    ledger.started(PromptStream([{}] * 4096, seed=1, batch_size=batch_size), total_steps=len(episodes) // batch_size)
    ledger.attached(step=0, version=0)
    for step in range(len(episodes) // batch_size):
        ids = range(step * batch_size, (step + 1) * batch_size)
        for _ in ids:
            ledger.admit(version=step)
        for episode_id in ids:
            ledger.accept(
                episode_id,
                episodes[episode_id],
                stats={"num_turns": 1.0},
                seconds=1.5,
                replicas=["server-0"],
                num_interruptions=0,
            )
        ledger.batched(step=step, version=step, mask_before=0, episode_ids=ids, stats={"reward": 1.0})
        await ledger.durable()
        ledger.published(version=step + 1, kind="disk", path="weights")
        await ledger.durable()
        ledger.consumed(step=step, version=step + 1)
        await ledger.durable()
    await ledger.close()
    return time.process_time() - began_s


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, which other processes on the machine do not change, and the result."""
    began_s = time.process_time()
    result = function()
    return time.process_time() - began_s, result


def measure(shape: tuple[int, int], num_episodes: int, args: argparse.Namespace) -> dict[str, float]:
    """All figures of one kind of episode."""
    num_episodes = num_episodes // args.batch_size * args.batch_size
    groups = [make_group(*shape, version=step) for step in range(num_episodes // args.batch_size)]
    began_s = time.process_time()
    episodes = [encode_episode(number, groups[number // args.batch_size]) for number in range(num_episodes)]
    encode_us = (time.process_time() - began_s) / num_episodes * 1e6
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        ours_s, rival_s = float("inf"), float("inf")
        for repeat in range(args.repeats):
            folder, database = Path(name) / f"ledger-{repeat}", Path(name) / f"rival-{repeat}.sqlite"
            writing = write_run(Ledger.open(folder), episodes, args.batch_size)
            ours_s = min(ours_s, asyncio.run(collecting_cycles(writing)))
            rival = Ledger(SqliteLog(database), read_payload=lambda where: b"")
            rival_s = min(rival_s, asyncio.run(collecting_cycles(write_run(rival, episodes, args.batch_size))))
        per_100k = 100_000 / num_episodes
        rebuild_s, recovered = timed(lambda: recover_folder(folder))
        rival_rebuild_s, rival_state = timed(lambda: rebuild_sqlite(database))
        assert recovered.state.counts == rival_state.counts
        audit_events_s, report = timed(lambda: audit(folder, check_payloads=False))
        assert report.is_clean, report.lines()
        audit_s, report = timed(lambda: audit(folder))
        assert report.is_clean, report.lines()
        stats_s, _ = timed(lambda: ledger_stats(folder))
        payload_bytes = sum(len(episode.payload) for episode in episodes)
        return {
            "encode_us": encode_us,
            "cpu_us": ours_s / num_episodes * 1e6,
            "rival_cpu_us": rival_s / num_episodes * 1e6,
            "event_bytes": (size_of(folder) - payload_bytes) / num_episodes,
            "payload_bytes": payload_bytes / num_episodes,
            "rival_bytes": size_of(database) / num_episodes,
            "bytes": size_of(folder) / num_episodes,
            "rebuild_s_per_100k": rebuild_s * per_100k,
            "rival_rebuild_s_per_100k": rival_rebuild_s * per_100k,
            "audit_events_s_per_100k": audit_events_s * per_100k,
            "audit_s_per_100k": audit_s * per_100k,
            "stats_s_per_100k": stats_s * per_100k,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000, help="tiny episodes")
    parser.add_argument(
        "--realistic-episodes", type=int, default=2_000, help="episodes of 16 trajectories of 200 tokens"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="episodes per train batch")
    parser.add_argument("--repeats", type=int, default=3, help="times everything is written; the best time counts")
    parser.add_argument("--folder", default=None, help="where the files are written; default: the temporary folder")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for kind, shape, num_episodes in (
        ("tiny", (1, 16), args.episodes),
        ("realistic", (16, 200), args.realistic_episodes),
    ):
        figures = results[kind] = measure(shape, num_episodes, args)
        print(f"{kind}: {num_episodes} episodes of {shape[0]} x {shape[1]} tokens, batches of {args.batch_size}")
        for what, ours, rival, unit in (
            ("append and group commit", figures["cpu_us"], figures["rival_cpu_us"], "us CPU/episode"),
            ("on disk", figures["bytes"], figures["rival_bytes"], "bytes/episode"),
            ("rebuild", figures["rebuild_s_per_100k"], figures["rival_rebuild_s_per_100k"], "s CPU/100k"),
        ):
            print(f"  {what:<26} {ours:>10.2f} {unit:<16} {RIVAL}: {rival:.2f}, ours is {ours / rival:.2f} of that")
        print(f"  {'bytes of events alone':<26} {figures['event_bytes']:>10.0f} bytes/episode")
        print(f"  {'encoding before that':<26} {figures['encode_us']:>10.2f} us CPU/episode")
        for what in ("audit_events", "audit", "stats"):
            print(f"  {what:<26} {figures[f'{what}_s_per_100k']:>10.2f} s CPU/100k episodes", flush=True)
    rounded = {kind: {name: round(value, 2) for name, value in figures.items()} for kind, figures in results.items()}
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
