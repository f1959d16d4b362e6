"""Owns the record of one scored answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RewardStatus = Literal["ok", "error", "timeout", "not_finite", "died", "unusable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """How one call of a reward function ended. `value` is 0.0 unless the status is ok."""

    status: RewardStatus
    """error = raised or returned no number; timeout = killed at its limit; died = its process ended twice; unusable =
    its function cannot be loaded."""
    value: float
    message: str
    """Why it is not ok; empty when it is."""
    seconds: float
    """Time the function ran."""
    metrics: Mapping[str, float] | None = None
    """Further numbers that the function returned beside its score; None = none."""
