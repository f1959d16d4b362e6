"""The top level of a configuration: one class per kind of training, and the checks across sections."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, cast

from areal.api.allocation import AllocationError, AllocationMode, check_supported
from areal.api.config.advantages import REWARDS, baseline_problems
from areal.api.config.agent import AgentConfig
from areal.api.config.algorithm import PPOActorConfig, PPOCriticConfig
from areal.api.config.benchmark import BenchmarkConfig
from areal.api.config.cut_rules import cut_problems
from areal.api.config.data import TemplateConfig, TrainDatasetConfig, ValidDatasetConfig, VisionConfig, misplaced_data
from areal.api.config.fields import Problem, Problems, below, choice, number, option, section
from areal.api.config.inference import GenerationHyperparameters, NativeServerConfig
from areal.api.config.launcher import ClusterSpecConfig, ElasticConfig, LauncherConfig
from areal.api.config.loss_assembly import filter_problems
from areal.api.config.observe import (
    AlarmsConfig,
    EvaluatorConfig,
    PerfTracerConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
)
from areal.api.config.relevance import Condition, above, given, options_without_effect, satisfies, when
from areal.api.config.reward import RewardConfig, score_weight_problems, selection_problems
from areal.api.config.roles import RewardModelConfig, TeacherConfig, reward_model_problems
from areal.api.config.rollout import InferenceEngineConfig
from areal.api.config.schema import with_defaults
from areal.api.config.train import TrainEngineConfig, no_optimizer
from areal.api.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BaseExperimentConfig:
    """Options of every kind of training."""

    FOLLOWERS: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Option -> the option whose value it has unless it is given."""

    strict_config: bool = False
    """Refuse options that have no effect under the other options; false = one notice at start-up lists them."""
    experiment_name: str = "???"
    """Name of the experiment, the first part of the run folder."""
    trial_name: str = "???"
    """Name of this run within the experiment, the second part of the run folder."""
    cluster: ClusterSpecConfig = field(default_factory=ClusterSpecConfig)
    """The machines."""
    allocation_mode: str = option("", also="AReaL 1.0: actor.backend, rollout.backend")
    """Backends and their parallel sizes, e.g. native:d1+fsdp:d1."""
    seed: int = number(1, low=0)
    """Base seed; every process derives its own seed from it."""
    total_train_epochs: int | None = number(None, low=1, also="verl: trainer.total_epochs")
    """Passes over the training set; null = what the limits of steps and sequences need, or 1 without them."""
    total_train_steps: int | None = number(None, low=1, also="verl: trainer.total_training_steps; ROLL: max_steps")
    """Maximum train steps; null = no limit other than total_train_epochs."""
    total_train_n_seqs: int | None = number(None, low=1)
    """Maximum trained sequences, rounded up to full train steps; null = no limit."""
    tokenizer_path: str = ""
    """Folder or hub name of the tokenizer; empty = path of the trained model."""
    chat_template: TemplateConfig = field(default_factory=TemplateConfig)
    """The chat template of the tokenizer."""
    train_dataset: TrainDatasetConfig = field(default_factory=TrainDatasetConfig)
    """The training set."""
    valid_dataset: ValidDatasetConfig | None = None
    """The held-out set for evaluation; null = no evaluation."""
    vision: VisionConfig = field(default_factory=VisionConfig)
    """Images in the rows."""
    saver: SaverConfig = field(default_factory=SaverConfig)
    """Exports of the weights."""
    evaluator: EvaluatorConfig = section(EvaluatorConfig, relevant=given("valid_dataset"))
    """Evaluations of the held-out set."""
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    """Metric trackers."""
    perf_tracer: PerfTracerConfig | None = None
    """Traces of the phases; null = off."""
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    """Alarms about metrics that show a broken run."""
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Recovery checkpoints and restarts of processes."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """How processes are started and monitored."""

    @property
    def allocation(self) -> AllocationMode:
        """The parsed allocation_mode."""
        return AllocationMode.parse(self.allocation_mode)

    def _backend(self, *, of_servers: bool) -> str:
        """Backend of the servers, or of the trainers; empty if allocation_mode has none of them or is invalid."""
        try:
            return next((one.backend for one in self.allocation.allocations if one.is_inference == of_servers), "")
        except AllocationError:
            return ""

    @property
    def train_backend(self) -> str:
        """Backend of the trainers: fsdp or megatron; empty if allocation_mode has no trainers or is invalid."""
        return self._backend(of_servers=False)

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        """The models in the trainer by section name; empty for classes that do not define it."""
        return {}

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the trained policy without its adapters, without memory for itself."""
        policy, ref = self.models.get("actor"), self.models.get("ref")
        return policy is not None and ref is not None and ref.is_base_of(policy)

    def problems(self) -> Problems:
        """Everything wrong with the combination of options, beyond the limits of single fields."""
        for path, name in (("experiment_name", self.experiment_name), ("trial_name", self.trial_name)):
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                yield path, f"{name!r} is not a folder name: use a name without /, for example run-1"
        if self.strict_config:
            for one in options_without_effect(self):
                text = f"has no effect: it is relevant when {one.relevant_when}; remove it"
                yield Problem(one.path, text, "config.no_effect")
        yield from self._allocation_problems()

    @property
    def _wants_servers(self) -> bool | None:
        """Whether this kind of training generates answers; None = unknown."""
        return None

    def _allocation_problems(self) -> Problems:
        path, text = "allocation_mode", self.allocation_mode
        try:
            check_supported(self.allocation)
        except ConfigError as error:
            yield Problem(path, error.summary if isinstance(error, AllocationError) else str(error), error.code)
            return
        has_servers = self.allocation.inference is not None
        if self._wants_servers is True and not has_servers:
            problem = f"{text} has no servers, but this training generates answers: use for example native:d1+{text}"
            yield Problem(path, problem, "config.missing_requirement")
        if self._wants_servers is False and has_servers:
            trainers = "".join(map(str, self.allocation.train)) or "fsdp:d1"
            yield path, f"{text} has servers, but this training generates no answers: use {trainers}"
        if not self.allocation.train:
            return
        dims, rows = self.allocation.train[0].parallel, self.train_dataset.batch_size
        if rows < dims.dp:
            text = f"{rows} is below the {dims.dp} data-parallel ranks of {self.allocation_mode}: raise it"
            yield "train_dataset.batch_size", text
        profiled = self.perf_tracer.profile_ranks if self.perf_tracer is not None else []
        if absent := [rank for rank in profiled if rank >= dims.world_size]:
            text = f"{absent} are not among the {dims.world_size} trainer ranks, which are counted from 0"
            yield Problem("perf_tracer.profile_ranks", text, "config.out_of_range")
        for key, model in self.models.items():
            if model.router_replay and not (self._wants_servers and self.models["actor"].router_replay):
                yield f"{key}.router_replay", "replays what servers record for actor.router_replay: remove it"
            if self.train_backend == "megatron":
                yield from below(key, model.megatron_problems(dims.pp))
            elif (size := model.fsdp.shard_size) is not None and (sharing := dims.dp * dims.cp) % size:
                works = " or ".join(str(count) for count in range(1, sharing + 1) if sharing % count == 0)
                text = f"{size} does not divide the {sharing} data and context ranks of {dims}: use {works}"
                yield f"{key}.fsdp.shard_size", text


