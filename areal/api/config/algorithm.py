"""Owns the models of PPO: the actor, whose options come from one file per area, and the critic."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.advantages import AdvantageOptions
from areal.api.config.fields import Problems, choice, number
from areal.api.config.kl import KLOptions
from areal.api.config.loss_assembly import AssemblyOptions
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
        yield from self.kl_problems()
        yield from self.assembly_problems()


@dataclass(frozen=True, kw_only=True)
class PPOCriticConfig(TrainEngineConfig):
    """The value model; the backbone of `path` with a new one-output head when it has none."""

    ppo_n_minibatches: int = number(4, low=1)
    """Optimiser steps per train batch."""
    eps_clip: float = number(0.5, above=0)
    """Clip range of a value around its old value."""
