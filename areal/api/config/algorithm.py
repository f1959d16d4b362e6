"""The trained models of PPO: the actor, whose options come from one module per area, and the critic."""

from dataclasses import dataclass, replace
from typing import Literal

from areal.api.config.policy_losses import (
    AGGREGATIONS,
    HAS_SCALE,
    AssemblyOptions,
    PolicyLossOptions,
    loss_facts,
    scale_problems,
)
from areal.api.config.rollout import GenerationHyperparameters
from areal.api.config.schema import (
    Condition,
    Named,
    Problem,
    Problems,
    WithNames,
    above,
    choice,
    given,
    named,
    number,
    option,
    satisfies,
    section,
    unless,
    when,
)
from areal.api.config.train import NO_ADAPTERS, TrainEngineConfig
from areal.api.registry import registered

# ----------------------------------------------------------------------------------------------------------------------
# Options of rewards and advantages: shaping, baselines, normalisation, GAE.


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """How a quantity is centred and scaled."""

    mean_level: str | None = choice("batch", "batch", "group")
    """Scope of the mean that is subtracted; null = no mean is subtracted."""
    mean_leave1out: bool = False
    """Exclude an element from its own mean (RLOO baseline)."""
    std_level: str | None = choice("batch", "batch", "group")
    """Scope of the standard deviation that divides; null = no division."""
    std_unbiased: bool = option(True, relevant=given("std_level"))
    """Divide the sum of squared deviations by n - 1; false = by n."""
    std_about: str | None = choice(None, "own", "subtracted", relevant=given("std_level"))
    """Centre of the deviations: own = mean of std_level, subtracted = mean of mean_level; null = by group_size."""
    eps: float = number(1e-5, low=0, relevant=given("std_level"))
    """Added to the standard deviation."""
    group_size: int = number(1, low=1)
    """Group size in files of AReaL: 1 or gconfig.n_samples; above 1, std_about=null means subtracted, else own."""

    @property
    def is_of_areal(self) -> bool:
        """Whether the section was written for AReaL, the only system that needs a group_size here."""
        return self.group_size > 1

    def problems(self) -> Problems:
        if self.mean_leave1out and self.mean_level is None:
            yield "mean_leave1out", "has no mean to leave an element out of: set mean_level or remove it"


