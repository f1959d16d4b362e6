"""Owns the options of the divergence from the reference policy: in the reward and in the loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal.api.config.fields import Problems, choice, number


@dataclass(frozen=True, kw_only=True)
class KLControlConfig:
    """How the coefficient of the KL penalty in the reward changes as training goes on."""

    type: str = choice("fixed", "fixed", "adaptive")
    """fixed = always actor.kl_ctl; adaptive = from actor.kl_ctl on, led after each batch to a target divergence."""
    target: float | None = number(None, above=0)
    """Adaptive: the divergence to hold, in nats of what `measure` says; null = not given, which adaptive refuses."""
    horizon: float = number(10000.0, above=0)
    """Adaptive: sequences over which a divergence 20% or more off the target changes the coefficient by 20%."""
    measure: str = choice("token-mean", "token-mean", "sequence-sum")
    """Adaptive: divergence of an answer, as the mean over its tokens (verl) or their sum (Ziegler et al. 2019)."""


@dataclass(frozen=True, kw_only=True)
class KLOptions:
    """How far from the reference costs how much."""

    kl_ctl: float = number(0.1, low=0)
    """Weight of the per-token KL penalty to the reference in the reward; used only when `ref` is configured."""
    kl_estimator: str = choice("k1", "k1", "k2", "k3", "abs", "full")
    """Which KL approximation the reward takes; full = of whole distributions, see kl_top_k."""
    kl_control: KLControlConfig = field(default_factory=KLControlConfig)
    """Whether kl_ctl stays or adapts."""
    kl_loss_coef: float = number(0.0, low=0)
    """Weight of the KL to the reference as a term of the policy loss; 0 = none."""
    kl_loss_estimator: str = choice("k3", "k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "full")
    """Which KL approximation the loss takes; + = its value with the gradient of k2, full = of whole distributions."""
    kl_loss_correction: str = choice("none", "none", "old", "rollout")
    """Multiply the loss's KL by the ratio of the policy to the loss's old policy, or to the one that sampled."""
    kl_top_k: int | None = number(None, low=0)
    """full: of so many most likely tokens and the rest as one; 0 = all V, [tokens, V] floats a rank; null = unused."""

    def kl_problems(self) -> Problems:
        """What is wrong with these options together."""
        yield from self._control_problems()
        yield from self._loss_problems()
        wants = [
            name
            for name, estimator, coefficient in (
                ("kl_estimator", self.kl_estimator, self.kl_ctl),
                ("kl_loss_estimator", self.kl_loss_estimator, self.kl_loss_coef),
            )
            if estimator == "full" and coefficient > 0
        ]
        if wants and self.kl_top_k is None:
            yield (
                "kl_top_k",
                f"is null, but {wants[0]}=full needs it: say of how many tokens, for example 64, or 0 for all of the "
                "vocabulary",
            )
        if self.kl_top_k is not None and not wants:
            yield "kl_top_k", "has an effect only with kl_estimator=full or kl_loss_estimator=full: remove it"
        if self.kl_estimator == "full" and self.kl_ctl == 0:
            yield "kl_estimator", "has no effect with kl_ctl=0: remove it, or raise kl_ctl"

    @property
    def wants_distributions(self) -> bool:
        """Whether a divergence of whole distributions is taken, which needs more than log-probabilities of tokens."""
        return "full" in (self.kl_estimator, self.kl_loss_estimator)

    def _control_problems(self) -> Problems:
        control, defaults = self.kl_control, KLControlConfig()
        if control.type == "fixed":
            for name, given in (
                ("target", control.target is not None),
                ("horizon", control.horizon != defaults.horizon),
                ("measure", control.measure != defaults.measure),
            ):
                if given:
                    yield (
                        f"kl_control.{name}",
                        "is read only with kl_control.type=adaptive: set that or remove it",
                    )
            return
        if control.target is None:
            yield "kl_control.target", "is null: an adaptive coefficient needs the divergence to hold, for example 0.1"
        if self.kl_ctl == 0:
            yield "kl_ctl", "is 0, and kl_control.type=adaptive would multiply it by factors for ever: start above 0"

    def _loss_problems(self) -> Problems:
        estimator, correction = self.kl_loss_estimator, self.kl_loss_correction
        if self.kl_loss_coef == 0:
            for name, given in (
                ("kl_loss_estimator", estimator != "k3"),
                ("kl_loss_correction", correction != "none"),
            ):
                if given:
                    yield name, "has no effect with kl_loss_coef=0: raise that or remove it"
        elif correction != "none" and estimator == "full":
            yield (
                "kl_loss_correction",
                "has nothing to correct in kl_loss_estimator=full: remove it",
            )
        elif correction != "none" and estimator.endswith("+"):
            yield (
                "kl_loss_correction",
                f"would come on top of the gradient that kl_loss_estimator={estimator} stands in: use "
                f"{estimator.removesuffix('+')} with it, or remove it",
            )


def reference_problems(actor: KLOptions, *, has_ref: bool, reset_steps: int | None, reset_optimizer: bool) -> Problems:
    """What is wrong with the options of the policy and of the run about a reference that is there, or is not."""
    if not has_ref:
        for name, given in (
            ("kl_loss_coef", actor.kl_loss_coef > 0),
            ("kl_control.type", actor.kl_control.type == "adaptive"),
            ("kl_top_k", actor.kl_top_k is not None),
        ):
            if given:
                yield f"actor.{name}", "needs a reference: give ref.path, or remove it"
    if reset_steps is not None and not (has_ref and (actor.kl_ctl > 0 or actor.kl_loss_coef > 0)):
        yield (
            "ref_reset_steps",
            "has no reference to reset: give ref.path and actor.kl_ctl or actor.kl_loss_coef above 0, or remove it",
        )
    if reset_optimizer and reset_steps is None:
        yield "ref_reset_optimizer", "has an effect only with ref_reset_steps: set that or remove it"
