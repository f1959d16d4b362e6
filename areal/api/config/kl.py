"""Owns the options of the divergence from the reference policy: in the reward and in the loss."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import Problems, choice, number


@dataclass(frozen=True, kw_only=True)
class KLOptions:
    """How far from the reference costs how much."""

    kl_ctl: float = number(0.1, low=0)
    """Weight of the per-token KL penalty to the reference in the reward; used only when `ref` is configured."""
    kl_estimator: str = choice("k1", "k1", "k2", "k3")
    """Which KL approximation."""

    def kl_problems(self) -> Problems:
        """What is wrong with these options together."""
        yield from ()
