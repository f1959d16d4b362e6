"""Owns the options against stale rollouts: which policy the loss is around, and the weights that correct the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal.api.config.fields import Problems, choice, number, option
from areal.api.config.relevance import satisfies, when

WEIGHT_LEVELS = {
    "token": "token",
    "segment": "segment_sum",
    "segment_mean": "segment_mean",
    "sequence": "sequence_sum",
    "geometric": "sequence_mean",
}
"""How the log-ratios of tokens make the weight of each level, in the words of the rules' levels."""

RULE_LEVELS = ("token", *(f"{unit}_{how}" for unit in ("segment", "sequence") for how in ("sum", "mean", "max")))
"""Over what, and how, a rule's metric is taken together."""


def _bound_problems(lower: float | None, upper: float | None) -> Problems:
    if lower is not None and upper is not None and lower >= upper:
        yield "lower", f"{lower:g} is not below upper={upper:g}: lower it"


@dataclass(frozen=True, kw_only=True)
class CorrectionRule:
    """One further bound on how far the policies may be apart; every rule looks at the ratios as they were measured."""

    metric: str = choice("ratio", "ratio", "k1", "k2", "k3")
    """ratio = old / rollout policy; k1, k2, k3 = estimates of KL(rollout, old), in nats."""
    level: str = choice("token", *RULE_LEVELS)
    """Over what the metric is taken: a token, or sum, mean or max over a segment or a sequence (of logs, for ratio)."""
    lower: float | None = number(None)
    """Smallest allowed value; null = no bound on this side."""
    upper: float | None = number(None)
    """Largest allowed value; null = no bound on this side."""
    action: str = choice("mask", "mask", "clamp")
    """mask = leave out what lies outside the bounds; clamp = move the weight to the bound (metric: ratio only)."""

    def problems(self) -> Problems:
        if self.lower is None and self.upper is None:
            yield "upper", "is null like lower, so the rule allows everything: give at least one bound"
        yield from _bound_problems(self.lower, self.upper)
        if self.metric != "k1":  # the others are never negative
            for name, bound in (("lower", self.lower), ("upper", self.upper)):
                if bound is not None and bound <= 0:
                    yield (
                        name,
                        f"{bound:g} makes no sense, since metric={self.metric} is never below 0: raise it",
                    )
        if self.action == "clamp" and self.metric != "ratio":
            yield "action", f"clamp moves a ratio, which metric={self.metric} is not: use mask, or metric: ratio"


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """Weights w = old policy / rollout policy on the policy loss, and which tokens are too far apart to learn from."""

    apply_weights: bool = True
    """Multiply the loss by the weights; false = only log them (the bounds of mode=mask, veto and rules still mask)."""
    level: str = choice("token", *WEIGHT_LEVELS)
    """Ratio of a token; product over a segment (a turn) or sequence; segment_mean, geometric = their geometric mean."""
    numerator: str = choice("old", "old", "training")
    """old = weights of the loss's old policy; training = of the policy in training, per micro-batch (verl's bypass)."""
    mode: str = choice("truncate", "truncate", "mask", "clamp", "off")
    """truncate = at most upper; clamp = into [lower, upper]; mask = outside of it left out; off = no weights."""
    upper: float | None = number(None, above=0)
    """Largest weight; null = no bound on this side."""
    lower: float | None = number(None, low=0)
    """Smallest weight of mode mask and clamp; null = 1 / upper, 0 = no bound on this side."""
    veto_threshold: float | None = number(None, low=1e-8, below=1)
    """One trained token with a ratio below this leaves out its whole sequence; null = no veto."""
    renormalize: bool = False
    """Rejected tokens leave the denominator of the loss; false = they stay in it and count as loss 0."""
    drop_from_ratio: bool | None = option(
        None, relevant=satisfies(".", lambda section: section.masks, "something rejects tokens")
    )
    """Rejected tokens leave the ratio of their sequence; null = as renormalize. AReaL 1.0: true, renormalize false."""
    batch_normalize: bool = False
    """Divide the weights by their mean over all ranks."""
    normalize_by: str = choice("kept_tokens", "kept_tokens", "units", relevant=when("batch_normalize", True))
    """kept_tokens = mean over tokens not rejected; units = of units of level, one weight each, also rejected (verl)."""
    rules: list[CorrectionRule] = field(default_factory=list[CorrectionRule])
    """Further bounds; what any of them leaves out is left out."""

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """(smallest, largest) weight that `mode` allows; None = any."""
        if self.mode == "truncate" or self.lower is not None or self.upper is None:
            return self.lower, self.upper
        return 1.0 / self.upper, self.upper

    @property
    def masks(self) -> bool:
        """Whether tokens can be left out."""
        has_mask_rule = any(rule.action == "mask" for rule in self.rules)
        return self.mode == "mask" or self.veto_threshold is not None or has_mask_rule

    @property
    def only_logs(self) -> bool:
        """Whether training goes as it would without."""
        return not self.apply_weights and not self.masks

    def problems(self) -> Problems:
        yield from self._mode_problems()
        if self.mode == "off":
            dead = {
                "apply_weights": not self.apply_weights,
                "level": self.level != "token",
                "upper": self.upper is not None,
                "lower": self.lower is not None,
                "batch_normalize": self.batch_normalize,
            }
            for name, is_set in dead.items():
                if is_set:
                    yield name, "has no effect with mode=off, which has no weights: remove it or choose another mode"
        elif self.batch_normalize and not self.apply_weights:
            yield "batch_normalize", "has no effect with apply_weights=false: remove one of them"
        for i, rule in enumerate(self.rules):
            if rule.action != "clamp":
                continue
            if self.mode == "off" or not self.apply_weights:
                yield f"rules[{i}].action", "clamp moves weights, and there are none: use mask or remove the rule"
            elif rule.level != WEIGHT_LEVELS[self.level]:
                yield (
                    f"rules[{i}].level",
                    f"{rule.level} differs from the weights of level={self.level}, which clamp moves: "
                    f"use {WEIGHT_LEVELS[self.level]}",
                )

    def _mode_problems(self) -> Problems:
        if self.mode == "truncate" and self.lower is not None:
            yield "lower", "has no effect with mode=truncate: remove it or use mode: clamp"
        if self.mode in ("mask", "clamp"):
            if self.upper is None and not self.lower:
                yield "upper", f"is needed by mode={self.mode}: give it or lower"
            elif self.lower is None and self.upper is not None and self.upper <= 1:
                yield "upper", f"{self.upper:g} is not above 1, so 1 / upper is no lower bound for it: give lower"
            yield from _bound_problems(*self.bounds)


