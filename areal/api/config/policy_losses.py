"""Owns the options of the policy losses: which one, the clip they share, and one class for each with its own options.

To add a loss: its name in POLICY_LOSSES, a class here when it has options of its own, the function in
`areal/algorithm/losses/NAME.py`, one test.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import Problems, choice, number

POLICY_LOSSES = ("ppo",)
"""Names of the losses; the function `loss` of the module `areal.algorithm.losses.NAME` computes each."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossOptions:
    """The policy-gradient loss."""

    policy_loss: str = choice("ppo", *POLICY_LOSSES)
    """The loss of a token; docs/algorithms.md has the formulas."""
    eps_clip: float = number(0.2, above=0)
    """PPO clip of the ratio below 1, and above too unless eps_clip_higher is given."""
    eps_clip_higher: float | None = number(None, above=0)
    """Clip of the ratio above 1; null = eps_clip."""
    c_clip: float | None = number(None, above=1)
    """Dual clip: bound on the loss of negative advantages as a multiple of |advantage|; null = off."""

    def policy_loss_problems(self) -> Problems:
        """What is wrong with these options together."""
        yield from ()
