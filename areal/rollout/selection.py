"""Selection bias: how the answers that are trained on differ from all that were generated. Pure.

Filters, staleness, time limits and failures do not remove episodes at random: a time limit removes long answers, a
filter of equal rewards the easy and the hard prompts.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field, replace

TRAINED = ""
"""The outcome of an episode that is trained on."""


@dataclass(slots=True)
class Outcome:
    """What became of an ended episode."""

    lost_by: str
    """Why it is not trained on: stale, filter, time_limit, failed or another reason; `TRAINED` = it is."""
    num_answers: int
    """Answers that servers completed for it."""
    num_tokens: int
    """Generated tokens of these answers."""
    reward: float
    """Mean reward of its answers; NaN = they have none."""
    source: str
    """Data source of its row; empty = it has none."""


@dataclass(slots=True)
class _Totals:
    """Sums over outcomes."""

    num_episodes: int = 0
    num_answers: int = 0
    num_tokens: int = 0
    num_rewards: int = 0
    rewards: float = 0.0
    sources: Counter[str] = field(default_factory=Counter[str])

    def add(self, outcome: Outcome, sign: int) -> None:
        """Add an outcome, or with `sign` -1 remove it."""
        self.num_episodes += sign
        self.num_answers += sign * outcome.num_answers
        self.num_tokens += sign * outcome.num_tokens
        self.sources[outcome.source] += sign
        if outcome.reward == outcome.reward:  # it is not NaN
            self.num_rewards += sign
            self.rewards += sign * outcome.reward

    @property
    def length(self) -> float:
        """Mean generated tokens of an answer; NaN without answers."""
        return self.num_tokens / self.num_answers if self.num_answers else math.nan

    @property
    def reward(self) -> float:
        return self.rewards / self.num_rewards if self.num_rewards else math.nan


class Selection:
    """The outcomes of the newest `size` ended episodes. Its sums follow each change, so that no batch adds them all."""

    def __init__(self, size: int) -> None:
        self._room = size
        self._outcomes: OrderedDict[int, Outcome] = OrderedDict()
        self._by_reason: defaultdict[str, _Totals] = defaultdict(_Totals)

    def ended(self, episode_id: int, outcome: Outcome) -> None:
        self._outcomes[episode_id] = outcome
        self._by_reason[outcome.lost_by].add(outcome, 1)
        if self._room > 0:
            self._room -= 1
        else:
            oldest = self._outcomes.popitem(last=False)[1]
            self._by_reason[oldest.lost_by].add(oldest, -1)

    def dropped(self, episode_id: int, lost_by: str) -> None:
        """An accepted episode is not trained on after all."""
        outcome = self._outcomes.get(episode_id)
        if outcome is not None:
            self._outcomes[episode_id] = lost = replace(outcome, lost_by=lost_by)
            self._by_reason[outcome.lost_by].add(outcome, -1)
            self._by_reason[lost_by].add(lost, 1)

    def stats(self) -> dict[str, float]:
        """Metrics by name, see `areal.observe.metric_table`; none before the first episode that is trained on."""
        trained, ended = self._by_reason[TRAINED], _Totals()
        if not trained.num_episodes:
            return {}
        for totals in self._by_reason.values():
            ended.num_answers += totals.num_answers
            ended.num_tokens += totals.num_tokens
            ended.num_rewards += totals.num_rewards
            ended.rewards += totals.rewards
            ended.sources += totals.sources
        count = len(self._outcomes)
        shares = {
            "lost_frac": 1 - trained.num_episodes / count,
            "length_ratio": trained.length / ended.length if ended.num_tokens else math.nan,
            "reward_gap": trained.reward - ended.reward,
            "source_shift": _distance(trained.sources, ended.sources),
        }
        for reason, totals in self._by_reason.items():
            if reason != TRAINED and totals.num_episodes:
                shares[f"lost/{reason}"] = totals.num_episodes / count
        return {f"selection/{name}": value for name, value in shares.items() if not math.isnan(value)}


def _distance(counts: Counter[str], other: Counter[str]) -> float:
    """Total variation distance of two distributions: half the sum of the differences of their shares."""
    totals = counts.total(), other.total()
    return sum(abs(counts[name] / totals[0] - other[name] / totals[1]) for name in other) / 2


def selection_text(stats: dict[str, float]) -> str:
    """One line for the summary of a run; empty when all that was generated is trained on."""
    if not stats.get("selection/lost_frac"):
        return ""
    prefix = "selection/lost/"
    reasons = sorted(((value, name.removeprefix(prefix)) for name, value in stats.items() if name.startswith(prefix)))
    parts = [f"{stats['selection/lost_frac']:.0%} of the newest episodes are not trained on"]
    parts[0] += " (" + ", ".join(f"{name} {value:.0%}" for value, name in reversed(reasons)) + ")"
    if "selection/length_ratio" in stats:
        parts.append(f"trained answers are {stats['selection/length_ratio']:.2f} times as long as generated ones")
    if "selection/reward_gap" in stats:
        gap = stats["selection/reward_gap"]
        parts.append(f"their reward is {abs(gap):.3f} {'below' if gap < 0 else 'above'} that of all")
    if stats["selection/source_shift"] > 0:
        parts.append(f"{stats['selection/source_shift']:.0%} of them come from other sources")
    return "; ".join(parts)
