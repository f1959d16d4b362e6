"""The trained models of PPO: the actor, whose options come from one module per area, and the critic."""

from dataclasses import dataclass

from areal.api.config.advantages import REWARDS, AdvantageOptions
from areal.api.config.fields import Problem, Problems, choice, number
from areal.api.config.kl import KLOptions
from areal.api.config.loss_assembly import AGGREGATIONS, HAS_SCALE, AssemblyOptions, scale_problems
from areal.api.config.off_policy import OffPolicyOptions
from areal.api.config.policy_losses import PolicyLossOptions
from areal.api.config.relevance import given, satisfies, when
from areal.api.config.train import NO_ADAPTERS, TrainEngineConfig

_WHOLE = satisfies("/", lambda config: not config.publishes_adapters, "the servers get whole weights")
_BY_DISK = when("weight_update_mode", "disk")


@dataclass(frozen=True, kw_only=True)
class PPOActorConfig(
    AssemblyOptions, KLOptions, OffPolicyOptions, PolicyLossOptions, AdvantageOptions, TrainEngineConfig
):
    """The policy and its training."""

    group_size: int = number(1, low=1)
    """Accepted for AReaL files: must be 1 or gconfig.n_samples, which sets the group size."""
    weight_update_mode: str = choice("auto", "auto", "xccl", "disk", "http", relevant=_WHOLE | _BY_DISK)
    """How new weights reach the servers: xccl = collective, disk, http = copies from rank 0, auto = xccl or disk."""
    weight_chunked_mem_mb: int = number(1024, low=1, relevant=_WHOLE & when("weight_update_mode", "auto", "xccl"))
    """Maximum size of one weight broadcast, in MiB."""

    adapter_update_mode: str = choice("auto", "auto", "merged", "adapter", relevant=given("lora"))
    """What is published with lora: merged = whole weights, adapter = adapters alone, auto = adapter to SGLang, vLLM."""

    def problems(self) -> Problems:
        yield from TrainEngineConfig.problems(self)
        yield from self.advantage_problems()
        yield from self.policy_loss_problems()
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
