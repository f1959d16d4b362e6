"""Options for stale rollouts: the old policy of the loss, and weights and masks that correct the mismatch."""

from dataclasses import dataclass

from areal.api.config.fields import Problem, Problems, choice, number, option, section
from areal.api.config.relevance import satisfies, unless, when

WEIGHT_LEVELS = {
    "token": "token",
    "segment": "segment_sum",
    "segment_mean": "segment_mean",
    "sequence": "sequence_sum",
    "geometric": "sequence_mean",
}
"""Level of a weight -> the rule level with the same reduction of the log-ratios of tokens."""

RULE_LEVELS = ("token", *(f"{unit}_{how}" for unit in ("segment", "sequence") for how in ("sum", "mean", "max")))
"""Unit and reduction of a rule's metric."""


_HAS_WEIGHTS = unless("mode", "off")
_EXCLUDES = satisfies(".", lambda section: section.masks, "mode, veto_threshold or rules can exclude tokens")


def _bound_problems(lower: float | None, upper: float | None) -> Problems:
    if lower is not None and upper is not None and lower >= upper:
        yield "lower", f"{lower:g} is not below upper={upper:g}: lower it"


@dataclass(frozen=True, kw_only=True)
class CorrectionRule:
    """One additional bound on the mismatch of the policies; every rule uses the ratios before any clamping."""

    metric: str = choice("ratio", "ratio", "k1", "k2", "k3")
    """ratio = old policy / rollout policy; k1, k2, k3 = estimates of KL(rollout, old) in nats."""
    level: str = choice("token", *RULE_LEVELS)
    """Unit of the metric: a token, or the sum, mean or maximum over a segment or sequence (of logs for ratio)."""
    lower: float | None = number(None)
    """Minimum allowed value; null = no lower bound."""
    upper: float | None = number(None)
    """Maximum allowed value; null = no upper bound."""
    action: str = choice("mask", "mask", "clamp")
    """mask = exclude tokens outside the bounds from the loss; clamp = clamp the weight to the bounds (ratio only)."""

    def problems(self) -> Problems:
        if self.lower is None and self.upper is None:
            text = "is null like lower, so the rule has no bound: set at least one"
            yield Problem("upper", text, "config.missing_requirement")
        yield from _bound_problems(self.lower, self.upper)
        if self.metric != "k1":  # the others are never negative
            for name, bound in (("lower", self.lower), ("upper", self.upper)):
                if bound is not None and bound <= 0:
                    yield name, f"{bound:g} is never crossed, since metric={self.metric} is never negative: raise it"
        if self.action == "clamp" and self.metric != "ratio":
            yield "action", f"clamp applies to metric=ratio, not to {self.metric}: use mask, or metric: ratio"


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """Weights w = old policy / rollout policy on the policy loss, and masks for tokens with too large a mismatch."""

    apply_weights: bool = option(True, relevant=_HAS_WEIGHTS, also="verl: algorithm.rollout_is")
    """Multiply the loss by the weights; false = only log them (mode=mask, the veto and rules still mask tokens)."""
    level: str = choice("token", *WEIGHT_LEVELS, relevant=_HAS_WEIGHTS, also="verl: algorithm.rollout_is_level")
    """Unit of the ratio: token, product over a segment or sequence, or geometric mean (segment_mean, geometric)."""
    numerator: str = choice("old", "old", "training")
    """Numerator of the ratio: old = old policy of the loss, training = policy in training (verl's bypass mode)."""
    mode: str = choice("truncate", "truncate", "mask", "clamp", "off", also="verl: algorithm.rollout_is_mode")
    """truncate = limit weights to upper; clamp = to [lower, upper]; mask = exclude tokens outside; off = no weights."""
    upper: float | None = number(None, above=0, relevant=_HAS_WEIGHTS, also="verl: algorithm.rollout_is_threshold")
    """Maximum weight; null = no upper bound."""
    lower: float | None = number(
        None, low=0, relevant=when("mode", "mask", "clamp"), also="verl: algorithm.rollout_is_threshold_lower"
    )
    """Minimum weight; null = 1 / upper, 0 = no lower bound."""
    veto_threshold: float | None = number(None, low=1e-8, below=1, also="verl: algorithm.rollout_is_veto_threshold")
    """Exclude every sequence that has a trained token with a ratio below this; null = no veto."""
    renormalize: bool = option(False, relevant=_EXCLUDES | unless("../m2_threshold", None))
    """Remove excluded tokens from the denominator of the loss; false = they count there with loss 0."""
    drop_from_ratio: bool | None = option(None, relevant=_EXCLUDES)
    """Remove excluded tokens from the ratio of their sequence; null = as renormalize (AReaL 1.0: true)."""
    batch_normalize: bool = option(
        False, relevant=_HAS_WEIGHTS & when("apply_weights", True), also="verl: rollout_is_batch_normalize"
    )
    """Divide the weights by their mean over all ranks."""
    normalize_by: str = choice("kept_tokens", "kept_tokens", "units", relevant=when("batch_normalize", True))
    """Mean over: kept_tokens = the tokens not excluded, units = all units of level, one weight each (verl)."""
    rules: list[CorrectionRule] = section(list[CorrectionRule])
    """Additional bounds; a token that any rule excludes is excluded."""

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """(minimum, maximum) weight that `mode` allows; None = no bound."""
        if self.mode == "truncate":
            return None, self.upper
        if self.lower is not None or self.upper is None:
            return self.lower, self.upper
        return 1.0 / self.upper, self.upper

    @property
    def masks(self) -> bool:
        """Whether tokens can be excluded."""
        has_mask_rule = any(rule.action == "mask" for rule in self.rules)
        return self.mode == "mask" or self.veto_threshold is not None or has_mask_rule

    @property
    def only_logs(self) -> bool:
        """Whether the section changes nothing but the metrics."""
        return not self.apply_weights and not self.masks

    def problems(self) -> Problems:
        yield from self._mode_problems()
        for i, rule in enumerate(self.rules):
            if rule.action != "clamp":
                continue
            if self.mode == "off" or not self.apply_weights:
                yield f"rules[{i}].action", "clamp needs weights, and none are applied: use mask or remove the rule"
            elif rule.level != WEIGHT_LEVELS[self.level]:
                text = f"{rule.level} differs from the unit of the weights (level={self.level}) that clamp changes"
                yield f"rules[{i}].level", f"{text}: use {WEIGHT_LEVELS[self.level]}"

    def _mode_problems(self) -> Problems:
        if self.mode not in ("mask", "clamp"):
            return
        if self.upper is None and not self.lower:
            text = f"is required by mode={self.mode}: set it or lower"
            yield Problem("upper", text, "config.missing_requirement")
        elif self.lower is None and self.upper is not None and self.upper <= 1:
            yield "upper", f"{self.upper:g} is not above 1, so the default lower bound 1 / upper exceeds it: set lower"
        yield from _bound_problems(*self.bounds)


