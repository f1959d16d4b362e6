"""Options that turn token losses into one update: aggregation, additional terms, filters, mini-batches."""

from dataclasses import dataclass
from typing import Any

from areal.api.config.fields import Problem, Problems, choice, number, option
from areal.api.config.inference import GenerationHyperparameters
from areal.api.config.relevance import above, given, satisfies, when

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
    """From token losses to optimiser steps."""

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
