"""Owns the models of PPO: the actor, whose options come from one file per area, and the critic."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.advantages import AdvantageOptions
from areal.api.config.fields import Problems, choice, number
from areal.api.config.kl import KLOptions
from areal.api.config.loss_assembly import AGGREGATIONS, AssemblyOptions, scale_problems
from areal.api.config.off_policy import OffPolicyOptions
from areal.api.config.policy_losses import PolicyLossOptions
from areal.api.config.train import TrainEngineConfig


@dataclass(frozen=True, kw_only=True)
class PPOActorConfig(
    AssemblyOptions, KLOptions, OffPolicyOptions, PolicyLossOptions, AdvantageOptions, TrainEngineConfig
):
    """The policy and how it learns."""

    group_size: int = number(1, low=1)
    """Kept for files written for AReaL: must be 1 or gconfig.n_samples, which decides."""
    weight_update_mode: str = choice("xccl", "xccl", "disk")
    """How new weights reach the servers: xccl = a collective (NCCL or gloo), disk = the shared folder."""
    weight_chunked_mem_mb: int = number(1024, low=1)
    """Largest bucket of one weight broadcast, in MiB."""

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
            yield (
                "logprob_kernel",
                "liger gives log-probabilities only, and an entropy bonus, a full KL or adv_estimator=otb needs more: "
                "use torch",
            )


@dataclass(frozen=True, kw_only=True)
class PPOCriticConfig(TrainEngineConfig):
    """The value model; the backbone of `path` with a new one-output head when it has none."""

    ppo_n_minibatches: int = number(4, low=1)
    """Optimiser steps per pass over a train batch."""
    ppo_epochs: int = number(1, low=1)
    """Passes over a train batch; from the second on its sequences are dealt to the minibatches anew."""
    eps_clip: float | None = number(0.5, above=0)
    """Clip range of a value around its old value; null = no clip."""
    huber_delta: float | None = number(None, above=0)
    """Error from which the loss of a value is linear (Huber) instead of e^2 / 2; null = nowhere: squared error."""
    loss_aggregation: str = choice("token-mean", *AGGREGATIONS)
    """How the token losses of a minibatch, on all ranks, become one number; docs/algorithms.md has the formulas."""
    loss_scale_tokens: int | None = number(None, low=1)
    """Constant length that divides: needed by seq-mean-token-sum-norm; with token-sum null = 1; no other takes one."""
    gae_lambda: float | None = number(None, low=0, high=1)
    """Lambda of the targets that values are trained towards (VAPO takes 1); null = that of the advantages."""
    warmup_steps: int = number(0, low=0)
    """Train steps at the beginning that train the critic only, the policy keeps its weights."""

    def problems(self) -> Problems:
        yield from TrainEngineConfig.problems(self)
        yield from scale_problems(self.loss_aggregation, self.loss_scale_tokens)
        if self.logprob_kernel != "torch":
            yield "logprob_kernel", "makes log-probabilities of a language model, and a critic has none: remove it"