def _servers(*backends: str) -> Condition:
    uses = f"allocation_mode has {' or '.join(backends)} servers"
    return satisfies("/", lambda config: config.server_backend in ("", *backends), uses)


_KL = above("actor.kl_ctl", 0) | above("actor.kl_loss_coef", 0)
_RESETS = given("ref") & _KL


@dataclass(frozen=True, kw_only=True)
class PPOConfig(BaseExperimentConfig):
    """Reinforcement learning of a policy, with a critic (PPO) or without (GRPO)."""

    FOLLOWERS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {f"{name}.temperature": "gconfig.temperature" for name in ("actor", "ref", "teacher")}
    )

    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """Sampling of training answers."""
    eval_gconfig: GenerationHyperparameters | None = option(
        None, relevant=given("valid_dataset"), also="verl: rollout.val_kwargs; AReaL 1.0: eval_gconfig"
    )
    """Sampling of evaluations, with n_samples: 1; null = gconfig with n_samples: 1."""
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """The rollout controller."""
    native: NativeServerConfig = section(NativeServerConfig, relevant=_servers("native"))
    """The native inference servers."""
    sglang: dict[str, Any] = section(dict[str, Any], relevant=_servers("sglang"))
    """Flags of the SGLang servers, under the names that SGLang uses."""
    vllm: dict[str, Any] = section(dict[str, Any], relevant=_servers("vllm"))
    """Flags of the vLLM servers, under the names that vLLM uses."""
    server_defaults: str = choice("server", "server", "areal", relevant=_servers("sglang", "vllm"))
    """Flags of the servers that are not given: server = their defaults, areal = AReaL's (docs/servers.md)."""
    server_python: str = option("", relevant=_servers("sglang", "vllm") & when("rollout.server_addrs", []))
    """Python interpreter of the environment with SGLang or vLLM; empty = the interpreter that runs areal."""
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    """The policy."""
    ref: TrainEngineConfig | None = option(None, relevant=_KL, also="verl: actor_rollout_ref.ref; ROLL: reference")
    """Reference policy of the KL penalty and the KL loss; null = none."""
    ref_reset_steps: int | None = number(None, low=1, relevant=_RESETS, also="cosmos-rl: reference_reset_interval")
    """Reset the reference to the current policy every N train steps; null = never."""
    ref_reset_optimizer: bool = option(
        False, relevant=given("ref_reset_steps"), also="cosmos-rl: reset_optimizer_with_reference"
    )
    """Also clear the moments of the policy's optimiser at each reset; the learning-rate schedule continues."""
    critic: PPOCriticConfig | None = option(None, relevant=REWARDS)
    """Value model; null = none (GRPO)."""
    teacher: TeacherConfig | None = None
    """Frozen model for on-policy distillation: the policy learns from it on its own answers; null = none."""
    reward_model: RewardModelConfig | None = None
    """Frozen model whose score is added to the reward of every answer; null = none."""
    elastic: ElasticConfig = section(ElasticConfig, relevant=when("rollout.server_addrs", []))
    """Adding and removing inference servers by their load."""
    workflow: str = "rlvr"
    """Workflow of a run without a script: rlvr, vision_rlvr, multi_turn, agent, synthetic or module:Class."""
    workflow_args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Additional keyword arguments of the workflow's constructor."""
    agent: AgentConfig = section(AgentConfig, relevant=when("workflow", "agent"))
    """Sessions of agents."""
    reward_fn: str = option("", also="verl: custom_reward_function.path, .name")
    """Reward function of a run without a script: a registered name (gsm8k), module:function or file.py:function."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Several reward functions with weights, and the process pool that runs them."""
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    """What `areal benchmark` measures."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        models = {name: getattr(self, name) for name in ("actor", "critic", "ref", "teacher", "reward_model")}
        return {name: model for name, model in models.items() if model is not None}

    @property
    def reference_is_base(self) -> bool:
        return super().reference_is_base and self.ref_reset_steps is None

    @property
    def publishes_adapters(self) -> bool:
        """Whether the servers get the adapters of actor.lora alone, under a new name for each version."""
        return self.actor.lora is not None and (
            self.actor.adapter_update_mode == "adapter"
            or (self.actor.adapter_update_mode == "auto" and not self.rollout.server_addrs and not self._whole_only)
        )

    @property
    def servers_start_empty(self) -> bool:
        """Whether the trainer makes the first policy, so that the servers wait for its weights."""
        lora = self.actor.lora
        has_adapter = lora is not None and bool(lora.path) and not self.publishes_adapters
        return self.actor.init_from_scratch or has_adapter

    @property
    def _whole_only(self) -> str:
        """Why the servers cannot get adapters alone; empty when they can."""
        if self.server_backend not in ("sglang", "vllm"):
            return f"{self.server_backend or 'no'} servers have no adapters"
        if self.actor.weight_update_mode == "http":
            return "weight_update_mode=http sends whole weights"
        targets = self.actor.lora.target_modules if self.actor.lora is not None else []
        if self.server_backend == "sglang" and "q_proj" in targets and "v_proj" not in targets:
            return "SGLang loads no adapter that has q_proj and lacks v_proj"
        saved = self.actor.lora.modules_to_save if self.actor.lora is not None else []
        return f"servers do not load lora.modules_to_save={saved}" if saved else ""

    @property
    def max_concurrent_rollouts(self) -> int:
        """Maximum episodes in flight."""
        chosen = self.rollout.max_concurrent_rollouts
        return chosen or self.train_dataset.batch_size * (self.rollout.max_head_offpolicyness + 1)

    @property
    def server_backend(self) -> str:
        """Backend of the servers: native, sglang or vllm; empty if allocation_mode has no servers or is invalid."""
        return self._backend(of_servers=True)

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
        if self.reward_model is not None:
            has_functions = bool(self.reward_fn) or self.reward.names_functions
            yield from reward_model_problems(self.actor, self.rollout, has_functions=has_functions)
        if self.workflow == "agent":
            yield from cut_problems(self.actor, has_reward_model=self.reward_model is not None)
        yield from self._attach_problems()
        yield from selection_problems(self.reward, short_form=self.reward_fn)
        if self.actor.adv_estimator == "gdpo":
            yield from score_weight_problems(self.actor.gdpo_weights, self.reward, short_form=self.reward_fn)
        if self.actor.optimizer is None:
            yield no_optimizer("actor")
        if self.actor.adapter_update_mode == "adapter" and self.publishes_adapters and self._whole_only:
            yield "actor.adapter_update_mode", f"adapter cannot work, because {self._whole_only}: use merged"
        if self.critic is not None:
            yield from self._critic_problems(self.critic)
        if self.ref is None and self.actor.kl_loss_coef > 0:
            text = "needs a reference: set ref.path, or remove it"
            yield Problem("actor.kl_loss_coef", text, "config.missing_requirement")
        if self.ref is not None and self.ref.optimizer is not None:
            yield "ref.optimizer", "is set, but a reference is never trained: set it to null"
        if self.ref is not None and self.ref.logprob_kernel == "liger" and self.actor.wants_distributions:
            yield "ref.logprob_kernel", "liger computes log-probabilities only, and a full KL needs more: use torch"

    def _critic_problems(self, critic: PPOCriticConfig) -> Problems:
        if critic.optimizer is None:
            yield no_optimizer("critic")
        if critic.warmup_steps >= (self.total_train_steps or math.inf):
            text = f"{critic.warmup_steps} is not below total_train_steps={self.total_train_steps}: lower it"
            yield "critic.warmup_steps", text
        if self.actor.adv_estimator not in ("gae", "custom"):
            yield "critic", f"would be a second baseline of actor.adv_estimator={self.actor.adv_estimator}: remove it"

    @property
    def _wants_servers(self) -> bool | None:
        return True

    def _must_be_equal(self) -> Problems:
        """Options that AReaL files repeat, and options on which trainer and servers must agree."""
        rows, samples = self.train_dataset.batch_size, self.gconfig.n_samples
        size = self.rollout.consumer_batch_size
        if size not in (None, rows):
            yield _unequal("rollout.consumer_batch_size", size, "train_dataset.batch_size", rows)
        if (limit := self.rollout.queue_size) is not None and limit < rows:
            yield "rollout.queue_size", f"{limit} is below train_dataset.batch_size={rows}: no batch would be complete"
        for name, model in self.models.items():
            ours, sampled = model.temperature, self.gconfig.temperature
            if name in ("actor", "ref", "teacher") and not math.isclose(ours, sampled):
                yield _unequal(f"{name}.temperature", ours, "gconfig.temperature", sampled)
        groups = [("actor.group_size", self.actor.group_size)]
        for path, norm in (("reward_norm", self.actor.reward_norm), ("adv_norm", self.actor.adv_norm)):
            if norm is not None:
                groups.append((f"actor.{path}.group_size", norm.group_size))
        for path, group_size in groups:
            if samples > 1 and group_size not in (1, samples):  # with 1 the workflow decides the size of a group
                yield _unequal(path, group_size, "gconfig.n_samples", samples)

    def _sampling_problems(self) -> Problems:
        samples = self.gconfig.n_samples
        if samples > 1 and self.gconfig.greedy:
            yield "gconfig.greedy", f"gives n_samples={samples} equal answers: set it to false"
        yield from below("actor", filter_problems(self.actor, self.gconfig))
        yield from below("actor", baseline_problems(self.actor, self.gconfig, has_critic=self.critic is not None))
        if self.eval_gconfig is not None and self.eval_gconfig.n_samples != 1:
            text = f"{self.eval_gconfig.n_samples} is not 1: set it to 1 and use evaluator.n_samples"
            yield "eval_gconfig.n_samples", text
        if self.evaluator.n_samples > 1 and (self.eval_gconfig or self.gconfig).greedy:
            yield "evaluator.n_samples", "gives equal answers with greedy decoding: set it to 1, or greedy to false"
        if self.evaluator.sets and self.valid_dataset is None:
            text = "names further sets, which are read as valid_dataset is: set valid_dataset"
            yield Problem("evaluator.sets", text, "config.missing_requirement")

    def _attach_problems(self) -> Problems:
        """The number of running servers must be that of allocation_mode."""
        addresses = self.rollout.server_addrs
        servers = self.allocation.inference if self.server_backend else None
        if addresses and servers is not None and len(addresses) != servers.num_replicas:
            as_many = dataclasses.replace(servers, parallel=dataclasses.replace(servers.parallel, dp=len(addresses)))
            text = f"{len(addresses)} addresses for {servers.num_replicas} servers: write {as_many} in allocation_mode="
            yield "rollout.server_addrs", f"{text}{self.allocation_mode}, or change the addresses"
        if addresses and self.actor.weight_update_mode == "http" and self.server_backend != "native":
            text = f"http needs areal's host process, which {self.server_backend} servers in rollout.server_addrs lack"
            yield "actor.weight_update_mode", f"{text}: use disk"


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PPOConfig):
    """PPOConfig under the name that GRPO users expect."""


def _unequal(path: str, value: object, other: str, expected: object) -> tuple[str, str]:
    return path, f"{value} differs from {other}={expected}: remove it or make them equal"


def completed(cls: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given` with defaults; options that follow another one have its value unless they are given."""
    tree = with_defaults(cls, given)
    followers: Mapping[str, str] = cls.FOLLOWERS if issubclass(cls, BaseExperimentConfig) else {}
    for path, source in followers.items():
        (section, name), (other, key) = path.split("."), source.split(".")
        own, written, leader = tree.get(section), given.get(section), tree.get(other)
        if not isinstance(own, dict) or not isinstance(leader, dict):
            continue
        value: Any = cast("dict[str, Any]", leader).get(key)
        if isinstance(value, str):  # an interpolation; another text is wrong, and reported once
            value = "${" + source + "}" if value.startswith("${") else None
        if value is not None and not (isinstance(written, dict) and name in written):
            cast("dict[str, Any]", own)[name] = value
    return tree
