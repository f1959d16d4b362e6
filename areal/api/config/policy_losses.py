"""Owns the options of the policy losses: which one, the clip they share, and one class for each with its own options.

To add a loss: its name in POLICY_LOSSES and in the sets below that hold for it, a class here when it has options of
its own (a field of its name), the function in `areal/algorithm/losses/NAME.py`, one test, one row in the docs.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, fields
from typing import Any, cast

from areal.api.config.fields import Problems, choice, number
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

_WITH_CLIP = ("ppo", "gspo", "cispo", "gmpo", "clip_cov", "dppo", "custom")
"""Losses that read eps_clip and eps_clip_higher."""
_WITH_DUAL_CLIP = ("ppo", "gspo", "custom")
_WITH_LEVEL = ("ppo", "gspo", "sapo", "cispo", "aipo", "custom")
"""Losses whose ratio may be the sequence's; gspo's always is."""


@dataclass(frozen=True, kw_only=True)
class SequenceLevelOptions:
    """How the ratio of a sequence enters a loss. Advantages and weights equal within one: all the same loss."""

    advantage: str = choice("mean", "mean", "token")
    """mean = a token's advantage is the mean over its sequence (AReaL); token = its own (GSPO-token, verl, cosmos)."""
    gradient: str = choice("shared", "shared", "own")
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
    eps_clip: float = number(0.2)
    """Clip of the ratio below 1, and above too unless eps_clip_higher is given; negative = none."""
    eps_clip_higher: float | None = number(None)
    """Clip of the ratio above 1; negative = none; null = eps_clip."""
    c_clip: float | None = number(None, above=1)
    """Dual clip: bound on the loss of negative advantages as a multiple of |advantage|; null = off."""
    importance_sampling_level: str = choice("token", "token", "sequence")
    """Whose ratio the loss takes: the token's, or exp of the mean log-ratio of its sequence (GSPO)."""
    sequence_level: SequenceLevelOptions = field(default_factory=SequenceLevelOptions)
    """Details of importance_sampling_level=sequence and policy_loss=gspo."""
    sapo: SapoOptions = field(default_factory=SapoOptions)
    """Options of policy_loss=sapo."""
    cispo: CispoOptions = field(default_factory=CispoOptions)
    """Options of policy_loss=cispo."""
    aipo: AipoOptions = field(default_factory=AipoOptions)
    """Options of policy_loss=aipo."""
    clip_cov: ClipCovOptions = field(default_factory=ClipCovOptions)
    """Options of policy_loss=clip_cov."""
    kl_cov: KlCovOptions = field(default_factory=KlCovOptions)
    """Options of policy_loss=kl_cov."""
    topr: ToprOptions = field(default_factory=ToprOptions)
    """Options of policy_loss=topr."""
    kimi15: Kimi15Options = field(default_factory=Kimi15Options)
    """Options of policy_loss=kimi15."""
    dppo: DppoOptions = field(default_factory=DppoOptions)
    """Options of policy_loss=dppo."""
    custom: CustomLossOptions = field(default_factory=CustomLossOptions)
    """Options of policy_loss=custom."""

    def policy_loss_problems(self) -> Problems:
        """What is wrong with these options together."""
        name = self.policy_loss
        if name not in POLICY_LOSSES:
            return  # said already
        if name not in _WITH_CLIP:
            yield from self._clip_without_effect()
        if self.c_clip is not None and name not in _WITH_DUAL_CLIP:
            yield "c_clip", f"policy_loss={name} has no dual clip: remove it, or use one of {_listed(_WITH_DUAL_CLIP)}"
        if self.importance_sampling_level == "sequence" and name not in _WITH_LEVEL:
            yield (
                "importance_sampling_level",
                f"policy_loss={name} has no ratio of a sequence: use token, or one of {_listed(_WITH_LEVEL)}",
            )
        yield from self._sequence_level_without_effect()
        yield from self._sections_without_effect()
        if name == "custom":
            yield from self._custom_problems()

    def _clip_without_effect(self) -> Problems:
        default = PolicyLossOptions()
        advice = f"policy_loss={self.policy_loss} has no clip: remove it, or use one of {_listed(_WITH_CLIP)}"
        if self.eps_clip != default.eps_clip:
            yield "eps_clip", advice
        if self.eps_clip_higher is not None:
            yield "eps_clip_higher", advice

    def _sequence_level_without_effect(self) -> Problems:
        changed = _changed(self.sequence_level)
        if self.policy_loss != "gspo" and self.importance_sampling_level == "token":
            for name in changed:
                yield (
                    f"sequence_level.{name}",
                    "has an effect only with importance_sampling_level=sequence or policy_loss=gspo: "
                    "set one of them or remove it",
                )
        elif "gradient" in changed and (
            self.policy_loss == "cispo" or (self.policy_loss == "aipo" and self.aipo.truncation == "weight")
        ):
            yield "sequence_level.gradient", f"no gradient goes through the ratio of {self.policy_loss}: remove it"

    def _sections_without_effect(self) -> Problems:
        """Every loss's own section is a field of its name."""
        for loss in POLICY_LOSSES:
            if loss == self.policy_loss or loss not in vars(self):
                continue
            for name in _changed(vars(self)[loss]):
                yield f"{loss}.{name}", f"has an effect only with policy_loss={loss}: set that or remove it"

    def _custom_problems(self) -> Problems:
        if not self.custom.path:
            yield "custom.path", "is required with policy_loss=custom: give module:function or file.py:function"
            return
        try:
            ref = parse_function_path(self.custom.path, key="custom.path")
            spec = importlib.util.find_spec(ref.module) if ref.module else None
            if spec is not None and (spec.origin or "").endswith(".py"):  # the name too, without running the module
                parse_function_path(f"{spec.origin}:{ref.name}", key="custom.path")
        except ConfigError as error:
            yield "custom.path", str(error).removeprefix("custom.path=")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _changed(section: Any) -> list[str]:
    """Names of the fields of `section` that do not hold their defaults."""
    cls = cast("type[Any]", type(section))
    given, default = cast("tuple[dict[str, Any], ...]", (vars(section), vars(cls())))
    return [entry.name for entry in fields(cls) if given[entry.name] != default[entry.name]]
