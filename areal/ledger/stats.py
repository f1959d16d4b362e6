"""Statistics of a ledger: histograms of staleness, length and latency, reasons, rates and sizes."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from areal.api.errors import LedgerError
from areal.api.metrics import rounded
from areal.data.prefix_tree import sorted_rows
from areal.ledger.event_files import PayloadReader, Progress, open_reader
from areal.ledger.payload import read_table
from areal.ledger.state import SKIPPED_KEY, Event, failure_key

BAR_WIDTH = 40
MAX_SINGLE = 16
"""Values up to this one have a line each. With larger values, each line covers twice the range of the previous one."""
MAX_GAP_S = 86400.0
"""A longer time between two groups of events is a jump of the clock."""


@dataclass(slots=True)
class Histogram:
    """Counts of whole numbers."""

    title: str
    unit: str = ""
    scale: float = 1.0
    """The value of 1 in `unit`."""
    counts: Counter[int] = field(default_factory=Counter[int])

    def quantile(self, share: float) -> float:
        """Smallest value that is not below this share of all values."""
        wanted, seen = share * self.counts.total(), 0
        for value in sorted(self.counts):
            seen += self.counts[value]
            if seen >= wanted:
                return value * self.scale
        return 0.0

    def bins(self) -> list[tuple[int, int, int]]:
        """Smallest value, largest value and count of each bin, in order."""
        if not self.counts:
            return []
        lowest, highest = min(self.counts), max(self.counts)
        if highest <= MAX_SINGLE and highest - lowest < 64:
            return [(value, value, self.counts[value]) for value in range(lowest, highest + 1)]
        by_bits = Counter[int]()
        for value, times in self.counts.items():
            by_bits[max(value, 0).bit_length()] += times
        return [
            (min(lowest, 0) if bits == 0 else 1 << (bits - 1), (1 << bits) - 1, by_bits[bits])
            for bits in range(min(by_bits), max(by_bits) + 1)
        ]

    def lines(self) -> list[str]:
        total, bins = self.counts.total(), self.bins()
        if not total:
            return [f"{self.title}: no values"]
        mean = sum(value * times for value, times in self.counts.items()) / total * self.scale
        quantiles = ", ".join(f"{name} {self.quantile(share):g}" for name, share in (("median", 0.5), ("99%", 0.99)))
        head = f"{self.title}{f' ({self.unit})' if self.unit else ''}: {total}, mean {rounded(mean)}, {quantiles}"
        scale = self.scale
        labels = [f"{low * scale:g}" + (f" to {high * scale:g}" if high > low else "") for low, high, _ in bins]
        width, most = max(map(len, labels)), max(times for _, _, times in bins)
        return [f"{head}, maximum {max(self.counts) * self.scale:g}"] + [
            f"  {label:>{width}} {'#' * -(-times * BAR_WIDTH // most):<{BAR_WIDTH}} {times} ({times / total:.1%})"
            for label, (_, _, times) in zip(labels, bins, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        bins = [{"from": low * self.scale, "to": high * self.scale, "count": times} for low, high, times in self.bins()]
        return {
            "unit": self.unit,
            "count": self.counts.total(),
            "median": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "bins": bins,
        }


@dataclass(slots=True)
class LedgerStats:
    """The statistics of one ledger."""

    staleness: Histogram = field(default_factory=lambda: Histogram("staleness of trained tokens", "versions"))
    length: Histogram = field(default_factory=lambda: Histogram("length of trajectories", "tokens"))
    latency: Histogram = field(default_factory=lambda: Histogram("duration of accepted episodes", "s", scale=0.001))
    interruptions: Histogram = field(default_factory=lambda: Histogram("interruptions per accepted episode"))
    attempts: Histogram = field(default_factory=lambda: Histogram("attempts per ended episode"))
    reasons: Counter[str] = field(default_factory=Counter[str])
    num_accepted: int = 0
    generated_tokens: int = 0
    tokens: int = 0
    tree_tokens: int = 0
    """Of the rows of each episode, where a token that they share counts once."""
    seconds: float = 0.0
    """Sum over the controllers of the time between their first and last event."""
    clock_jumps: int = 0
    event_bytes: int = 0
    payload_bytes: int = 0
    unreadable: list[int] = field(default_factory=list[int])
    """Accepted episodes whose payload is missing or damaged."""
    damage: str = ""

    def histograms(self) -> dict[str, Histogram]:
        return {name: getattr(self, name) for name in ("staleness", "length", "latency", "interruptions", "attempts")}

    def rates(self) -> dict[str, float]:
        """Rates per second and per episode, as far as they are defined."""
        rates: dict[str, float] = {"seconds": self.seconds}
        if self.seconds > 0:
            rates["episodes_per_s"] = self.num_accepted / self.seconds
            rates["generated_tokens_per_s"] = self.generated_tokens / self.seconds
        if self.tree_tokens:
            rates["tree_ratio"] = self.tokens / self.tree_tokens
        if self.num_accepted:
            rates["event_bytes_per_episode"] = self.event_bytes / self.num_accepted
            rates["payload_bytes_per_episode"] = self.payload_bytes / self.num_accepted
        return rates

    def lines(self) -> list[str]:
        """The statistics for people."""
        lines: list[str] = []
        for histogram in self.histograms().values():
            lines += [*histogram.lines(), ""]
        lines += [f"{reason}: {times}" for reason, times in self.reasons.most_common()] or [
            "no episode was rejected or failed"
        ]
        rates = self.rates()
        lines.append(f"{self.num_accepted} accepted episodes with {self.generated_tokens} generated tokens")
        if "episodes_per_s" in rates:
            per_s = f"{rounded(rates['episodes_per_s'])} accepted episodes/s and "
            per_s += f"{rounded(rates['generated_tokens_per_s'])} generated tokens/s"
            lines.append(f"{per_s} during {self.seconds:.1f} s of controller time")
        if "event_bytes_per_episode" in rates:
            lines.append(
                f"{rates['event_bytes_per_episode']:.0f} bytes of events and {rates['payload_bytes_per_episode']:.0f} "
                "of payload per accepted episode"
            )
        if "tree_ratio" in rates:
            lines.append(
                f"tree ratio {rates['tree_ratio']:.2f}: {self.tokens} tokens, {self.tree_tokens} shared ones once"
            )
        if self.clock_jumps:
            lines.append(f"the clock jumped {self.clock_jumps} times; these times are not counted")
        if self.unreadable:
            lines.append(f"{len(self.unreadable)} payloads cannot be read and are not counted; the audit lists them")
        if self.damage:
            lines.append(f"incomplete: {self.damage}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """The statistics, JSON-ready."""
        return {
            "histograms": {name: histogram.to_json() for name, histogram in self.histograms().items()},
            "reasons": dict(self.reasons),
            "num_accepted": self.num_accepted,
            "generated_tokens": self.generated_tokens,
            "clock_jumps": self.clock_jumps,
            "unreadable": self.unreadable,
            "damage": self.damage,
            **self.rates(),
        }


def ledger_stats(folder: Path) -> LedgerStats:
    """The statistics of the ledger in `folder`. Raises LedgerError when it holds no events."""
    reader = open_reader(folder)
    with PayloadReader(folder) as payloads, Progress("episodes read") as progress:
        reading = _Reading(payloads, progress)
        for mark, *events in reader.groups():
            reading.count_time(mark["at"], is_start=bool(events) and events[0]["event"] == "started")
            for event in events:
                reading.take(event)
    stats = reading.stats
    stats.damage = reader.damage
    stats.event_bytes = sum(path.stat().st_size for path in folder.glob("events-*.jsonl"))
    stats.payload_bytes = sum(path.stat().st_size for path in folder.glob("payload-*.bin"))
    return stats


@dataclass(slots=True)
class _Reading:
    """One pass over all events."""

    payloads: PayloadReader
    progress: Progress
    stats: LedgerStats = field(default_factory=LedgerStats)
    _attempts: dict[int, int] = field(default_factory=dict[int, int])
    _versions: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    """Version and number of tokens, for each episode that waits for a batch."""
    _last_s: float | None = None

    def take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "admitted":
            self._attempts[event["id"]] = event["attempt"] + 1
        elif kind == "accepted":
            self._accepted(event)
        elif kind in ("rejected", "failed"):
            self.stats.reasons[f"rejected: {event['reason']}" if kind == "rejected" else failure_key(event)] += 1
            self._versions.pop(event["id"], None)
            self._ended(event["id"])
        elif kind == "skipped":
            self.stats.reasons[SKIPPED_KEY] += len(event["ids"])
        elif kind == "batched":
            for episode_id in event["ids"]:
                for version, times in self._versions.pop(episode_id, []):
                    self.stats.staleness.counts[event["version"] - version] += times

    def count_time(self, at: float, *, is_start: bool) -> None:
        """Count the time since the previous group unless a controller started (`is_start`) or the clock jumped."""
        if self._last_s is not None and not is_start:
            passed = at - self._last_s
            if 0 <= passed <= MAX_GAP_S:
                self.stats.seconds += passed
            else:
                self.stats.clock_jumps += 1
        self._last_s = at

    def _ended(self, episode_id: int) -> None:
        attempts = self._attempts.pop(episode_id, None)
        if attempts is not None:  # an episode dropped as stale has ended before
            self.stats.attempts.counts[attempts] += 1

    def _accepted(self, event: Event) -> None:
        stats = self.stats
        self.progress.step()
        stats.num_accepted += 1
        stats.latency.counts[round(event["seconds"] * 1000)] += 1
        stats.interruptions.counts[event["interruptions"]] += 1
        self._ended(event["id"])
        try:
            columns = read_table(self.payloads, event)
        except LedgerError:
            stats.unreadable.append(event["id"])
            return
        stats.length.counts.update(columns.lengths.tolist())
        made = columns.output_versions[columns.output_versions >= 0]
        low = int(made.min()) if len(made) else 0
        times: list[int] = np.bincount(made - low).tolist() if len(made) else []
        self._versions[event["id"]] = [(low + above, count) for above, count in enumerate(times) if count]
        stats.generated_tokens += len(made)
        stats.tokens += len(columns.token_ids)
        bounds = np.concatenate([[0], np.cumsum(columns.lengths)])
        stats.tree_tokens += sorted_rows(columns.token_ids.astype(np.uint32), bounds).tree_tokens
