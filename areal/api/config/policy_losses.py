"""Options of the policy losses: the choice of the loss, the shared clip range, and one section per loss.

To add a loss: add its name to POLICY_LOSSES and to the conditions below that apply, a section here if it has options,
the function `loss` in `areal/algorithm/losses`, one test, one row in docs/algorithms.md.
"""

from dataclasses import dataclass, field
from typing import Any

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.config.schema import Problem, Problems, above, choice, given, number, option, satisfies, section, when
from areal.api.errors import ConfigError
from areal.api.registry import LOSS_CALL, CallForm, parse_function_path

# ----------------------------------------------------------------------------------------------------------------------
# A function that the user names by path in place of a named choice.


@dataclass(frozen=True, kw_only=True)
class CustomFunctionOptions:
    """A user-defined function; docs/algorithms.md describes its arguments and its result."""

    path: str = ""
    """The function, `module:function` or `file.py:function`."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the function, which reads them from its section of the options."""

    def problems_as(self, section: str, choice: str, call: CallForm) -> Problems:
        """Errors in the path when `choice` (option=custom) selects it; `section` is the name of this section."""
        key = f"{section}.path"
        if not self.path:
            text = f"is required with {choice}: give module:function or file.py:function"
            yield Problem(key, text, "config.missing_requirement")
            return
        try:
            parse_function_path(self.path, key=key, call=call)
        except ConfigError as error:
            yield from error.problems


POLICY_LOSSES = (
    "ppo",
    "gspo",
    "sapo",
    "cispo",
    "aipo",
    "gpg",
    "gmpo",
    "clip_cov",
    "kl_cov",
    "topr",
    "kimi15",
    "dppo",
    "custom",
)
"""Names of the losses; the function `loss` in `areal.algorithm.losses.NAME` computes each."""

_CLIPS = when("policy_loss", "ppo", "gspo", "cispo", "gmpo", "clip_cov", "dppo", "custom")
WITH_SEQUENCE_RATIO = ("ppo", "gspo", "sapo", "cispo", "aipo", "custom")
"""Losses that can use the ratio of the sequence; gspo always does."""
_SEQUENCE_RATIO = when("policy_loss", "gspo") | (
    when("importance_sampling_level", "sequence") & when("policy_loss", *WITH_SEQUENCE_RATIO)
)


@dataclass(frozen=True, kw_only=True)
class SequenceLevelOptions:
    """How the ratio of a sequence enters a loss; all settings agree if advantages are constant within a sequence."""

    advantage: str = choice("mean", "mean", "token")
    """Advantage of a token: mean = mean over its sequence (AReaL), token = its own (GSPO-token, verl, cosmos-rl)."""
    gradient: str = choice(
        "shared",
        "shared",
        "own",
        relevant=when("../policy_loss", "ppo", "gspo", "sapo", "custom")
        | (when("../policy_loss", "aipo") & when("../aipo.truncation", "objective")),
    )
    """Gradient of the ratio: shared = all tokens of the sequence (AReaL, cosmos-rl), own = its token (GSPO-token)."""
    max_log_ratio: float | None = number(None, above=0)
    """Maximum log-ratio of a sequence, with zero gradient above (verl and cosmos-rl: 10); null = no limit (AReaL)."""


@dataclass(frozen=True, kw_only=True)
class SapoOptions:
    """SAPO: a soft gate replaces the clip."""

    tau_pos: float = number(1.0, above=0)
    """Temperature of the gate for positive advantages; a higher value closes the gate faster."""
    tau_neg: float = number(1.05, above=0)
    """Temperature of the gate for zero and negative advantages."""


@dataclass(frozen=True, kw_only=True)
class CispoOptions:
    """CISPO: a clipped importance weight of the log-probability."""

    unified_mask: bool = False
    """Exclude tokens whose ratio is outside the clip range in the direction of the advantage, as PPO does."""


