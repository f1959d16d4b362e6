"""Counts the results of episodes since the last batch, and the rate of generated tokens."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping

from areal.api.data import GenerationResponse

RATE_WINDOW_S = 10.0


class ProducerStats:
    """The executor and the evaluations write it; batches and the status read it."""

    def __init__(self) -> None:
        self.generated_tokens = 0
        """Tokens generated since this process started, for training and evaluation."""
        self.num_accepted = self.num_rejected = self.num_failed = self.num_agent_errors = 0
        """Episodes since the last batch; dropped ones count as rejected. Those with agent errors are counted twice."""
        self._replica_tokens: Counter[str] = Counter()
        self._replica_seconds: defaultdict[str, float] = defaultdict(float)
        self._dropped_lengths: list[int] = []
        self._ended: defaultdict[str, list[float]] = defaultdict(list)
        self._last_batch_s: float | None = None
        self._last_batch_tokens = 0
        self._readings: deque[tuple[float, int]] = deque()

    def count_answer(self, response: GenerationResponse) -> None:
        """A request was answered, for training or evaluation."""
        num_tokens = len(response.output_ids)
        self.generated_tokens += num_tokens
        if len(response.replicas) == 1:  # the time of an answer of several replicas cannot be divided
            self._replica_tokens[response.replicas[0]] += num_tokens
            self._replica_seconds[response.replicas[0]] += response.latency_s

    def count_ended(self, stats: Mapping[str, float]) -> None:
        """An episode ended without failing. The statistics of the batch have those of accepted episodes alone."""
        for name, value in stats.items():
            self._ended[name].append(value)

    def count_dropped(self, num_tokens: int) -> None:
        """An accepted episode of `num_tokens` was dropped as stale; long ones are dropped more often."""
        self.num_rejected += 1
        self._dropped_lengths.append(num_tokens)

    def since_last_batch(self, now_s: float, kept_lengths: list[int]) -> dict[str, float]:
        """Statistics of the time since the last call; `kept_lengths`: tokens of the batch's episodes."""
        stats = {
            "accepted": float(self.num_accepted),
            "rejected": float(self.num_rejected),
            "failed": float(self.num_failed),
            "agent_errors": float(self.num_agent_errors),
            "dropped": float(len(self._dropped_lengths)),
        }
        if self.num_accepted + self.num_rejected:
            stats["accepted_frac"] = self.num_accepted / (self.num_accepted + self.num_rejected)
        if self._dropped_lengths:
            dropped = sum(self._dropped_lengths) / len(self._dropped_lengths)
            stats["dropped_tokens_mean"] = dropped
            stats["dropped_to_kept_tokens"] = dropped / (sum(kept_lengths) / len(kept_lengths))
        stats |= {f"ended/{name}": sum(values) / len(values) for name, values in self._ended.items()}
        self._ended.clear()
        stats["produced_tokens"] = float(self.generated_tokens - self._last_batch_tokens)
        if self._last_batch_s is not None and now_s > self._last_batch_s:
            stats["generated_tokens_per_s"] = stats["produced_tokens"] / (now_s - self._last_batch_s)
        self._last_batch_s, self._last_batch_tokens = now_s, self.generated_tokens
        for name, seconds in self._replica_seconds.items():
            if seconds > 0:
                stats[f"replica_tokens_per_s/{name}"] = self._replica_tokens[name] / seconds
        self._replica_tokens.clear()
        self._replica_seconds.clear()
        self.num_accepted = self.num_rejected = self.num_failed = self.num_agent_errors = 0
        self._dropped_lengths = []
        return stats

    def tokens_per_s(self, now_s: float) -> float:
        """Rate between the calls of the last RATE_WINDOW_S seconds; 0 at the first call."""
        readings = self._readings
        readings.append((now_s, self.generated_tokens))
        while len(readings) > 2 and readings[0][0] < now_s - RATE_WINDOW_S:
            readings.popleft()
        start_s, tokens = readings[0]
        return (self.generated_tokens - tokens) / (now_s - start_s) if now_s > start_s else 0.0
