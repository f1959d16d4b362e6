"""Owns the options of the policy losses: which one, the clip they share, and one class for each with its own options.

To add a loss: its name in POLICY_LOSSES and in the sets below that hold for it, a class here when it has options of
its own (a field of its name), the function in `areal/algorithm/losses/NAME.py`, one test, one row in the docs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from areal.api.config.fields import Problem, Problems, choice, number, section
from areal.api.config.relevance import when
from areal.api.errors import ConfigError
from areal.api.functions import parse_function_path

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
"""Names of the losses; the function `loss` of the module `areal.algorithm.losses.NAME` computes each."""

_CLIPS = when("policy_loss", "ppo", "gspo", "cispo", "gmpo", "clip_cov", "dppo", "custom")
_SEQUENCE_RATIO = when("policy_loss", "gspo") | (
    when("importance_sampling_level", "sequence") & when("policy_loss", "ppo", "sapo", "cispo", "aipo", "custom")
)


@dataclass(frozen=True, kw_only=True)
class SequenceLevelOptions:
    """How the ratio of a sequence enters a loss. Advantages and weights equal within one: all the same loss."""

    advantage: str = choice("mean", "mean", "token")
    """mean = a token's advantage is the mean over its sequence (AReaL); token = its own (GSPO-token, verl, cosmos)."""
    gradient: str = choice(
        "shared",
        "shared",
        "own",
        relevant=when("../policy_loss", "ppo", "gspo", "sapo", "custom")
        | (when("../policy_loss", "aipo") & when("../aipo.truncation", "objective")),
    )
    """shared = through the mean of log-ratios to every token (AReaL, cosmos); own = to its token only (GSPO-token)."""
    max_log_ratio: float | None = number(None, above=0)
    """Upper cut of the sequence's log-ratio, gradient 0 beyond (verl and cosmos: 10); null = none (AReaL)."""


@dataclass(frozen=True, kw_only=True)
class SapoOptions:
    """Soft gate in the place of the clip."""

    tau_pos: float = number(1.0, above=0)
    """Temperature of the gate where the advantage is positive; higher closes faster."""
    tau_neg: float = number(1.05, above=0)
    """Temperature of the gate where the advantage is zero or negative."""


@dataclass(frozen=True, kw_only=True)
class CispoOptions:
    """Clipped importance weight of the log-probability."""

    unified_mask: bool = False
    """Also leave out the tokens that PPO's clip would: ratio beyond the clip on the side the advantage pushes to."""


@dataclass(frozen=True, kw_only=True)
class AipoOptions:
    """One-sided truncation of the ratio."""

    rho: float = number(2.0, above=0)
    """Upper cut of the ratio (LlamaRL suggests 2 to 10)."""
    truncation: str = choice("weight", "weight", "objective")
    """weight = min(ratio, rho) is a constant weight of A log pi (LlamaRL); objective = -A min(ratio, rho) (cosmos)."""


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions:
    """Tokens of high covariance that get no gradient, drawn once per batch."""

    ratio: float = number(0.0002, above=0, high=1)
    """Part of the batch's trained tokens that is left out, at least one token."""
    low: float = number(1.0)
    """Only tokens with a covariance above this are drawn."""
    high: float = number(5.0)
    """Only tokens with a covariance below this are drawn."""

    def problems(self) -> Problems:
        if self.low >= self.high:
            yield "low", f"{self.low:g} must be below high={self.high:g}: no covariance lies between them"


@dataclass(frozen=True, kw_only=True)
class KlCovOptions:
    """Tokens of high covariance that get a KL penalty, chosen once per batch."""

    ratio: float = number(0.0002, above=0, high=1)
    """Part of the batch's trained tokens that is penalised: those of highest covariance, at least one token."""
    coef: float = number(1.0, above=0)
    """Weight of |log pi - log pi_old| at the chosen tokens."""


@dataclass(frozen=True, kw_only=True)
class ToprOptions:
    """REINFORCE whose negative answers taper off."""

    ratio: str = choice("trajectory", "trajectory", "token")
    """What weighs a negative token, cut to at most 1: the product of its sequence's ratios (paper), its own (ROLL)."""
    positive_weight: float = number(1.0, low=0)
    """Factor of the losses of tokens with an advantage of at least 0."""
    negative_weight: float = number(1.0, low=0)
    """Factor of the losses of tokens with a negative advantage."""


@dataclass(frozen=True, kw_only=True)
class Kimi15Options:
    """Policy gradient with a squared log-ratio as penalty."""

    tau: float = number(0.1, above=0)
    """Weight of the penalty, tau / 2 times the squared log-ratio."""
    ratio: str = choice("trajectory", "trajectory", "token")
    """Whose log-ratio is squared: the sum over the sequence (paper), or that of each token (ROLL)."""


@dataclass(frozen=True, kw_only=True)
class DppoOptions:
    """Divergence of the two-way distribution (this token or another) in the place of PPO's ratio."""

    divergence: str = choice("tv", "tv", "kl")
    """What eps_clip and eps_clip_higher bound: tv = the difference of probabilities, kl = KL(old, new) in nats."""
    max_ratio: float = number(20.0, low=1)
    """Upper cut of the ratio that weighs the log-probability."""


@dataclass(frozen=True, kw_only=True)
class CustomLossOptions:
    """A loss of your own."""

    path: str = ""
    """The function, `module:function` or `file.py:function`, called as loss(tokens, options) like any other loss."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whatever it needs; it finds them as options.custom.args."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossOptions:
    """The policy-gradient loss."""

    policy_loss: str = choice("ppo", *POLICY_LOSSES)
    """The loss of a token; docs/algorithms.md has the formulas."""
    eps_clip: float = number(0.2, relevant=_CLIPS)
    """Clip of the ratio below 1, and above too unless eps_clip_higher is given; negative = none."""
    eps_clip_higher: float | None = number(None, relevant=_CLIPS)
    """Clip of the ratio above 1; negative = none; null = eps_clip."""
    c_clip: float | None = number(None, above=1, relevant=when("policy_loss", "ppo", "gspo", "custom"))
    """Dual clip: bound on the loss of negative advantages as a multiple of |advantage|; null = off."""
    importance_sampling_level: str = choice(
        "token", "token", "sequence", relevant=when("policy_loss", "ppo", "gspo", "sapo", "cispo", "aipo", "custom")
    )
    """Whose ratio the loss takes: the token's, or exp of the mean log-ratio of its sequence (GSPO)."""
    sequence_level: SequenceLevelOptions = section(SequenceLevelOptions, relevant=_SEQUENCE_RATIO)
    """Details of importance_sampling_level=sequence and policy_loss=gspo."""
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
    custom: CustomLossOptions = section(CustomLossOptions, relevant=when("policy_loss", "custom"))
    """Options of policy_loss=custom."""

    def policy_loss_problems(self) -> Problems:
        """What is wrong with these options together."""
        if self.policy_loss != "custom":
            return
        if not self.custom.path:
            text = "is required with policy_loss=custom: give module:function or file.py:function"
            yield Problem("custom.path", text, "config.missing_requirement")
            return
        try:
            parse_function_path(self.custom.path, key="custom.path")
        except ConfigError as error:
            yield from error.problems
