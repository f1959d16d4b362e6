"""Owns when something periodic is due: every so many epochs, steps or seconds. Pure; the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config import Cadence
from areal.api.data import StepInfo


@dataclass(slots=True)
class CadenceState:
    """Decides after each step; remembers only when it last fired, in seconds of the run's own clock."""

    cadence: Cadence
    last_fired_s: float = 0.0

    def due(self, info: StepInfo, *, now_s: float) -> bool:
        """True when step `info`, just done, is one to act on. `now_s`: seconds since the run began to train."""
        cadence = self.cadence
        by_epoch = cadence.freq_epochs is not None and info.is_epoch_end and (info.epoch + 1) % cadence.freq_epochs == 0
        by_step = cadence.freq_steps is not None and (info.step + 1) % cadence.freq_steps == 0
        by_time = cadence.freq_secs is not None and now_s - self.last_fired_s >= cadence.freq_secs
        return by_epoch or by_step or by_time

    def fired(self, *, now_s: float) -> None:
        """Count seconds from now on."""
        self.last_fired_s = now_s