@dataclass(frozen=True, kw_only=True)
class AipoOptions:
    """AIPO: one-sided truncation of the ratio."""

    rho: float = number(2.0, above=0, also="cosmos-rl: aipo_rho")
    """Maximum ratio (LlamaRL suggests 2 to 10)."""
    truncation: str = choice("weight", "weight", "objective")
    """weight = constant weight min(ratio, rho) of A log pi (LlamaRL); objective = -A min(ratio, rho) (cosmos-rl)."""


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions:
    """Clip-Cov: tokens of high covariance get no gradient; they are drawn once per batch."""

    ratio: float = number(0.0002, above=0, high=1)
    """Fraction of the batch's trained tokens to exclude, at least one token."""
    low: float = number(1.0)
    """Minimum covariance of excluded tokens."""
    high: float = number(5.0)
    """Maximum covariance of excluded tokens."""

    def problems(self) -> Problems:
        if self.low >= self.high:
            yield "low", f"{self.low:g} is not below high={self.high:g}, so no token is excluded: lower it"


@dataclass(frozen=True, kw_only=True)
class KlCovOptions:
    """KL-Cov: tokens of high covariance get a KL penalty; they are chosen once per batch."""

    ratio: float = number(0.0002, above=0, high=1)
    """Fraction of the batch's trained tokens to penalise, those of highest covariance, at least one token."""
    coef: float = number(1.0, above=0)
    """Coefficient of |log pi - log pi_old| at the chosen tokens."""


@dataclass(frozen=True, kw_only=True)
class ToprOptions:
    """TOPR: REINFORCE with truncated weights of negative answers."""

    ratio: str = choice("trajectory", "trajectory", "token")
    """Weight of a negative token, at most 1: trajectory = product of the ratios (paper), token = its own (ROLL)."""
    positive_weight: float = number(1.0, low=0)
    """Factor of the loss of tokens with an advantage of at least 0."""
    negative_weight: float = number(1.0, low=0)
    """Factor of the loss of tokens with a negative advantage."""


@dataclass(frozen=True, kw_only=True)
class Kimi15Options:
    """Kimi k1.5: policy gradient with a squared log-ratio as penalty."""

    tau: float = number(0.1, above=0)
    """Coefficient of the penalty tau / 2 x squared log-ratio."""
    ratio: str = choice("trajectory", "trajectory", "token")
    """Squared log-ratio: trajectory = sum over the sequence (paper), token = each token (ROLL)."""


@dataclass(frozen=True, kw_only=True)
class DppoOptions:
    """DPPO: a bound on the divergence of the binary distribution (this token or any other) replaces the ratio clip."""

    divergence: str = choice("tv", "tv", "kl")
    """Divergence limited by eps_clip and eps_clip_higher: tv = difference of probabilities, kl = KL(old, new), nats."""
    max_ratio: float = number(20.0, low=1)
    """Maximum ratio that weights the log-probability."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossOptions:
    """The policy-gradient loss."""

    policy_loss: str = choice("ppo", *POLICY_LOSSES, also="verl: actor.policy_loss.loss_mode; AReaL 1.0: use_sapo_loss")
    """Policy loss; see docs/algorithms.md for the formulas."""
    eps_clip: float = number(0.2, relevant=_CLIPS, also="verl: actor.clip_ratio, clip_ratio_low")
    """Clip range of the ratio below 1, and above 1 unless eps_clip_higher is set; negative = no clipping."""
    eps_clip_higher: float | None = number(None, relevant=_CLIPS, also="verl: actor.clip_ratio_high")
    """Clip range of the ratio above 1; negative = no clipping; null = eps_clip."""
    c_clip: float | None = number(
        None, above=1, relevant=when("policy_loss", "ppo", "gspo", "custom"), also="verl: actor.clip_ratio_c"
    )
    """Dual clip: maximum loss of negative advantages as a multiple of |advantage|; null = off."""
    importance_sampling_level: str = choice(
        "token", "token", "sequence", relevant=when("policy_loss", *WITH_SEQUENCE_RATIO)
    )
    """Ratio in the loss: token = per token, sequence = exp of the mean log-ratio of the sequence (GSPO)."""
    sequence_level: SequenceLevelOptions = section(SequenceLevelOptions, relevant=_SEQUENCE_RATIO)
    """Options of the sequence ratio."""
    sapo: SapoOptions = section(SapoOptions, relevant=when("policy_loss", "sapo"))
    """Options of policy_loss=sapo."""
    cispo: CispoOptions = section(CispoOptions, relevant=when("policy_loss", "cispo"))
    """Options of policy_loss=cispo."""
    aipo: AipoOptions = section(AipoOptions, relevant=when("policy_loss", "aipo"))
    """Options of policy_loss=aipo."""
    clip_cov: ClipCovOptions = section(ClipCovOptions, relevant=when("policy_loss", "clip_cov"))
    """Options of policy_loss=clip_cov."""
    kl_cov: KlCovOptions = section(KlCovOptions, relevant=when("policy_loss", "kl_cov"))
    """Options of policy_loss=kl_cov."""
    topr: ToprOptions = section(ToprOptions, relevant=when("policy_loss", "topr"))
    """Options of policy_loss=topr."""
    kimi15: Kimi15Options = section(Kimi15Options, relevant=when("policy_loss", "kimi15"))
    """Options of policy_loss=kimi15."""
    dppo: DppoOptions = section(DppoOptions, relevant=when("policy_loss", "dppo"))
    """Options of policy_loss=dppo."""
    custom: CustomFunctionOptions = section(CustomFunctionOptions, relevant=when("policy_loss", "custom"))
    """The loss function of policy_loss=custom, called as loss(tokens, options)."""

    def policy_loss_problems(self) -> Problems:
        """Errors in the path of a user-defined loss."""
        if self.policy_loss == "custom":
            yield from self.custom.problems_as("custom", "policy_loss=custom", LOSS_CALL)


# ----------------------------------------------------------------------------------------------------------------------
# Options that turn token losses into one update: aggregation, additional terms, filters, mini-batches.

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""How token losses become one scalar; `areal.algorithm.aggregate` has the formulas."""
HAS_SCALE = when("loss_aggregation", "seq-mean-token-sum-norm", "token-sum")