@dataclass(frozen=True, kw_only=True)
class OffPolicyOptions:
    """What is done about answers that an older policy, or another numerics, made."""

    recompute_logprob: bool = False
    """Use log-probabilities recomputed by the trainer as the old policy instead of the servers' (not decoupled)."""
    use_decoupled_loss: bool = False
    """Decoupled PPO: clip around the policy at the start of the update, weight by its ratio to the behaviour policy."""
    prox_logp_method: str = choice("recompute", "recompute", "loglinear", "metrics")
    """How the policy at the start of the update is known: a forward pass, a guess from versions, both to compare."""
    behav_imp_weight_cap: float | None = number(None, above=1)
    """Decoupled loss: tokens whose proximal/behaviour ratio is above this are left out; null = no cap."""
    rollout_correction: RolloutCorrectionConfig | None = None
    """Weights and masks against stale rollouts; null = none, or with use_decoupled_loss the weights of each token."""
    m2_threshold: float | None = number(None, above=0)
    """M2PO: leave out the tokens with the largest squared log-ratios until their mean is at most this; null = off."""

    def off_policy_problems(self) -> Problems:
        """What is wrong with these options together."""
        if self.behav_imp_weight_cap is not None and not self.use_decoupled_loss:
            yield (
                "behav_imp_weight_cap",
                "has an effect only with use_decoupled_loss=true: set that or remove the cap",
            )
        around_rollout = not (self.use_decoupled_loss or self.recompute_logprob)
        given = self.rollout_correction
        for name, acts in (
            ("rollout_correction", given is not None and not given.only_logs and given.numerator == "old"),
            ("m2_threshold", self.m2_threshold is not None),
        ):
            if acts and around_rollout:
                yield (
                    name,
                    "compares the old policy of the loss with the rollout policy, which here are the same: set "
                    "use_decoupled_loss or recompute_logprob to true, or remove it"
                    + (" (with apply_weights=false and nothing that masks it only logs)" if given is not None else ""),
                )
        if self.prox_logp_method != "recompute" and around_rollout:
            yield (
                "prox_logp_method",
                f"{self.prox_logp_method} has no effect, since the loss is around the rollout policy: set "
                "use_decoupled_loss or recompute_logprob to true, or remove it",
            )
        if given is not None:
            yield from self._correction_problems(given)
        if self.prox_logp_method == "loglinear" or (given is not None and given.numerator == "training"):
            yield from self._guess_problems(given or RolloutCorrectionConfig())

    def bypass_problems(self, policy_loss: str) -> Problems:
        """What rollout_correction.numerator=training cannot be combined with."""
        given = self.rollout_correction
        if given is None or given.numerator == "old":
            return
        if self.use_decoupled_loss or self.recompute_logprob:
            yield (
                "rollout_correction.numerator",
                "training needs the rollout policy as the old policy of the loss: set use_decoupled_loss and "
                "recompute_logprob to false, or use old",
            )
        if given.apply_weights and given.mode != "off" and policy_loss not in ("gpg", "custom"):
            yield (
                "rollout_correction.apply_weights",
                f"true with numerator=training weights the loss by a ratio that policy_loss={policy_loss} already "
                "holds: set it to false, or use policy_loss: gpg",
            )

    def _guess_problems(self, given: RolloutCorrectionConfig) -> Problems:
        """Options that read the whole batch before the update, where the weights are known in training only."""
        for name, is_set in (
            ("m2_threshold", self.m2_threshold is not None),
            ("rollout_correction.renormalize", given.renormalize),
            ("rollout_correction.batch_normalize", given.batch_normalize),
        ):
            if is_set:
                yield (
                    name,
                    "is computed over the whole batch before the update, and prox_logp_method=loglinear and "
                    "rollout_correction.numerator=training know the weights in training only: use "
                    "prox_logp_method=recompute and numerator=old, or remove it",
                )

    def _correction_problems(self, given: RolloutCorrectionConfig) -> Problems:
        if self.behav_imp_weight_cap is not None:
            yield (
                "behav_imp_weight_cap",
                "cannot be combined with rollout_correction: write it there as "
                f"{{mode: mask, lower: 0, upper: {self.behav_imp_weight_cap:g}}}",
            )
        if self.use_decoupled_loss and (given.mode == "off" or not given.apply_weights):
            yield (
                "use_decoupled_loss",
                "is the loss with weights, and rollout_correction has none (mode=off or apply_weights=false): set "
                "recompute_logprob to true in its place",
            )
        masks = given.masks or self.m2_threshold is not None
        if given.renormalize and not masks:
            yield "rollout_correction.renormalize", "has no effect, since nothing rejects tokens: remove it"
        if given.mode == "off" and not masks:
            yield "rollout_correction", "does nothing: choose another mode, or give veto_threshold or rules"
