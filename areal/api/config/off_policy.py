"""Owns the options against stale rollouts: which policy the loss is around, and the weights that correct the rest."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import Problems, number


@dataclass(frozen=True, kw_only=True)
class OffPolicyOptions:
    """What is done about answers that an older policy, or another numerics, made."""

    recompute_logprob: bool = False
    """Use log-probabilities recomputed by the trainer as the old policy instead of the servers' (not decoupled)."""
    use_decoupled_loss: bool = False
    """Decoupled PPO: clip around the policy at the start of the update, weight by its ratio to the behaviour policy."""
    behav_imp_weight_cap: float | None = number(None, above=1)
    """Decoupled loss: tokens whose proximal/behaviour ratio is above this are left out; null = no cap."""

    def off_policy_problems(self) -> Problems:
        """What is wrong with these options together."""
        if self.behav_imp_weight_cap is not None and not self.use_decoupled_loss:
            yield (
                "behav_imp_weight_cap",
                "has an effect only with use_decoupled_loss=true: set that or remove the cap",
            )