def scale_problems(aggregation: str, scale_tokens: int | None) -> Problems:
    """The missing divisor of an aggregation."""
    if aggregation == "seq-mean-token-sum-norm" and scale_tokens is None:
        text = f"is required by loss_aggregation={aggregation}: set a constant, for example gconfig.max_new_tokens"
        yield Problem("loss_scale_tokens", text, "config.missing_requirement")


@dataclass(frozen=True, kw_only=True)
class AdaptiveEntropyConfig:
    """An entropy coefficient that follows the entropy (AEnt), adjusted after each train step."""

    entropy_low: float = number(0.1, low=0)
    """The coefficient increases while the mean entropy of a step, in nats per token, is below this."""
    entropy_high: float = number(0.5, low=0)
    """The coefficient decreases while the mean entropy of a step, in nats per token, is above this."""
    coef_lr: float = number(1e-3, above=0)
    """Change of the coefficient per nat outside [entropy_low, entropy_high]."""
    coef_low: float = number(1e-5, low=0)
    """Minimum coefficient."""
    coef_high: float = number(1e-2, above=0)
    """Maximum coefficient."""
    warmup_steps: int = number(0, low=0)
    """Train steps during which the coefficient stays at entropy_coef."""

    def problems(self) -> Problems:
        if self.entropy_low > self.entropy_high:
            yield "entropy_low", f"{self.entropy_low} is above entropy_high={self.entropy_high}: lower it"
        if self.coef_low > self.coef_high:
            yield "coef_low", f"{self.coef_low} is above coef_high={self.coef_high}: lower it"


def _can_share_a_prefix(config: Any) -> bool:
    shortest = config.actor.shared_prefix_min_tokens or 0
    return config.gconfig.n_samples > 1 and shortest < config.gconfig.max_new_tokens


def _has_sessions(config: Any) -> bool:
    return config.workflow == "agent"


@dataclass(frozen=True, kw_only=True)
class ResamplingConfig:
    """PF-PPO: answers are drawn with probabilities that depend on their rewards."""

    method: str = choice("pow", "pow", "max_min", "max_random", also="verl: algorithm.pf_ppo.reweight_method")
    """Weight of an answer: pow = |reward|^power, max_min = 1 for best and worst, max_random = 0.4 best, 0.1 others."""
    power: float = number(2.0, low=0, relevant=when("method", "pow"), also="verl: algorithm.pf_ppo.weight_pow")
    """Exponent of method=pow."""