_AROUND_PROX = when("use_decoupled_loss", True) | when("recompute_logprob", True)


@dataclass(frozen=True, kw_only=True)
class OffPolicyOptions:
    """How answers of an older policy, or of other numerics, are handled."""

    recompute_logprob: bool = False
    """Use log-probabilities recomputed by the trainer as the old policy of the loss, instead of the servers'."""
    use_decoupled_loss: bool = option(False, also="cosmos-rl: use_decoupled_loss")
    """Decoupled PPO: clip around the policy at the start of the update, weighted by its ratio to the rollout policy."""
    prox_logp_method: str = choice("recompute", "recompute", "loglinear", "metrics", relevant=_AROUND_PROX)
    """Policy at the start of the update: recompute = forward pass, loglinear = interpolated, metrics = both, logged."""
    behav_imp_weight_cap: float | None = number(
        None, above=1, relevant=when("use_decoupled_loss", True), also="cosmos-rl: behav_imp_weight_cap"
    )
    """Decoupled loss: exclude tokens whose proximal / rollout ratio is above this; null = no cap."""
    rollout_correction: RolloutCorrectionConfig | None = option(
        None,
        relevant=_AROUND_PROX
        | satisfies("rollout_correction", lambda section: section is None or section.only_logs, "only logs")
        | when("rollout_correction.numerator", "training"),
        also="verl: algorithm.rollout_correction",
    )
    """Weights and masks against stale rollouts; null = none, or with use_decoupled_loss one weight per token."""
    m2_threshold: float | None = number(None, above=0, relevant=_AROUND_PROX)
    """M2PO: exclude the tokens with the largest squared log-ratios until their mean is at most this; null = off."""

    def off_policy_problems(self) -> Problems:
        """Combinations of these options that contradict each other."""
        correction = self.rollout_correction
        if correction is not None and self.use_decoupled_loss:
            if self.behav_imp_weight_cap is not None:
                rule = f"{{mode: mask, lower: 0, upper: {self.behav_imp_weight_cap:g}}}"
                yield "behav_imp_weight_cap", f"cannot be combined with rollout_correction: write it there as {rule}"
            if correction.mode == "off" or not correction.apply_weights:
                text = "needs weights, and rollout_correction has none: set recompute_logprob=true instead"
                yield "use_decoupled_loss", text
        around_prox = self.use_decoupled_loss or self.recompute_logprob
        is_late = correction is not None and correction.numerator == "training"
        if is_late and around_prox:
            text = "training needs use_decoupled_loss=false and recompute_logprob=false: set both, or use old"
            yield "rollout_correction.numerator", text
        if is_late or (self.prox_logp_method == "loglinear" and around_prox):
            yield from self._late_problems(correction or RolloutCorrectionConfig())

    def bypass_problems(self, policy_loss: str) -> Problems:
        """Losses that cannot be combined with rollout_correction.numerator=training."""
        given = self.rollout_correction
        if given is None or given.numerator == "old" or given.mode == "off" or not given.apply_weights:
            return
        if policy_loss not in ("gpg", "custom"):
            text = f"would apply the ratio of policy_loss={policy_loss} twice (numerator=training)"
            yield "rollout_correction.apply_weights", f"{text}: set it to false, or use policy_loss: gpg"

    def _late_problems(self, correction: RolloutCorrectionConfig) -> Problems:
        """Options that need the weights of the whole batch before the update."""
        for name, is_set in (
            ("m2_threshold", self.m2_threshold is not None),
            ("rollout_correction.renormalize", correction.renormalize),
            ("rollout_correction.batch_normalize", correction.batch_normalize),
        ):
            if is_set:
                text = "needs all weights before the update: use prox_logp_method=recompute and numerator=old"
                yield name, f"{text}, or remove it"
