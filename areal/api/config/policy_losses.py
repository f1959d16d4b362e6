"""Options of the policy losses that several losses share, and of what turns token losses into one update.

The losses are registered in `areal.algorithm.registered`, each with its own options.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    when,
)
from areal.api.errors import ConfigError
from areal.api.registry import CallForm, parse_function_path, registered

# ----------------------------------------------------------------------------------------------------------------------
# A function that the user names by path in place of a named choice.


@dataclass(frozen=True, kw_only=True)
class CustomFunctionOptions(Named):
    """A user-defined function; docs/algorithms.md describes its arguments and its result."""

    path: str = ""
    """The function, `module:function` or `file.py:function`."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the function, which reads them from the options that it gets."""

    def problems_of_call(self, call: CallForm) -> Problems:
        """Errors in the path of a function that is called as `call`."""
        if not self.path:
            text = "is required with custom: give module:function or file.py:function"
            yield Problem("path", text, "config.missing_requirement")
            return
        try:
            parse_function_path(self.path, key="path", call=call)
        except ConfigError as error:
            yield from error.problems


def _never(_: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """Which of the shared options a policy loss reads, and what it needs."""

    clips: bool = False
    """It reads eps_clip and eps_clip_higher."""
    dual_clips: bool = False
    """It reads c_clip."""
    takes_sequence_ratio: bool = False
    """It can use the ratio of the sequence."""
    is_of_sequence: bool = False
    """It always takes one ratio of a whole answer."""
    has_no_ratio: bool = False
    """It applies no ratio of the policies, or its author decides."""
    chooses_tokens: bool = False
    """It treats some tokens of the batch differently, which are chosen before the update."""
    splits_gradient: Callable[[Any], bool] = _never
    """Whether sequence_level.gradient has an effect, given its own options."""
    sums_over_answer: Callable[[Any], bool] = _never
    """Whether the option `ratio` of its own makes it take one ratio of a whole answer."""


def loss_facts(policy_loss: Named) -> LossFacts:
    return registered("losses", policy_loss.name, key="actor.policy_loss").facts or LossFacts()


def _loss(reads: Callable[[LossFacts], bool], text: str, path: str = "policy_loss") -> Condition:
    return satisfies(path, lambda loss: reads(loss_facts(loss)), text)


_CLIPS = _loss(lambda facts: facts.clips, "is a loss that clips the ratio")
_DUAL_CLIPS = _loss(lambda facts: facts.dual_clips, "is a loss with a dual clip")
_TAKES_SEQUENCE_RATIO = _loss(lambda facts: facts.takes_sequence_ratio, "can use the ratio of the sequence")
_SEQUENCE_RATIO = _TAKES_SEQUENCE_RATIO & (
    _loss(lambda facts: facts.is_of_sequence, "is a loss of whole answers")
    | when("importance_sampling_level", "sequence")
)
_SPLITS = satisfies(
    "../policy_loss", lambda loss: loss_facts(loss).splits_gradient(loss), "has a gradient of the ratio of the sequence"
)


@dataclass(frozen=True, kw_only=True)
class SequenceLevelOptions:
    """How the ratio of a sequence enters a loss; all settings agree if advantages are constant within a sequence."""

    advantage: str = choice("mean", "mean", "token")
    """Advantage of a token: mean = mean over its sequence (AReaL), token = its own (GSPO-token, verl, cosmos-rl)."""
    gradient: str = choice("shared", "shared", "own", relevant=_SPLITS)
    """Gradient of the ratio: shared = all tokens of the sequence (AReaL, cosmos-rl), own = its token (GSPO-token)."""
    max_log_ratio: float | None = number(None, above=0)
    """Maximum log-ratio of a sequence, with zero gradient above (verl and cosmos-rl: 10); null = no limit (AReaL)."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossOptions(WithNames):
    """The policy-gradient loss."""

    policy_loss: Named = named("losses", "ppo", also="verl: actor.policy_loss.loss_mode; AReaL 1.0: use_sapo_loss")
    """Policy loss, by name or with its own options {name: sapo, tau_pos: 2}; docs/algorithms.md has the formulas."""
    eps_clip: float = number(0.2, relevant=_CLIPS, also="verl: actor.clip_ratio, clip_ratio_low")
    """Clip range of the ratio below 1, and above 1 unless eps_clip_higher is set; negative = no clipping."""
    eps_clip_higher: float | None = number(None, relevant=_CLIPS, also="verl: actor.clip_ratio_high")
    """Clip range of the ratio above 1; negative = no clipping; null = eps_clip."""
    c_clip: float | None = number(None, above=1, relevant=_DUAL_CLIPS, also="verl: actor.clip_ratio_c")
    """Dual clip: maximum loss of negative advantages as a multiple of |advantage|; null = off."""
    importance_sampling_level: str = choice("token", "token", "sequence", relevant=_TAKES_SEQUENCE_RATIO)
    """Ratio in the loss: token = per token, sequence = exp of the mean log-ratio of the sequence (GSPO)."""
    sequence_level: SequenceLevelOptions = section(SequenceLevelOptions, relevant=_SEQUENCE_RATIO)
    """Options of the sequence ratio."""


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