Baseline = Literal["none", "greedy", "length_weighted", "best_of_group", "decoupled"]
TokenBaseline = Literal["none", "token", "trained_token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRecipe:
    """From the shaped reward r of a sequence to the advantages of its tokens, in this order."""

    baseline: Baseline = "none"
    """Subtracted from r first: nothing, the reward of the prompt's greedy answer, or one of `algorithm.advantage`."""
    reward_norm: NormConfig | None = None
    """Then r is centred and scaled."""
    rescale_valid: bool = False
    """Then r is multiplied by `valid_sample_scale` (GPG)."""
    gae_lambda: float = 1.0
    """Then GAE runs over the token rewards; 1 without a critic = the discounted sum of the rewards that follow."""
    token_baseline: TokenBaseline = "none"
    """Then `optimal_token_baseline` is subtracted, with positions by token or by trained token."""
    adv_norm: NormConfig | None = None
    """Last, the advantages of the tokens are centred and scaled."""
    has_function: bool = False
    """All of the above is replaced by the target of the entry, estimator(answers, options)."""
    is_composed: bool = False
    """reward_norm, gae_lambda and adv_norm are those of the actor."""
    compares_groups: bool = False
    """The advantage of an answer depends on the other answers of its group; False for functions, which may."""
    takes_critic: bool = False
    """A critic is no second baseline."""


@dataclass(frozen=True, kw_only=True)
class GdpoOptions(Named):
    """GDPO: every reward function is normalised within its group."""

    weights: dict[str, float] = section(dict[str, float], also="verl: algorithm.gdpo_reward_keys, gdpo_reward_weights")
    """Weights of the normalised scores by the function's name in metrics; others count 0; {} = all count 1."""


OWN_FUNCTION = AdvantageRecipe(has_function=True, takes_critic=True)
"""The recipe of an estimator that is a function."""

REWARDS = Condition("/teacher.rl_weight", lambda weight: weight != 0, "is not 0 (or teacher is null)")
"""The advantages from rewards are used."""
_COMPOSED = REWARDS & satisfies(".", lambda options: options.base_recipe.is_composed, "adv_estimator is gae")
_SUMMED = REWARDS & satisfies(
    ".", lambda options: options.base_recipe.baseline != "decoupled", "adv_estimator sums the reward functions"
)
_OVERLONG = REWARDS & when("overlong_reward_penalty", True)
_TRUNCATED_COUNT = (
    when("mask_truncated", False)
    | given("/critic")
    | satisfies(".", lambda options: options.scales_advantages, "advantages are normalised")
)


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions(WithNames):
    """From the reward of a sequence to the advantage of a token."""

    adv_estimator: Named = named(
        "estimators", "gae", relevant=REWARDS, also="verl: algorithm.adv_estimator; ROLL: adv_estimator"
    )
    """Advantage estimator; gae = composed from critic, reward_norm, gae_lambda and adv_norm, the others fix these."""
    overlong_reward_penalty: bool = option(False, relevant=REWARDS, also="verl: reward_model.overlong_buffer.enable")
    """Subtract a penalty from the reward of answers whose length is close to gconfig.max_new_tokens (DAPO)."""
    overlong_tokens: int | None = number(None, low=1, relevant=_OVERLONG, also="verl: reward_model.overlong_buffer.len")
    """Tokens before gconfig.max_new_tokens over which the penalty grows from 0 to overlong_penalty_factor."""
    overlong_penalty_factor: float | None = number(
        None, above=0, relevant=_OVERLONG, also="verl: reward_model.overlong_buffer.penalty_factor"
    )
    """Largest overlong penalty, in reward units before reward_bias and reward_scaling."""
    reward_norm: NormConfig | None = option(None, relevant=_COMPOSED)
    """Normalisation of sequence rewards after bias, scaling and clipping; null = none."""
    reward_scaling: float = number(1.0, relevant=_SUMMED)
    """Factor of every reward, applied after reward_bias."""
    reward_bias: float = number(0.0, relevant=_SUMMED)
    """Added to every reward before reward_scaling."""
    reward_clip: float = number(20.0, above=0, relevant=_SUMMED)
    """Scaled rewards are clipped to [-reward_clip, reward_clip]."""
    mask_no_eos_with_zero: bool = option(False, relevant=REWARDS & _TRUNCATED_COUNT)
    """Give answers that were cut by a length limit no task reward."""
    discount: float = number(1.0, low=0, high=1, relevant=REWARDS, also="verl: algorithm.gamma")
    """Discount factor per token (gamma of generalised advantage estimation)."""
    gae_lambda: float = number(
        1.0, low=0, high=1, relevant=_COMPOSED & when("gae_length_alpha", None), also="verl: algorithm.lam"
    )
    """Lambda of generalised advantage estimation."""
    gae_length_alpha: float | None = number(None, above=0, relevant=_COMPOSED)
    """Length-adaptive lambda max(0, 1 - 1 / (gae_length_alpha n)) for an answer of n tokens (VAPO); null = off."""
    adv_norm: NormConfig | None = option(None, relevant=_COMPOSED)
    """Normalisation of token advantages; null = none."""

    def advantage_problems(self) -> Problems:
        """Requirements of these options that are not met."""
        for name in ("overlong_tokens", "overlong_penalty_factor"):
            if self.overlong_reward_penalty and vars(self)[name] is None:
                yield Problem(name, "is required by overlong_reward_penalty=true: set it", "config.missing_requirement")
        if self.base_recipe.baseline == "decoupled" and self.overlong_reward_penalty:
            text = f"cannot be combined with adv_estimator={self.adv_estimator}: write the penalty as a reward function"
            yield "overlong_reward_penalty", text

    @property
    def base_recipe(self) -> AdvantageRecipe:
        """What adv_estimator is registered with."""
        return registered("estimators", self.adv_estimator.name, key="actor.adv_estimator").facts or OWN_FUNCTION

    @property
    def recipe(self) -> AdvantageRecipe:
        """The recipe of adv_estimator; gae has the norms and the lambda of these options."""
        recipe = self.base_recipe
        if not recipe.is_composed:
            return recipe
        norms = {"reward_norm": self.reward_norm, "gae_lambda": self.gae_lambda, "adv_norm": self.adv_norm}
        return replace(recipe, **norms)

    @property
    def has_token_baseline(self) -> bool:
        """Whether the baseline needs the score norms of tokens from a forward pass before the update."""
        return self.base_recipe.token_baseline != "none"

    @property
    def scales_advantages(self) -> bool:
        """Whether the reward of one answer changes the advantages of other answers through their normalisation."""
        return self.adv_norm is not None or self.recipe.adv_norm is not None or self.base_recipe.has_function

    @property
    def compares_groups(self) -> bool:
        """Whether the advantage of an answer depends on the other answers of its group."""
        if not self.base_recipe.is_composed:
            return self.base_recipe.compares_groups
        return self.reward_norm is not None and "group" in (self.reward_norm.mean_level, self.reward_norm.std_level)


def baseline_problems(options: AdvantageOptions, sampling: GenerationHyperparameters, *, has_critic: bool) -> Problems:
    """Penalties and baselines that are wrong with the sampling options; paths below the actor."""
    if options.overlong_reward_penalty and (options.overlong_tokens or 0) > sampling.max_new_tokens:
        text = f"{options.overlong_tokens} is above gconfig.max_new_tokens={sampling.max_new_tokens}: lower it"
        yield "overlong_tokens", text
    if sampling.n_samples > 1:
        return
    reason = "compares the answers of a group, but gconfig.n_samples=1 makes groups of one: raise gconfig.n_samples"
    if options.compares_groups:
        yield ("reward_norm" if options.base_recipe.is_composed else "adv_estimator"), reason
    norm = options.adv_norm if options.base_recipe.is_composed and not has_critic else None
    if norm is not None and norm.mean_level == "group":
        yield "adv_norm", f"{reason}, or give a critic"  # all tokens of an answer have one advantage: the result is 0


# ----------------------------------------------------------------------------------------------------------------------
# Options of the divergence from the reference policy, in the reward and in the loss.

_ADAPTIVE = when("type", "adaptive")


@dataclass(frozen=True, kw_only=True)
class KLControlConfig:
    """How the coefficient of the KL penalty in the reward changes during training."""

    type: str = choice("fixed", "fixed", "adaptive", also="verl: algorithm.kl_ctrl.type")
    """fixed = always actor.kl_ctl; adaptive = start at actor.kl_ctl and adjust after each batch towards `target`."""
    target: float | None = number(None, above=0, relevant=_ADAPTIVE, also="verl: algorithm.kl_ctrl.target_kl")
    """Target divergence in nats, as `measure` defines it; null = not set, which adaptive does not accept."""
    horizon: float = number(10000.0, above=0, relevant=_ADAPTIVE, also="verl: algorithm.kl_ctrl.horizon")
    """Sequences over which a divergence 20% or more off the target changes the coefficient by 20%."""
    measure: str = choice("token-mean", "token-mean", "sequence-sum", relevant=_ADAPTIVE)
    """Divergence of an answer: mean over its tokens (verl) or their sum (Ziegler et al. 2019)."""


_IN_REWARD = given("/ref") & above("kl_ctl", 0) & REWARDS
_IN_LOSS = given("/ref") & above("kl_loss_coef", 0)


@dataclass(frozen=True, kw_only=True)
class KLOptions:
    """Penalties on the divergence from the reference."""

    kl_ctl: float = number(0.0, low=0, relevant=REWARDS, also="verl: algorithm.kl_ctrl.kl_coef; ROLL: init_kl_coef")
    """Coefficient of the per-token KL penalty in the reward; 0 = no penalty. If not given, 0.1 with a `ref`, else 0."""
    kl_estimator: str = choice(
        "k1", "k1", "k2", "k3", "abs", "full", relevant=_IN_REWARD, also="verl: algorithm.kl_penalty"
    )
    """KL estimator of the reward penalty; full = KL of the distributions over kl_top_k tokens."""
    kl_control: KLControlConfig = section(KLControlConfig, relevant=given("/ref") & REWARDS)
    """Whether kl_ctl is fixed or adaptive."""
    kl_loss_coef: float = number(0.0, low=0, also="verl: actor_rollout_ref.actor.kl_loss_coef; ROLL: kl_loss_coef")
    """Coefficient of the KL to the reference as a term of the policy loss; 0 = no term."""
    kl_loss_estimator: str = choice(
        "k3",
        *("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "full"),
        relevant=_IN_LOSS,
        also="verl: actor_rollout_ref.actor.kl_loss_type",
    )
    """KL estimator of the loss term; + = its value with the gradient of k2, full = KL over kl_top_k tokens."""
    kl_loss_correction: str = choice(
        "none", "none", "old", "rollout", relevant=_IN_LOSS & unless("kl_loss_estimator", "full")
    )
    """Importance ratio that multiplies the KL loss: policy / old policy, policy / rollout policy, or none."""
    kl_top_k: int | None = number(
        None,
        low=0,
        relevant=(_IN_REWARD & when("kl_estimator", "full")) | (_IN_LOSS & when("kl_loss_estimator", "full")),
    )
    """Most likely tokens that a full KL compares, the rest as one; 0 = all V tokens, [tokens, V] floats per rank."""

    def kl_problems(self) -> Problems:
        """Combinations of these options that cannot work."""
        if self.kl_control.type == "adaptive":
            if self.kl_control.target is None:
                text = "is null, but kl_control.type=adaptive needs a target divergence, for example 0.1"
                yield Problem("kl_control.target", text, "config.missing_requirement")
            if self.kl_ctl == 0:
                yield "kl_ctl", "is 0, and kl_control.type=adaptive only multiplies it: use a value above 0"
        estimator = self.kl_loss_estimator
        if self.kl_loss_coef > 0 and self.kl_loss_correction != "none" and estimator.endswith("+"):
            text = f"cannot be combined with the replaced gradient of kl_loss_estimator={estimator}: use "
            yield "kl_loss_correction", f"{text}{estimator.removesuffix('+')}, or remove it"
        if self.wants_distributions and self.kl_top_k is None:
            text = "is null, but a full KL needs it: set a number of tokens, for example 64, or 0 for the vocabulary"
            yield Problem("kl_top_k", text, "config.missing_requirement")

    @property
    def wants_distributions(self) -> bool:
        """Whether a divergence of whole distributions is used, which needs more than log-probabilities of tokens."""
        in_reward = self.kl_ctl > 0 and self.kl_estimator == "full"
        return in_reward or (self.kl_loss_coef > 0 and self.kl_loss_estimator == "full")


# ----------------------------------------------------------------------------------------------------------------------
# Options for stale rollouts: the old policy of the loss, and weights and masks that correct the mismatch.

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

    @property
    def is_around_prox(self) -> bool:
        """Whether the old policy of the loss is the trainer's at the start of the update; otherwise the servers'."""
        return self.use_decoupled_loss or self.recompute_logprob

    @property
    def needs_prox_logprobs(self) -> bool:
        """Whether that policy's log-probabilities are computed, for loss or metrics."""
        if self.is_around_prox:
            return self.prox_logp_method != "loglinear"
        return self.rollout_correction is not None and self.rollout_correction.numerator == "old"

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
        is_late = correction is not None and correction.numerator == "training"
        if is_late and self.is_around_prox:
            text = "training needs use_decoupled_loss=false and recompute_logprob=false: set both, or use old"
            yield "rollout_correction.numerator", text
        if is_late or (self.prox_logp_method == "loglinear" and self.is_around_prox):
            yield from self._late_problems(correction or RolloutCorrectionConfig())

    def bypass_problems(self, policy_loss: Named) -> Problems:
        """Losses that cannot be combined with rollout_correction.numerator=training."""
        correction = self.rollout_correction
        if (
            correction is None
            or correction.numerator == "old"
            or correction.mode == "off"
            or not correction.apply_weights
        ):
            return
        if not loss_facts(policy_loss).has_no_ratio:
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


_WHOLE = satisfies("/", lambda config: not config.publishes_adapters, "the servers get whole weights")
_BY_DISK = when("weight_update_mode", "disk")


@dataclass(frozen=True, kw_only=True)
class PPOActorConfig(
    AssemblyOptions, KLOptions, OffPolicyOptions, PolicyLossOptions, AdvantageOptions, TrainEngineConfig
):
    """The policy and its training."""

    group_size: int = number(1, low=1)
    """Accepted for AReaL files: must be 1 or gconfig.n_samples, which sets the group size."""
    weight_update_mode: str = choice(
        "auto", "auto", "xccl", "disk", "http", "delta", "delta_disk", "delta_xccl", relevant=_WHOLE | _BY_DISK
    )
    """xccl = collective, disk, http, auto = xccl or disk; differences: delta (http), delta_disk, delta_xccl."""
    weight_chunked_mem_mb: int = number(1024, low=1, relevant=_WHOLE & when("weight_update_mode", "auto", "xccl"))
    """Maximum size of one weight broadcast, in MiB."""

    adapter_update_mode: str = choice("auto", "auto", "merged", "adapter", relevant=given("lora"))
    """What is published with lora: merged = whole weights, adapter = adapters alone, auto = by servers and devices."""

    @property
    def pulls_weights(self) -> bool:
        """Whether the machines of the servers copy the weights to their own disks."""
        return self.weight_update_mode in ("http", "delta", "delta_disk")

    @property
    def sends_deltas(self) -> bool:
        """Whether the servers get differences between versions."""
        return self.weight_update_mode.startswith("delta")

    def problems(self) -> Problems:
        yield from TrainEngineConfig.problems(self)
        if self.lora is not None and self.sends_deltas:
            mode = self.weight_update_mode
            yield "weight_update_mode", f"{mode} is for whole weights, and adapters of actor.lora are small: use auto"
        yield from self.advantage_problems()
        yield from self.off_policy_problems()
        yield from self.bypass_problems(self.policy_loss)
        yield from self.kl_problems()
        yield from self.assembly_problems()
        needs_more = self.has_entropy_bonus or self.wants_distributions or self.has_token_baseline
        if self.logprob_kernel == "liger" and needs_more:
            text = "liger computes log-probabilities only; an entropy bonus, a full KL and otb need more: use torch"
            yield "logprob_kernel", text


@dataclass(frozen=True, kw_only=True)
class PPOCriticConfig(TrainEngineConfig):
    """The value model: a backbone with a one-output head, newly initialised when `path` has none."""

    ppo_n_minibatches: int = number(4, low=1, also="verl: critic.ppo_mini_batch_size (a size, not a count)")
    """Optimiser steps per pass over a train batch."""
    ppo_epochs: int = number(1, low=1, also="verl: critic.ppo_epochs")
    """Passes over a train batch; every pass after the first assigns sequences to mini-batches at random."""
    eps_clip: float | None = number(0.5, above=0, also="verl: critic.cliprange_value")
    """Clip range of a value around its old value; null = no clipping."""
    huber_delta: float | None = number(None, above=0)
    """Error above which the value loss is linear (Huber loss); null = squared error everywhere."""
    loss_aggregation: str = choice("token-mean", *AGGREGATIONS, also="verl: critic.loss_agg_mode")
    """How the token losses of a mini-batch over all ranks become one number; see docs/algorithms.md."""
    loss_scale_tokens: int | None = number(None, low=1, relevant=HAS_SCALE)
    """Divisor in tokens, required by seq-mean-token-sum-norm; null = 1 for token-sum."""
    gae_lambda: float | None = number(None, low=0, high=1, relevant=REWARDS)
    """Lambda of the critic's targets (VAPO uses 1); null = the lambda of the advantages."""
    warmup_steps: int = number(0, low=0, also="verl: trainer.critic_warmup")
    """Train steps at the start that train only the critic; the policy stays unchanged."""

    def problems(self) -> Problems:
        yield from TrainEngineConfig.problems(self)
        yield from scale_problems(self.loss_aggregation, self.loss_scale_tokens)
        if self.temperature != 1.0:
            yield "temperature", "applies to the logits of language models, and a critic has none: remove it"
        if self.logprob_kernel != "torch":
            yield "logprob_kernel", "applies to language models, and a critic has no log-probabilities: remove it"
        if self.lora is not None:
            yield Problem("lora", NO_ADAPTERS, "config.unsupported")
