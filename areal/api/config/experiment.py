"""Owns the top level of a configuration: one class per kind of training, and the checks across sections."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, cast

from areal.api.allocation import AllocationError, AllocationMode, check_supported
from areal.api.config.advantages import baseline_problems
from areal.api.config.algorithm import PPOActorConfig, PPOCriticConfig
from areal.api.config.data import TrainDatasetConfig, ValidDatasetConfig, misplaced_data
from areal.api.config.fields import Problem, Problems, below, number
from areal.api.config.inference import GenerationHyperparameters, NativeServerConfig
from areal.api.config.kl import reference_problems
from areal.api.config.launcher import ClusterSpecConfig, LauncherConfig
from areal.api.config.loss_assembly import filter_problems
from areal.api.config.observe import (
    EvaluatorConfig,
    PerfTracerConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
)
from areal.api.config.relevance import options_without_effect
from areal.api.config.reward import RewardConfig, selection_problems
from areal.api.config.roles import RewardModelConfig, TeacherConfig, reward_model_problems, teacher_problems
from areal.api.config.rollout import InferenceEngineConfig
from areal.api.config.train import TrainEngineConfig
from areal.api.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BaseExperimentConfig:
    """What every kind of training has."""

    strict_config: bool = False
    """Refuse options that have no effect under the other options; false = one notice at start-up lists them."""
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

    @property
    def allocation(self) -> AllocationMode:
        """The parsed allocation_mode."""
        return AllocationMode.parse(self.allocation_mode)

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        """The models in the trainer by the name of their section; empty for classes that do not say."""
        return {}

    def problems(self) -> Problems:
        for path, name in (("experiment_name", self.experiment_name), ("trial_name", self.trial_name)):
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                yield path, f"{name!r} cannot name a folder: use a name without /, for example run-1"
        if self.strict_config:
            for one in options_without_effect(self):
                text = f"{one.value} has no effect: it is relevant when {one.relevant_when}; remove it"
                yield Problem(one.path, text, "config.no_effect")
        yield from self._allocation_problems()
        if self.valid_dataset is None:
            if self.evaluator.stop_at:
                yield (
                    "evaluator.stop_at",
                    f"is {self.evaluator.stop_at}, but nothing is evaluated: give valid_dataset.path",
                )
            elif self.evaluator.is_set or self.evaluator.eval_before_train:
                yield "evaluator", "asks for evaluations, but there is nothing to evaluate on: give valid_dataset.path"

    @property
    def _wants_servers(self) -> bool | None:
        """Whether this kind of training generates; None = unknown, for classes that do not say."""
        return None

    def _allocation_problems(self) -> Problems:
        path, text = "allocation_mode", self.allocation_mode
        try:
            check_supported(self.allocation)
        except AllocationError as error:
            yield path, error.summary
            return
        except ConfigError as error:
            yield path, str(error)
            return
        has_servers = self.allocation.inference is not None
        if self._wants_servers is True and not has_servers:
            yield path, f"{text} has no servers, but this training generates: use for example native:d1+{text}"
        if self._wants_servers is False and has_servers:
            yield path, f"{text} starts servers, but this training generates nothing: use {self.allocation.train[0]}"
        ranks, rows = self.allocation.train[0].parallel.dp, self.train_dataset.batch_size
        if rows < ranks:
            yield (
                "train_dataset.batch_size",
                f"{rows} is below the {ranks} data-parallel ranks of {self.allocation_mode}: "
                "every rank needs a row; raise it",
            )


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
    """The native inference servers; read with allocation_mode=native:... only."""
    sglang: dict[str, Any] = field(default_factory=dict[str, Any])
    """Flags of the SGLang servers, named as SGLang names them; read with allocation_mode=sglang:... only."""
    vllm: dict[str, Any] = field(default_factory=dict[str, Any])
    """Flags of the vLLM servers, named as vLLM names them; read with allocation_mode=vllm:... only."""
    server_python: str = ""
    """Python interpreter of the environment that SGLang or vLLM is installed in; empty = the one that runs areal."""
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    """The policy."""
    ref: TrainEngineConfig | None = None
    """Reference policy that the KL is measured against; null = none, and actor.kl_ctl is then not used."""
    ref_reset_steps: int | None = number(None, low=1)
    """The reference becomes the policy as it is then after every so many train steps; null = it never changes."""
    ref_reset_optimizer: bool = False
    """With each reset of the reference the policy's optimiser forgets its moments; its schedule goes on."""
    critic: PPOCriticConfig | None = None
    """Value model; null = none (GRPO)."""
    teacher: TeacherConfig | None = None
    """Frozen model that the policy imitates on its own answers (on-policy distillation); null = none."""
    reward_model: RewardModelConfig | None = None
    """Frozen model whose score is added to the reward of every answer; null = none."""
    workflow: str = "rlvr"
    """Workflow of a run without a script: a registered name (rlvr, multi_turn) or module:Class."""
    workflow_args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further keyword arguments of the workflow's constructor."""
    reward_fn: str = ""
    """Reward of a run without a script: a registered name (gsm8k, exact) or module:function or file.py:function."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Several reward functions with weights, and the pool that runs them."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        models = {
            "actor": self.actor,
            "critic": self.critic,
            "ref": self.ref,
            "teacher": self.teacher,
            "reward_model": self.reward_model,
        }
        return {name: model for name, model in models.items() if model is not None}

    @property
    def max_concurrent_rollouts(self) -> int:
        """Episodes in flight at most."""
        chosen = self.rollout.max_concurrent_rollouts
        return chosen or self.train_dataset.batch_size * (self.rollout.max_head_offpolicyness + 1)

    @property
    def server_backend(self) -> str:
        """Which servers generate: native, sglang or vllm; empty while allocation_mode cannot be read or has none."""
        try:
            servers = self.allocation.inference
        except AllocationError:
            return ""
        return "" if servers is None else servers.backend

    @property
    def server_flags(self) -> dict[str, Any]:
        """The flags of the servers that allocation_mode starts; empty when their section is a dataclass."""
        section: Any = getattr(self, self.server_backend, None)
        return cast("dict[str, Any]", section) if isinstance(section, dict) else {}

    def problems(self) -> Problems:
        yield from super().problems()
        yield from misplaced_data("rl", self.train_dataset, self.valid_dataset)
        yield from self._must_be_equal()
        yield from self._sampling_problems()
        yield from self._role_problems()
        yield from self._attach_problems()
        yield from selection_problems(self.reward, short_form=self.reward_fn)
        if self.reward.filter_on and not self.rollout.should_accept_fn:
            yield (
                "reward.filter_on",
                "is given, but rollout.should_accept_fn is empty, so nothing filters: name a filter there, for example "
                "mixed_rewards, or remove it",
            )
        if self.actor.optimizer is None:
            yield "actor.optimizer", "is null: the policy would never learn; give at least {lr: 1e-5}"
        yield from below("actor", filter_problems(self.actor, self.gconfig))
        withheld = self.actor.mask_truncated and self.actor.mask_no_eos_with_zero
        if withheld and self.critic is None and not self.actor.scales_advantages:
            yield (
                "actor.mask_no_eos_with_zero",
                "has no effect, since actor.mask_truncated takes those answers out of the loss, and neither a critic "
                "nor a norm of advantages sees their rewards: remove it",
            )
        if self.critic is not None and self.critic.warmup_steps >= (self.total_train_steps or math.inf):
            yield (
                "critic.warmup_steps",
                f"{self.critic.warmup_steps} leaves the policy no step of total_train_steps={self.total_train_steps}: "
                "lower it",
            )
        if self.critic is not None and self.critic.optimizer is None:
            yield "critic.optimizer", "is null: the critic would never learn; give at least {lr: 1e-5}"
        if self.critic is not None and self.actor.adv_estimator != "gae":
            yield "critic", f"is not used by actor.adv_estimator={self.actor.adv_estimator}: remove it, or use gae"
        yield from reference_problems(
            self.actor,
            has_ref=self.ref is not None,
            reset_steps=self.ref_reset_steps,
            reset_optimizer=self.ref_reset_optimizer,
        )
        if self.ref is not None and self.ref.optimizer is not None:
            yield "ref.optimizer", "is set, but a reference is never trained: set it to null"
        if self.ref is not None and self.ref.logprob_kernel == "liger" and self.actor.wants_distributions:
            yield (
                "ref.logprob_kernel",
                "is liger, which gives log-probabilities only, and a full KL needs more: use torch",
            )

    @property
    def _wants_servers(self) -> bool | None:
        return True

    def _must_be_equal(self) -> Problems:
        """Options that AReaL files repeat and that the trainer and the servers must agree on."""
        rows, samples = self.train_dataset.batch_size, self.gconfig.n_samples
        size = self.rollout.consumer_batch_size
        if size not in (None, rows):
            yield _unequal("rollout.consumer_batch_size", size, "train_dataset.batch_size", rows)
        temperatures = [("actor", self.actor.temperature)]
        if self.ref is not None:
            temperatures.append(("ref", self.ref.temperature))
        if self.teacher is not None:
            temperatures.append(("teacher", self.teacher.temperature))
        for model, temperature in temperatures:
            if not math.isclose(temperature, self.gconfig.temperature):
                yield _unequal(f"{model}.temperature", temperature, "gconfig.temperature", self.gconfig.temperature)
        groups = [("actor.group_size", self.actor.group_size)]
        for path, norm in (("reward_norm", self.actor.reward_norm), ("adv_norm", self.actor.adv_norm)):
            if norm is not None:
                groups.append((f"actor.{path}.group_size", norm.group_size))
        for path, group_size in groups:
            if group_size not in (1, samples):
                yield _unequal(path, group_size, "gconfig.n_samples", samples)

    def _role_problems(self) -> Problems:
        if self.teacher is not None:
            yield from teacher_problems(
                self.teacher,
                self.actor,
                has_critic=self.critic is not None,
                kl_ctl=0.0 if self.ref is None else self.actor.kl_ctl,
            )
        if self.reward_model is not None:
            yield from reward_model_problems(
                has_functions=bool(self.reward_fn) or self.reward.names_functions,
                accept_fn=self.rollout.should_accept_fn,
                adv_estimator=self.actor.adv_estimator,
            )

    def _sampling_problems(self) -> Problems:
        samples = self.gconfig.n_samples
        if samples > 1 and self.gconfig.greedy:
            yield "gconfig.greedy", f"makes all n_samples={samples} answers equal: set it to false"
        found = baseline_problems(self.actor, self.gconfig, has_critic=self.critic is not None)
        yield from below("actor", found)
        if self.eval_gconfig is not None and self.eval_gconfig.n_samples != 1:
            yield (
                "eval_gconfig.n_samples",
                f"{self.eval_gconfig.n_samples} is not 1: evaluation draws one answer a prompt",
            )

    def _attach_problems(self) -> Problems:
        """Servers that already run must be as many as allocation_mode says."""
        addresses = self.rollout.server_addrs
        servers = self.allocation.inference if self.server_backend else None
        if addresses and servers is not None and len(addresses) != servers.num_replicas:
            as_many = dataclasses.replace(servers, parallel=dataclasses.replace(servers.parallel, dp=len(addresses)))
            yield (
                "rollout.server_addrs",
                f"names {len(addresses)} servers, but allocation_mode={self.allocation_mode} has "
                f"{servers.num_replicas}: write {as_many} there, or name as many addresses",
            )


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PPOConfig):
    """PPOConfig under the name users of GRPO look for."""


def _unequal(path: str, value: object, other: str, expected: object) -> tuple[str, str]:
    return path, f"{value} differs from {other}={expected}: remove it or make them equal"
