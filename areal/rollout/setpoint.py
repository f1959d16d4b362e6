"""The set-point of staleness (rollout.target_staleness): how far ahead of the trainer episodes may start. Pure.

The lead of an episode is how many batches beyond that of the served version the gate allowed when it started. Under a
lead l a batch gets a staleness of nearly g x l: g = 1 while finished answers wait, less while generation overlaps
training. An episode that starts now is trained on l versions later, so a controller that adds up errors corrects an
error again until it sees the first correction, and oscillates. This one measures g of each batch from the lead that
its own episodes had, and moves the lead towards target / g. A lead that the run cannot use, because its servers are too
slow, does not count either: what is measured is the lead that was used.

All of its state is in the ledger: `RunningEpisode.ahead`, the statistics of batches and `LedgerState.ess`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from areal.api.config import PPOConfig
from areal.ledger.state import AcceptedEpisode, LedgerState

_LEAD, _USED = "setpoint/lead", "setpoint/used_lead"
_GAIN = 0.3  # Weight of one batch, which is a noisy measurement, in the mean of the reciprocal lead.
_MOST = 2.0  # Largest factor by which one batch changes its lead.


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPoint:
    """The rule of a run."""

    target: float
    """Mean staleness of the generated tokens of a batch in versions, or effective sample size in (0, 1)."""
    is_ess: bool
    batch_size: int
    max_lead: float
    """The hard bound, in versions (rollout.max_head_offpolicyness)."""

    @classmethod
    def of(cls, config: PPOConfig) -> Self | None:
        """None = the run has no set-point."""
        chosen = config.rollout.target_staleness
        target = chosen.mean if chosen.ess is None else chosen.ess
        if target is None:
            return None
        return cls(
            target=target,
            is_ess=chosen.ess is not None,
            batch_size=config.train_dataset.batch_size,
            max_lead=config.rollout.max_head_offpolicyness,
        )

    def lead(self, state: LedgerState) -> float:
        """The lead that holds now, in batches: that of the newest batch."""
        newest = state.batches.get(state.next_step - 1)
        if newest is None:
            return self._first_lead
        return newest.stats.get(_LEAD, self.max_lead)  # without it before the run had a set-point

    @property
    def _first_lead(self) -> float:
        return min(1.0 if self.is_ess else self.target, self.max_lead)

    def stats(self, state: LedgerState, episodes: Sequence[AcceptedEpisode], staleness: float) -> dict[str, float]:
        """Target, value, error and lead, for the statistics of the next batch.

        `episodes`, `staleness`: of that batch. The value of `ess` is of the batch before, the newest one trained on.
        """
        used, newest = self._used(episodes), state.batches.get(state.next_step - 1)
        if self.is_ess:
            value, had = state.ess, newest and newest.stats.get(_USED)
        else:
            value, had = staleness, used
        lead = self.lead(state)
        figures = {"setpoint/target": self.target}
        if used is not None:
            figures[_USED] = used
        if value is not None:
            figures |= {"setpoint/value": value, "setpoint/error": value - self.target}
            # The first batches are of episodes that all started at once, and without a lead there is no staleness.
            is_first = len(state.batches) <= self._first_lead + 1.0
            if not is_first and had is not None and had * self.batch_size >= 0.5:
                # Staleness has the noise, and the lead is its reciprocal: a mean of leads would be too high.
                lead = 1.0 / ((1.0 - _GAIN) / lead + _GAIN / (had * self._factor(value)))
        return figures | {_LEAD: min(max(lead, 1.0 / self.batch_size), self.max_lead)}

    def _used(self, episodes: Sequence[AcceptedEpisode]) -> float | None:
        """Mean lead of the episodes of a batch; None = it is not known of any."""
        ahead = [episode.ahead for episode in episodes if episode.ahead is not None]
        return fmean(ahead) / self.batch_size if ahead else None

    def _factor(self, value: float) -> float:
        """The factor by which the lead of a batch should have been larger."""
        if self.is_ess:  # -log ess, the variance of the log-ratio, grows as the lead or its square, or between them
            value = min(max(value, 1e-9), 1 - 1e-9)
            factor = (math.log(self.target) / math.log(value)) ** (2 / 3)
        else:
            factor = self.target / max(value, 1e-9)
        return min(max(factor, 1 / _MOST), _MOST)
