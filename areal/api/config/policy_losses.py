"""Options of the policy losses: the choice of the loss, the shared clip range, and one section per loss.

To add a loss: add its name to POLICY_LOSSES and to the conditions below that apply, a section here if it has options,
the function `loss` in `areal/algorithm/losses`, one test, one row in docs/algorithms.md.
"""

from dataclasses import dataclass

from areal.api.config.custom import CustomFunctionOptions
from areal.api.config.fields import Problems, choice, number, section
from areal.api.config.relevance import when
from areal.api.functions import LOSS_CALL

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
    """Also exclude tokens whose ratio is outside the clip range in the direction of the advantage, as PPO does."""


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
