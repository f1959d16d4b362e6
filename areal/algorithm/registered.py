"""The policy losses and the advantage estimators, each with its options and what the checks before a start know of it."""

from dataclasses import dataclass
from typing import Any, Literal

from areal.api.config.algorithm import EstimatorFacts, NormConfig
from areal.api.config.policy_losses import CustomFunctionOptions, LossFacts
from areal.api.config.schema import Named, Problems, choice, number, section
from areal.api.registry import ADVANTAGE_CALL, LOSS_CALL, register

# ----------------------------------------------------------------------------------------------------------------------
# Policy losses: `loss(tokens, options)`, or `loss(tokens, options, own)` where they have options of their own.


@dataclass(frozen=True, kw_only=True)
class SapoOptions(Named):
    """SAPO: a soft gate replaces the clip."""

    tau_pos: float = number(1.0, above=0)
    """Temperature of the gate for positive advantages; a higher value closes the gate faster."""
    tau_neg: float = number(1.05, above=0)
    """Temperature of the gate for zero and negative advantages."""
