"""Owns the top level of a configuration: one class per kind of training, and the checks across sections."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from areal.api.config.algorithm import PPOActorConfig, PPOCriticConfig
from areal.api.config.data import TrainDatasetConfig, ValidDatasetConfig
from areal.api.config.fields import Problems, number
from areal.api.config.inference import GenerationHyperparameters, NativeServerConfig
from areal.api.config.launcher import ClusterSpecConfig, LauncherConfig
from areal.api.config.observe import (
    EvaluatorConfig,
    PerfTracerConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
)
from areal.api.config.rollout import InferenceEngineConfig, RewardConfig
from areal.api.config.train import TrainEngineConfig


@dataclass(frozen=True, kw_only=True)
class BaseExperimentConfig:
    """What every kind of training has."""

    experiment_name: str = "???"
    """Name of the experiment; part of the run folder."""
    trial_name: str = "???"
    """Name of this run inside the experiment; part of the run folder."""
    cluster: ClusterSpecConfig = field(default_factory=ClusterSpecConfig)
    """The machines."""
    allocation_mode: str = ""
    """Which backends run with which parallel sizes, e.g. native:d1+fsdp:d1."""
    seed: int = number(1, low=0)
    """Base seed; every process derives its own from it."""
    total_train_epochs: int = number(1, low=1)
    """Passes over the training set."""
    total_train_steps: int | None = number(None, low=1)
    """Stop after so many train steps; null = all of total_train_epochs."""
    total_train_n_seqs: int | None = number(None, low=1)
    """Stop once so many sequences were trained on; null = no such limit."""
    tokenizer_path: str = ""
    """Folder or hub name of the tokenizer; empty = the trained model's path."""
    train_dataset: TrainDatasetConfig = field(default_factory=TrainDatasetConfig)
    """The training set."""
    valid_dataset: ValidDatasetConfig | None = None
    """The held-out set; null = no evaluation."""
    saver: SaverConfig = field(default_factory=SaverConfig)
    """When weights are exported."""
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    """When the held-out set is evaluated."""
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    """Where metrics go."""
    perf_tracer: PerfTracerConfig | None = None
    """Spans of the phases; null = off."""
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Recovery checkpoints and restarts."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """How processes are started and watched."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    model: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """The trained model."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(BaseExperimentConfig):
    """Reinforcement learning of a policy, with a critic or (GRPO) without."""

    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """Sampling of training rollouts."""
    eval_gconfig: GenerationHyperparameters | None = None
    """Sampling of evaluations; null = gconfig. n_samples is 1 there."""
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """The rollout controller."""
    native: NativeServerConfig = field(default_factory=NativeServerConfig)
    """The native inference servers."""
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    """The policy."""
    ref: TrainEngineConfig | None = None
    """Frozen reference policy of the KL penalty; null = none, and actor.kl_ctl is then not used."""
    critic: PPOCriticConfig | None = None
    """Value model; null = none (GRPO)."""
    workflow: str = "rlvr"
    """Workflow of a run without a script: a registered name (rlvr, multi_turn) or module:Class."""
    workflow_args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further keyword arguments of the workflow's constructor."""
    reward_fn: str = ""
    """Reward of a run without a script: a registered name (gsm8k, exact) or module:function or file.py:function."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The pool that runs reward functions."""

    @property
    def max_concurrent_rollouts(self) -> int:
        """Episodes in flight at most."""
        chosen = self.rollout.max_concurrent_rollouts
        return chosen or self.train_dataset.batch_size * (self.rollout.max_head_offpolicyness + 1)

    def problems(self) -> Problems:
        size = self.rollout.consumer_batch_size
        if size is not None and size != self.train_dataset.batch_size:
            yield (
                "rollout.consumer_batch_size",
                f"{size} differs from train_dataset.batch_size="
                f"{self.train_dataset.batch_size}: remove it or make them equal",
            )
        if not math.isclose(self.actor.temperature, self.gconfig.temperature):
            yield (
                "actor.temperature",
                f"{self.actor.temperature} differs from gconfig.temperature="
                f"{self.gconfig.temperature}: the trainer must divide logits as the servers do",
            )
        for path, norm in (("reward_norm", self.actor.reward_norm), ("adv_norm", self.actor.adv_norm)):
            if norm is not None and norm.group_size not in (1, self.gconfig.n_samples):
                yield (
                    f"actor.{path}.group_size",
                    f"{norm.group_size} differs from gconfig.n_samples="
                    f"{self.gconfig.n_samples}: remove it or make them equal",
                )
        if self.actor.group_size not in (1, self.gconfig.n_samples):
            yield (
                "actor.group_size",
                f"{self.actor.group_size} differs from gconfig.n_samples="
                f"{self.gconfig.n_samples}: remove it or make them equal",
            )
        if self.actor.optimizer is None:
            yield "actor.optimizer", "is null: the policy would never learn; give at least {lr: 1e-5}"
        if self.critic is not None and self.critic.optimizer is None:
            yield "critic.optimizer", "is null: the critic would never learn; give at least {lr: 1e-5}"
        if self.ref is not None and self.ref.optimizer is not None:
            yield "ref.optimizer", "is set, but a reference is never trained: remove it"


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PPOConfig):
    """PPOConfig under the name users of GRPO look for."""
