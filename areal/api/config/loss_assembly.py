"""Owns the options of how token losses become one update: aggregation, further terms, filters, minibatches."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import Problems, choice, number, option
from areal.api.config.inference import GenerationHyperparameters
from areal.api.config.relevance import when

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""How token losses become one scalar; `areal.algorithm.aggregate` has the formulas."""


def scale_problems(aggregation: str, scale_tokens: int | None) -> Problems:
    """What is wrong with the constant length of an aggregation."""
    if aggregation == "seq-mean-token-sum-norm" and scale_tokens is None:
        yield (
            "loss_scale_tokens",
            "is null, but loss_aggregation=seq-mean-token-sum-norm divides by it: give a constant, for example the "
            "value of gconfig.max_new_tokens",
        )
    if aggregation not in ("seq-mean-token-sum-norm", "token-sum") and scale_tokens is not None:
        yield (
            "loss_scale_tokens",
            f"has no effect with loss_aggregation={aggregation}: remove it, or use seq-mean-token-sum-norm or "
            "token-sum",
        )


@dataclass(frozen=True, kw_only=True)
class AdaptiveEntropyConfig:
    """An entropy coefficient that follows the entropy (AEnt), one move after each train step."""

    entropy_low: float = number(0.1, low=0)
    """The coefficient rises while the mean entropy of a step, in nats a token, is below this."""
    entropy_high: float = number(0.5, low=0)
    """The coefficient falls while the mean entropy of a step, in nats a token, is above this."""
    coef_lr: float = number(1e-3, above=0)
    """Change of the coefficient per nat outside of the band."""
    coef_low: float = number(1e-5, low=0)
    """Smallest coefficient."""
    coef_high: float = number(1e-2, above=0)
    """Largest coefficient."""
    warmup_steps: int = number(0, low=0)
    """The coefficient stays at entropy_coef for so many train steps."""

    def problems(self) -> Problems:
        if self.entropy_low > self.entropy_high:
            yield "entropy_low", f"{self.entropy_low} is above entropy_high={self.entropy_high}: lower it"
        if self.coef_low > self.coef_high:
            yield "coef_low", f"{self.coef_low} is above coef_high={self.coef_high}: lower it"


@dataclass(frozen=True, kw_only=True)
class ResamplingConfig:
    """PF-PPO: train on each answer as often as its reward suggests."""

    method: str = choice("pow", "pow", "max_min", "max_random", also="verl pf_ppo.reweight_method")
    """Probability of an answer: |reward|^power; 1 for best and worst, else 0; 0.4 for the best, else 0.1."""
    power: float = number(2.0, low=0, relevant=when("method", "pow"), also="verl pf_ppo.weight_pow")
    """Exponent of method=pow."""


@dataclass(frozen=True, kw_only=True)
class AssemblyOptions:
    """From token losses to optimiser steps."""

    ppo_n_minibatches: int = number(4, low=1)
    """Optimiser steps per pass over a train batch."""
    ppo_epochs: int = number(1, low=1)
    """Passes over a train batch; from the second on its sequences are dealt to the minibatches anew."""
    target_kl: float | None = number(None, above=0)
    """The rest of a train step is left out once a minibatch's approx_kl to the old policy passes this; null = off."""
    loss_aggregation: str = choice("token-mean", *AGGREGATIONS)
    """How the token losses of a minibatch, on all ranks, become one number; docs/algorithms.md has the formulas."""
    loss_scale_tokens: int | None = number(None, low=1)
    """Constant length that divides: needed by seq-mean-token-sum-norm; with token-sum null = 1; no other takes one."""
    entropy_coef: float = number(0.0, low=0)
    """Weight of the entropy bonus, aggregated as the policy loss; 0 = none."""
    entropy_clamp: float = number(0.0, low=0, below=1)
    """Part of the vocabulary, the least likely tokens, that the bonus's entropy is taken without (AEnt); 0 = none."""
    adaptive_entropy: AdaptiveEntropyConfig | None = None
    """Let the entropy coefficient follow the entropy, beginning with entropy_coef; null = a constant."""
    positive_nll_coef: float = number(0.0, low=0)
    """Weight of the mean of -log pi over the tokens of answers with a task reward above 0 (VAPO); 0 = none."""
    mask_truncated: bool = False
    """Take answers that a length limit cut out of the policy loss (DAPO's overlong filtering)."""
    shared_prefix_min_tokens: int | None = number(None, low=1)
    """Take beginnings of at least so many tokens that answers of different reward share out of the loss; null = off."""
    pf_ppo: ResamplingConfig | None = option(None, also="verl use_pf_ppo")
    """Resample the answers of a batch by reward, after the advantages (PF-PPO); null = train on each once."""
    dynamic_sampling: bool = False
    """Take groups whose rewards are all equal out of the policy loss; the batch gets smaller, nothing is refilled."""

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss needs an entropy with gradient."""
        return self.entropy_coef > 0 or self.adaptive_entropy is not None

    def assembly_problems(self) -> Problems:
        """What is wrong with these options together."""
        yield from scale_problems(self.loss_aggregation, self.loss_scale_tokens)
        if self.entropy_clamp > 0 and not self.has_entropy_bonus:
            yield "entropy_clamp", "has no effect without an entropy bonus: set entropy_coef above 0 or remove it"
        box = self.adaptive_entropy
        if box is not None and not box.coef_low <= self.entropy_coef <= box.coef_high:
            yield (
                "entropy_coef",
                f"{self.entropy_coef:g} is outside of adaptive_entropy.coef_low={box.coef_low:g} to "
                f"coef_high={box.coef_high:g}: begin inside",
            )
        if self.target_kl is not None and self.ppo_n_minibatches * self.ppo_epochs == 1:
            yield "target_kl", "has no effect on a single optimiser step: raise ppo_epochs or ppo_n_minibatches"


def filter_problems(options: AssemblyOptions, sampling: GenerationHyperparameters) -> Problems:
    """Filters that the sampling leaves without effect, or that would leave nothing; paths below the actor."""
    if sampling.n_samples == 1:
        if options.dynamic_sampling:
            yield (
                "dynamic_sampling",
                "leaves out groups of equal rewards, and gconfig.n_samples=1 makes groups of one, which all are: raise "
                "gconfig.n_samples or remove it",
            )
        if options.shared_prefix_min_tokens is not None:
            yield (
                "shared_prefix_min_tokens",
                "compares the answers of a group, but gconfig.n_samples=1 makes groups of one: raise gconfig.n_samples",
            )
    elif (options.shared_prefix_min_tokens or 0) >= sampling.max_new_tokens:
        yield (
            "shared_prefix_min_tokens",
            f"{options.shared_prefix_min_tokens} is as long as an answer can be (gconfig.max_new_tokens="
            f"{sampling.max_new_tokens}), and an answer that is shared as a whole stays: lower it",
        )