@dataclass(frozen=True, kw_only=True)
class AssemblyOptions:
    """The steps from token losses to optimiser steps."""

    ppo_n_minibatches: int = number(4, low=1, also="verl: actor.ppo_mini_batch_size (a size, not a count)")
    """Optimiser steps per pass over a train batch."""
    ppo_epochs: int = number(1, low=1, also="verl: actor.ppo_epochs; ROLL: ppo_epochs")
    """Passes over a train batch; every pass after the first assigns sequences to mini-batches at random."""
    target_kl: float | None = number(None, above=0, relevant=above("ppo_n_minibatches", 1) | above("ppo_epochs", 1))
    """Skip the rest of a train step once a mini-batch's approximate KL to the old policy exceeds this; null = off."""
    loss_aggregation: str = choice("token-mean", *AGGREGATIONS, also="verl: actor.loss_agg_mode")
    """How the token losses of a mini-batch over all ranks become one number; see docs/algorithms.md."""
    loss_scale_tokens: int | None = number(None, low=1, relevant=HAS_SCALE, also="cosmos-rl: unbiased_loss_max_tokens")
    """Divisor in tokens, required by seq-mean-token-sum-norm; null = 1 for token-sum."""
    loss_unit: str = choice("session", "session", "row", relevant=satisfies("/", _has_sessions, "workflow is agent"))
    """What seq-mean counts as one sequence: session = all rows of a session, row = each row that agent.cut makes."""
    entropy_coef: float = number(0.0, low=0, also="verl: actor.entropy_coeff; ROLL: entropy_loss_coef")
    """Coefficient of the entropy bonus, aggregated as the policy loss; 0 = no bonus."""
    entropy_clamp: float = number(0.0, low=0, below=1, relevant=above("entropy_coef", 0) | given("adaptive_entropy"))
    """Fraction of the vocabulary, the least likely tokens, that the entropy bonus excludes (AEnt); 0 = none."""
    adaptive_entropy: AdaptiveEntropyConfig | None = None
    """Adjust the entropy coefficient during training, starting at entropy_coef; null = constant coefficient."""
    positive_nll_coef: float = number(0.0, low=0, also="cosmos-rl: positive_nll_coef")
    """Coefficient of the mean of -log pi over the tokens of answers with a task reward above 0 (VAPO); 0 = none."""
    mask_truncated: bool = False
    """Exclude answers that were cut by a length limit from the policy loss (DAPO's overlong filtering)."""
    shared_prefix_min_tokens: int | None = number(
        None,
        low=1,
        relevant=satisfies("/", _can_share_a_prefix, "gconfig.n_samples is above 1 and answers can be longer"),
        also="cosmos-rl: min_filter_prefix_tokens",
    )
    """Exclude prefixes of this length or more that answers with different rewards share; null = off."""
    pf_ppo: ResamplingConfig | None = option(None, also="verl: algorithm.use_pf_ppo")
    """Resample the answers of a batch by reward, after the advantages (PF-PPO); null = train on each answer once."""
    dynamic_sampling: bool = False
    """Exclude groups with equal rewards from the policy loss; the batch becomes smaller and is not refilled."""

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss needs an entropy with gradient."""
        return self.entropy_coef > 0 or self.adaptive_entropy is not None

    def assembly_problems(self) -> Problems:
        """Combinations of these options that cannot work."""
        yield from scale_problems(self.loss_aggregation, self.loss_scale_tokens)
        box = self.adaptive_entropy
        if box is not None and not box.coef_low <= self.entropy_coef <= box.coef_high:
            limits = f"coef_low={box.coef_low:g}, coef_high={box.coef_high:g}"
            yield "entropy_coef", f"{self.entropy_coef:g} is outside adaptive_entropy ({limits}): start inside"


def filter_problems(options: AssemblyOptions, sampling: GenerationHyperparameters) -> Problems:
    """Filters that would exclude every answer; paths below the actor."""
    if options.dynamic_sampling and sampling.n_samples == 1:
        yield "dynamic_sampling", "would exclude every answer with gconfig.n_samples=1: raise that or remove it"
