"""The top level of a configuration: one class per kind of training, and the checks across sections."""

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, cast

from areal.api.allocation import AllocationError, AllocationMode, check_supported
from areal.api.config.algorithm import (
    REWARDS,
    GdpoOptions,
    PPOActorConfig,
    PPOCriticConfig,
    RolloutCorrectionConfig,
    baseline_problems,
)
from areal.api.config.data import TemplateConfig, TrainDatasetConfig, ValidDatasetConfig, VisionConfig, misplaced_data
from areal.api.config.launcher import ClusterSpecConfig, ElasticConfig, LauncherConfig
from areal.api.config.legacy import legacy_rule
from areal.api.config.observe import (
    AlarmsConfig,
    EvaluatorConfig,
    PerfTracerConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
)
from areal.api.config.policy_losses import filter_problems, loss_facts, scale_problems
from areal.api.config.rollout import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    NativeServerConfig,
    RewardConfig,
    score_weight_problems,
    selection_problems,
)
from areal.api.config.schema import (
    Condition,
    Problem,
    Problems,
    above,
    below,
    choice,
    fields_of,
    given,
    number,
    option,
    options_without_effect,
    satisfies,
    section,
    unless,
    when,
)
from areal.api.config.teacher import TeacherConfig
from areal.api.config.train import ScoreModelConfig, TrainEngineConfig, no_optimizer
from areal.api.errors import ConfigError, ConfigProblem

# ----------------------------------------------------------------------------------------------------------------------
# Options of the reward model.


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(ScoreModelConfig):
    """A frozen model with a one-output head that scores whole answers, prompt included."""

    weight: float = number(1.0, above=0)
    """Factor of the score, which is added to the reward of the reward functions."""
    tokenizer_path: str = ""
    """Tokenizer of the reward model: answers are decoded and encoded again; empty = the policy's tokens are used."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.optimizer is not None:
            yield "optimizer", "is set, but this reward model is never trained: set it to null"


def reward_model_problems(actor: PPOActorConfig, rollout: InferenceEngineConfig, *, has_functions: bool) -> Problems:
    """Options that cannot work with a reward model, which scores in the trainer."""
    if rollout.should_accept_fn and not has_functions:
        text = "filters before the reward model scores, and there is no reward function: remove it"
        yield "rollout.should_accept_fn", text
    if actor.base_recipe.baseline == "greedy":
        text = "remax needs the reward of the greedy answer, which the reward model does not score: use another"
        yield "actor.adv_estimator", text
    if actor.base_recipe.baseline == "decoupled":
        yield "actor.adv_estimator", "gdpo reads the reward functions without the reward model: use another"


# ----------------------------------------------------------------------------------------------------------------------
# Options of agents: the sessions in which programs talk to the policy, and how sessions become training samples.

_IN_PROCESSES = when("inline", False)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Sessions of agents (workflow: agent)."""

    cut: str = choice("tree", "tree", "concat", "per_turn")
    """Samples of a session: tree = one per branch, shared tokens trained once; concat = one per branch; per_turn."""
    on_drift: str = choice("fork", "fork", "realign", "reject")
    """A prompt that does not extend its history: fork = a branch; realign = overwrite up to 64 tokens; reject = 400."""
    max_turns: int | None = number(None, low=1)
    """Maximum turns of a session; later ones are refused with 400; null = no limit."""
    max_tokens: int | None = number(None, low=1)
    """Maximum generated tokens of a session; gconfig.max_tokens limits one context; null = no limit."""
    max_seconds: float | None = number(None, above=0)
    """Maximum seconds from the first to the last turn of a session; the turn under way is cut; null = no limit."""
    timeout_s: float = number(600.0, above=0)
    """Maximum seconds of one run of an agent; it is then cancelled, and killed 5 s later."""
    sampling: str = choice("client", "client", "config")
    """Whose temperature, top_p, top_k and penalties count: those of the client's request, or gconfig only."""
    foreign_fields: str = choice("ignore", "ignore", "refuse")
    """Request fields that the policy cannot follow (reasoning_effort, thinking): ignore = one warning each; refuse."""
    tool_parser: str = "auto"
    """Format of tool calls: auto = from the chat template, or the name of a model family (docs/agents.md)."""
    enable_thinking: bool = False
    """Render the chat template with enable_thinking."""
    template_options: dict[str, Any] = section(dict[str, Any])
    """Further variables of the chat template, e.g. {preserve_thinking: true}."""
    turn_discount: float = number(1.0, above=0, high=1)
    """Factor per later turn by which a reward counts for an earlier turn of the session; 1 = all turns alike."""
    missing_reward: str = choice("reject", "reject", "leave_out")
    """A session without a reward: reject = its episode is rejected; leave_out = train on the others."""
    budget_reward: str = choice("keep", "keep", "zero", "none")
    """A session that used its max_turns or tokens: keep = as a finished one; zero; none = as a missing reward."""
    reward_window_s: float = number(0.0, low=0)
    """Seconds that a finished session waits for a reward by POST; 0 = it must come before the agent ends."""
    inline: bool = False
    """Run Python agents on the event loop of the controller; a blocking agent then blocks the run."""
    workers: int | None = number(None, low=1, relevant=_IN_PROCESSES)
    """Worker processes for agents; null = half of the CPU cores, at least one."""
    sessions_per_worker: int = number(64, low=1, relevant=_IN_PROCESSES)
    """Maximum sessions that one worker process runs at the same time; others wait."""
    max_body_mb: int | None = number(None, low=1)
    """Maximum MiB of a request to a session; null = 16, plus 4 for each of vision.max_images with a vision model."""
    host: str = option("")
    """Address that the session server listens on; empty = loopback."""
    port: int = number(0, low=0, high=65535)
    """Port of the session server; 0 = any free one."""


# ----------------------------------------------------------------------------------------------------------------------
# Options of `areal benchmark`, and the rule for the lengths of synthetic answers.

_FORMS = {"": 1, "uniform": 2, "lognormal": 3}
"""Name of a rule -> its numbers."""
_NUMBER = r"[0-9.]+(?:e[0-9]+)?"
_FORM = re.compile(rf"(?:(uniform|lognormal)\()?({_NUMBER}(?:,{_NUMBER})*)(?:\))?")


@dataclass(frozen=True, slots=True)
class LengthRule:
    """How long the answers of a benchmark are: N, uniform(low,high) or lognormal(median,sigma,high), in tokens."""

    form: str
    """Empty = always the first number."""
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "LengthRule":
        """Raises ValueError for anything else than the three forms with sensible numbers."""
        match = _FORM.fullmatch(text.replace(" ", ""))
        if match is None or bool(match[1]) != text.rstrip().endswith(")"):
            raise ValueError(text)
        form, numbers = match[1] or "", tuple(float(number) for number in match[2].split(","))
        sizes = numbers[::2] if form == "lognormal" else numbers  # without sigma
        if len(numbers) != _FORMS[form] or not 1 <= sizes[0] <= sizes[-1] < math.inf:
            raise ValueError(text)
        return cls(form, numbers)

    @property
    def longest(self) -> int:
        return int(self.numbers[-1])

    def draw(self, rng: random.Random) -> int:
        """A length from 1 to `longest`. A lognormal one above it is cut."""
        match self.form, self.numbers:
            case "uniform", (low, high):
                return rng.randint(math.ceil(low), int(high))
            case "lognormal", (median, sigma, high):
                return max(1, min(int(high), round(rng.lognormvariate(math.log(median), sigma))))
            case _:
                return self.longest


_SYNTHETIC = unless("length", "")


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """What `areal benchmark` measures. A normal run ignores this section."""

    warmup_steps: int = number(3, low=1)
    """Train steps before the measurement starts."""
    steps: int = number(10, low=1)
    """Train steps that are measured."""
    repeats: int = number(1, low=1)
    """Runs of each configuration."""
    length: str = ""
    """Tokens of synthetic answers: N, uniform(low,high) or lognormal(median,sigma,high); empty = the run's dataset."""
    prompt_length: int = number(64, low=1, relevant=_SYNTHETIC)
    """Tokens of a synthetic prompt."""
    dollars_per_gpu_hour: float | None = number(None, above=0)
    """Price of one GPU for one hour, in dollars; null = costs are not computed."""
    peak_tflops: float | None = number(None, above=0)
    """Peak dense TFLOP/s of one GPU in the dtype of the training, for the MFU; null = known for common cards."""

    def problems(self) -> Problems:
        try:
            if self.length:
                LengthRule.parse(self.length)
        except ValueError:
            text = f"{self.length!r} is not a length: use N, uniform(low,high) or lognormal(median,sigma,high)"
            yield Problem("length", text, "config.not_a_choice")


def sweep_words(word: str) -> list[str]:
    """The overrides key=value of a word key=value,value of --sweep. Commas inside brackets do not separate values.

    Raises ConfigError when there is no key, or an empty value.
    """
    key, equals, rest = word.partition("=")
    values, depth = [""], 0
    for letter in rest:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            values.append("")
        else:
            values[-1] += letter
    if not (key and equals and all(values)):
        raise ConfigError(f"--sweep {word}: write KEY=VALUE,VALUE,...", code="config.bad_override")
    return [f"{key}={value}" for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Runs of one configuration with every combination of some options."""

    words: tuple[str, ...]
    """The words of the command line that are not about the sweep."""
    overrides: tuple[tuple[str, ...], ...]
    """Options of each run as key=value; empty = no sweep."""
    parallel: int
    """Maximum number of runs at a time; 0 = not given."""

    def run_words(self, trial: str) -> list[list[str]]:
        """The command line of each run. `trial`: the name that theirs extend."""
        return [[*self.words, *words, f"trial_name={trial}_{index}"] for index, words in enumerate(self.overrides)]


def read_sweep(words: Sequence[str]) -> Sweep:
    """Separate `--sweep KEY=VALUE,VALUE...` and `--parallel N` from the other words. ConfigError when one is wrong."""
    kept: list[str] = []
    axes: list[list[str]] = []
    parallel, rest = 0, iter(words)
    for word in rest:
        if word == "--sweep":
            axes.append(sweep_words(next(rest, "")))
        elif word == "--parallel":
            text = next(rest, "")
            if not text.isdecimal() or int(text) < 1:
                raise ConfigError(f"--parallel {text}: give a number of runs", code="config.bad_override")
            parallel = int(text)
        else:
            kept.append(word)
    if parallel and not axes:
        raise ConfigError("--parallel is about the runs of --sweep KEY=VALUE,VALUE", code="config.bad_override")
    overrides = tuple(itertools.product(*axes)) if axes else ()
    return Sweep(words=tuple(kept), overrides=overrides, parallel=parallel)


# ----------------------------------------------------------------------------------------------------------------------
# Options whose update would depend on how the sessions of agents are cut into rows (workflow: agent).

CODE = "agent.cut_not_invariant"
_OF_ROWS = "a session may be cut into several rows, which are computed separately"


def cut_problems(actor: PPOActorConfig, *, has_reward_model: bool) -> Problems:
    """The options that read a row as a whole in the loss, each with the reason. Paths from the root."""
    for path, text in _row_options(actor):
        yield Problem(f"actor.{path}", text, CODE)
    if has_reward_model:
        yield Problem("reward_model", f"would score each row, and {_OF_ROWS}: use a reward function", CODE)


def _row_options(actor: PPOActorConfig) -> Iterator[tuple[str, str]]:
    loss, facts = actor.policy_loss, loss_facts(actor.policy_loss)
    if facts.is_of_sequence:
        yield "policy_loss", f"{loss} takes one ratio of a whole answer, and {_OF_ROWS}: use a loss per token, e.g. ppo"
    elif actor.importance_sampling_level == "sequence" and facts.takes_sequence_ratio:
        yield "importance_sampling_level", f"sequence takes one ratio of a whole answer, and {_OF_ROWS}: use token"
    if facts.sums_over_answer(loss):
        yield "policy_loss.ratio", f"trajectory takes one ratio of a whole answer, and {_OF_ROWS}: use token"
    if actor.shared_prefix_min_tokens is not None:
        text = "compares the rows of a group, and rows of one session share prefixes: remove it"
        yield "shared_prefix_min_tokens", text
    if actor.pf_ppo is not None:
        yield "pf_ppo", f"would draw rows, and {_OF_ROWS}: remove it"
    correction, around_prox = actor.rollout_correction, actor.use_decoupled_loss or actor.recompute_logprob
    is_late = correction is not None and correction.numerator == "training"
    if correction is not None and (is_late or (actor.prox_logp_method == "loglinear" and around_prox)):
        yield from _late_options(correction)


def _late_options(correction: RolloutCorrectionConfig) -> Iterator[tuple[str, str]]:
    """Units above the token in a correction that is computed during the update; before it, sessions are whole."""
    advice = "use prox_logp_method=recompute and numerator=old, or level token"
    why = f"is computed during the update, where {_OF_ROWS}"
    if correction.mode != "off" and correction.level != "token":
        yield "rollout_correction.level", f"{correction.level} {why}: {advice}"
    if correction.veto_threshold is not None:
        yield "rollout_correction.veto_threshold", f"{why}: {advice.partition(',')[0]}, or remove it"
    for index, rule in enumerate(correction.rules):
        if rule.level != "token":
            yield f"rollout_correction.rules[{index}].level", f"{rule.level} {why}: {advice}"


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
            return next((part.backend for part in self.allocation.allocations if part.is_inference == of_servers), "")
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
        for key, model in self.models.items():
            if not model.path:
                text = "is required: set a checkpoint folder or a hub model"
                yield Problem(f"{key}.path", text, "config.missing_requirement")
        if self.strict_config:
            for unused in options_without_effect(self):
                text = f"has an effect only when {unused.sentence}: remove it"
                yield Problem(unused.path, text, "config.no_effect")
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
            if model.shared_prefixes == "tree" and dims.cp > 1:
                yield (
                    f"{key}.shared_prefixes",
                    f"tree does not work with the context ranks of {dims}: use d instead of c",
                )
            if self.train_backend == "megatron":
                yield from below(key, model.megatron_problems(dims.pp))
            elif (size := model.fsdp.shard_size) is not None and (sharing := dims.dp * dims.cp) % size:
                works = " or ".join(str(count) for count in range(1, sharing + 1) if sharing % count == 0)
                text = f"{size} does not divide the {sharing} data and context ranks of {dims}: use {works}"
                yield f"{key}.fsdp.shard_size", text


SERVER_SECTIONS = ("native", "sglang", "vllm", "server_flags_of", "server_defaults", "server_python")
"""The options of servers."""


def _servers(*backends: str) -> Condition:
    uses = f"allocation_mode has {' or '.join(backends)} servers"
    return satisfies("/", lambda config: config.server_backend in ("", *backends), uses)


KL_WITH_REFERENCE = 0.1
_8_BITS = ("int8", "fp8", "mxfp8", "w8a8_", "modelopt_fp8")  # Beginnings of formats.
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
    server_flags_of: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Flags of the servers of backends that other packages register: name of the backend -> flags."""
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
    """Clear the moments of the policy's optimiser at each reset; the learning-rate schedule continues."""
    critic: PPOCriticConfig | None = option(None, relevant=REWARDS)
    """Value model; null = none (GRPO)."""
    teacher: TeacherConfig | None = None
    """Model for on-policy distillation: the policy learns from it on its own answers; null = none."""
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
        if self.teacher is not None and self.teacher.servers:
            del models["teacher"]
        return {name: model for name, model in models.items() if model is not None}

    @property
    def reference_is_base(self) -> bool:
        return super().reference_is_base and self.ref_reset_steps is None

    @property
    def publishes_adapters(self) -> bool:
        """Whether the servers get the adapters of actor.lora alone, in a new folder for each version.

        For native servers the launcher decides what auto means: `areal.launcher.job.with_adapters`.
        """
        is_automatic = not self.rollout.server_addrs and not self._whole_only and self.server_backend != "native"
        mode = self.actor.adapter_update_mode
        return self.actor.lora is not None and (mode == "adapter" or (mode == "auto" and is_automatic))

    @property
    def evaluates_in_background(self) -> bool:
        """Whether training continues during an evaluation: see `evaluator.mode`."""
        if self.evaluator.mode == "auto":
            return self._can_spare_a_server and not self.evaluator.stop_at
        return self.evaluator.mode == "background"

    @property
    def _can_spare_a_server(self) -> bool:
        return bool(self.server_backend and self.allocation.inference and self.allocation.inference.num_replicas > 1)

    @property
    def served_dtype(self) -> str:
        """The type of the servers, where it bounds how much equal weights may differ; float8, int4 = quantized."""
        if (bits := self.served_bits) is not None:
            return "float8" if bits == 8 else "int4"
        return self.native.compute_dtype if self.server_backend == "native" else "bfloat16"

    @property
    def served_bits(self) -> int | None:
        """Bits of a weight that the servers quantize, 4 for a format that is not listed; None: they do not."""
        kind = self.served_quantization.rpartition("=")[2]
        return None if not kind else 8 if kind.startswith(_8_BITS) else 4

    @property
    def served_quantization(self) -> str:
        """How the servers quantize weights, as KEY=VALUE; empty: they do not."""
        kind = self.native.quantization if self.server_backend == "native" else self.server_flags.get("quantization")
        return f"{self.server_backend}.quantization={kind}" if kind not in (None, "", "none") else ""

    @property
    def servers_start_empty(self) -> bool:
        """Whether the trainer makes the first policy, so that the servers wait for its weights."""
        lora = self.actor.lora
        has_adapter = lora is not None and bool(lora.path) and not self.publishes_adapters
        return self.actor.init_from_scratch or has_adapter

    @property
    def _whole_only(self) -> str:
        """Why the servers cannot get adapters alone; empty when they can."""
        if self.server_backend not in ("native", "sglang", "vllm"):
            return f"{self.server_backend or 'no'} servers have no adapters"
        if self.actor.weight_update_mode == "http":
            return "weight_update_mode=http sends whole weights"
        if self.server_backend == "native":
            return "actor.init_from_scratch has no checkpoint to adapt" if self.actor.init_from_scratch else ""
        targets = self.actor.lora.target_modules if self.actor.lora is not None else []
        if self.server_backend == "sglang" and "q_proj" in targets and "v_proj" not in targets:
            return "SGLang loads no adapter that has q_proj and lacks v_proj"
        saved = self.actor.lora.modules_to_save if self.actor.lora is not None else []
        return f"servers do not load lora.modules_to_save={saved}" if saved else ""

    @property
    def how_to_publish_adapters(self) -> str:
        if self.actor.lora is not None and self._whole_only:
            return f"not here, because {self._whole_only}"
        return "set actor.lora and actor.adapter_update_mode=adapter"

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
        section = self.server_section(self.server_backend)
        return cast("dict[str, Any]", section) if isinstance(section, dict) else {}

    def server_section(self, backend: str) -> Any:
        """The section of a backend; that of one which another package registers is in `server_flags_of`."""
        return vars(self)[backend] if backend in vars(self) else self.server_flags_of.get(backend, {})

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
        if self.teacher is not None:
            yield from below("teacher", self._teacher_problems(self.teacher))
        yield from selection_problems(self.reward, short_form=self.reward_fn)
        if isinstance(self.actor.adv_estimator, GdpoOptions):
            yield from score_weight_problems(self.actor.adv_estimator.weights, self.reward, short_form=self.reward_fn)
        if self.actor.optimizer is None:
            yield no_optimizer("actor")
        opponent = cast("dict[str, Any]", self.workflow_args.get("args") or {}).get("opponent")
        is_whole = self.actor.lora is None or self.actor.adapter_update_mode == "merged" or bool(self._whole_only)
        if self.workflow == "textarena" and isinstance(opponent, dict) and is_whole:
            text = f"is an older policy, which the servers hold as an adapter: {self.how_to_publish_adapters}"
            yield Problem("workflow_args.args.opponent", text, "config.missing_requirement")
        if self.actor.adapter_update_mode == "adapter" and self.publishes_adapters and self._whole_only:
            yield "actor.adapter_update_mode", f"adapter cannot work, because {self._whole_only}: use merged"
        if self.critic is not None:
            yield from self._critic_problems(self.critic)
        if self.ref is None:
            for name in ("kl_ctl", "kl_loss_coef"):
                if getattr(self.actor, name) > 0:
                    text = "needs a reference: set ref.path, or remove it"
                    yield Problem(f"actor.{name}", text, "config.missing_requirement")
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
        if not self.actor.base_recipe.takes_critic:
            yield "critic", f"would be a second baseline of actor.adv_estimator={self.actor.adv_estimator}: remove it"

    def _teacher_problems(self, teacher: TeacherConfig) -> Problems:
        if teacher.average_decay is not None and teacher.path and teacher.path != self.actor.path:
            yield "path", f"{teacher.path} is not actor.path, and average_decay averages the policy: make them equal"
        if teacher.servers and not math.isclose(self.gconfig.temperature, 1.0):
            yield "servers", f"score at temperature 1, and gconfig.temperature={self.gconfig.temperature}: set it to 1"
        if teacher.servers and self.gconfig.temperature_key:
            yield "servers", "score at temperature 1, and rows have other ones: remove gconfig.temperature_key"
        if teacher.top_k and "full" in (self.actor.kl_estimator, self.actor.kl_loss_estimator):
            yield "top_k", "and the full KL of the reference choose other tokens: use another actor.kl_*estimator"

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
        target = self.rollout.target_staleness
        if target.mean is not None and target.mean * rows < 1:
            text = f"{target.mean:g} is less than one episode of train_dataset.batch_size={rows}, as synchronous RL has"
            yield "rollout.target_staleness.mean", f"{text}: raise it, or use max_head_offpolicyness=0 without it"
        if target.ess is not None and not self.actor.needs_prox_logprobs:
            text = "needs the importance weights before the update: set actor.use_decoupled_loss=true and"
            text = f"{text} prox_logp_method=recompute, or use mean"
            yield Problem("rollout.target_staleness.ess", text, "config.missing_requirement")
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
        if self.evaluator.mode == "background" and not self._can_spare_a_server:
            text = "keeps one server for an evaluation, and allocation_mode has no second one: use blocking"
            yield Problem("evaluator.mode", text, "config.missing_requirement")
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
        mode, backend, actor = self.actor.weight_update_mode, self.server_backend, self.actor
        if addresses and backend not in ("", "native") and (actor.pulls_weights or actor.sends_deltas):
            text = f"{mode} needs areal's host process, which attached {backend} servers lack: use disk"
            yield "actor.weight_update_mode", text


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PPOConfig):
    """PPOConfig under the name that GRPO users expect."""


def _unequal(path: str, value: object, other: str, expected: object) -> tuple[str, str]:
    return path, f"{value} differs from {other}={expected}: remove it or make them equal"


def with_followers(cls: type[Any], tree: dict[str, Any]) -> dict[str, Any]:
    """`tree`, in which options that follow another one have its value unless they are given.

    With a reference, actor.kl_ctl is KL_WITH_REFERENCE unless it is given.
    """
    actor = tree.get("actor")
    if issubclass(cls, PPOConfig) and tree.get("ref") is not None and isinstance(actor, dict):
        tree = tree | {"actor": {"kl_ctl": KL_WITH_REFERENCE, **actor}}
    followers: Mapping[str, str] = cls.FOLLOWERS if issubclass(cls, BaseExperimentConfig) else {}
    for path, source in followers.items():
        (section, name), (other, key) = path.split("."), source.split(".")
        spec, leader = fields_of(cls).get(section), tree.get(other)
        written = tree.get(section, None if spec is None or spec.nullable else {})
        if not isinstance(written, dict) or name in written or not isinstance(leader, dict):
            continue
        value: Any = cast("dict[str, Any]", leader).get(key)
        if isinstance(value, str):  # an interpolation; another text is wrong, and reported once
            value = "${" + source + "}" if value.startswith("${") else None
        if value is not None:
            tree = tree | {section: {**written, name: value}}
    return tree


# ----------------------------------------------------------------------------------------------------------------------
# Options of training on rows, without rollouts: supervised fine-tuning, reward models, DPO.


@dataclass(frozen=True, kw_only=True)
class RowsExperimentConfig(BaseExperimentConfig):
    """What all trainings on rows share: there are no servers, and an evaluation is a forward pass."""

    row_type: ClassVar[str]
    """Required value of train_dataset.type and valid_dataset.type."""
    sequences_per_row: ClassVar[int] = 1
    """Sequences per row, as total_train_n_seqs counts them: 2 for pairs."""

    def problems(self) -> Problems:
        yield from super().problems()
        yield from misplaced_data(self.row_type, self.train_dataset, self.valid_dataset)

    @property
    def _wants_servers(self) -> bool | None:
        return False


@dataclass(frozen=True, kw_only=True)
class SFTOptions:
    """Which tokens of a row are trained on, and how token losses become one loss."""

    train_on: str = choice("last", "last", "assistant", "all")
    """Trained tokens: last = the last answer, assistant = every answer in `messages`, all = prompt and answers."""
    loss_aggregation: str = choice(
        "token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    )
    """How the token losses of a batch over all ranks become one number; see docs/algorithms.md."""
    loss_scale_tokens: int | None = number(None, low=1, relevant=when("loss_aggregation", "seq-mean-token-sum-norm"))
    """Divisor in tokens, required by seq-mean-token-sum-norm; null = not set."""

    def problems(self) -> Problems:
        yield from scale_problems(self.loss_aggregation, self.loss_scale_tokens)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RowsExperimentConfig):
    """Supervised fine-tuning."""

    row_type: ClassVar[str] = "sft"

    model: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """The trained model."""
    sft: SFTOptions = field(default_factory=SFTOptions)
    """Trained tokens and loss."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        return {"model": self.model}

    def problems(self) -> Problems:
        yield from super().problems()
        if self.model.optimizer is None:
            yield no_optimizer("model")


@dataclass(frozen=True, kw_only=True)
class RWOptions:
    """The loss of a reward model."""

    use_margin: bool = False
    """Require a score difference above the value in the column `margin`; false = ignore that column."""
    center_coef: float = number(0.0, low=0)
    """Coefficient of (score of chosen + score of rejected)^2, which keeps scores near 0; 0 = off."""


@dataclass(frozen=True, kw_only=True)
class RWConfig(RowsExperimentConfig):
    """A reward model, trained on pairs of a chosen and a rejected answer (Bradley-Terry)."""

    row_type: ClassVar[str] = "rw"
    sequences_per_row: ClassVar[int] = 2

    model: ScoreModelConfig = field(default_factory=ScoreModelConfig)
    """The reward model."""
    rw: RWOptions = field(default_factory=RWOptions)
    """Loss of the reward model."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        return {"model": self.model}

    def problems(self) -> Problems:
        yield from super().problems()
        yield from _cut_pairs("model", self.model)
        if self.model.optimizer is None:
            yield no_optimizer("model")


@dataclass(frozen=True, kw_only=True)
class DPOOptions:
    """The loss of direct preference optimisation."""

    loss_type: str = choice("sigmoid", "sigmoid", "ipo")
    """Loss function: sigmoid = DPO (Rafailov et al. 2023), ipo = IPO (Azar et al. 2023)."""
    beta: float = number(0.1, above=0)
    """Strength of the constraint to the reference: a higher value keeps the policy closer."""
    label_smoothing: float = number(0.0, low=0, below=0.5, relevant=when("loss_type", "sigmoid"))
    """Assumed fraction of pairs with swapped labels (conservative DPO)."""
    logp_reduction: str = choice("sum", "sum", "mean")
    """Log-probability of an answer: sum over its tokens (both papers) or mean (IPO in AReaL and TRL)."""
    nll_coef: float = number(0.0, low=0)
    """Coefficient of -log p per token of the chosen answer, added to the loss of its pair; 0 = off."""
    reference_free: bool = False
    """Use a uniform reference, whose log-probabilities cancel, instead of the model in `ref`."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig(RowsExperimentConfig):
    """A policy, trained on pairs of a chosen and a rejected answer relative to a frozen reference."""

    row_type: ClassVar[str] = "rw"
    sequences_per_row: ClassVar[int] = 2

    actor: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """The policy."""
    ref: TrainEngineConfig | None = option(None, relevant=when("dpo.reference_free", False))
    """The frozen reference, usually with path: ${actor.path}; null only with dpo.reference_free=true."""
    dpo: DPOOptions = field(default_factory=DPOOptions)
    """The loss."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        return {"actor": self.actor} if self.ref is None else {"actor": self.actor, "ref": self.ref}

    def problems(self) -> Problems:
        yield from super().problems()
        yield from _cut_pairs("actor", self.actor)
        if self.actor.optimizer is None:
            yield no_optimizer("actor")
        if self.dpo.reference_free:
            return
        if self.ref is None:
            text = "is null: set ref.path=${actor.path}, or dpo.reference_free=true"
            yield Problem("ref", text, "config.missing_requirement")
            return
        if self.ref.optimizer is not None:
            yield "ref.optimizer", "is set, but a reference is never trained: set it to null"
        if not math.isclose(self.ref.temperature, self.actor.temperature):
            text = f"{self.ref.temperature} differs from actor.temperature={self.actor.temperature}: make them equal"
            yield "ref.temperature", text
        yield from _cut_pairs("ref", self.ref)


def _cut_pairs(path: str, model: TrainEngineConfig) -> Problems:
    if model.mb_spec.granularity not in (1, 2):
        yield f"{path}.mb_spec.granularity", "is always 2 here, because a pair is never split: remove it"


# ----------------------------------------------------------------------------------------------------------------------
# The kind of training that a configuration file is for, which its sections decide.

Kind = type[BaseExperimentConfig]

KINDS: dict[Kind, str] = {
    GRPOConfig: "reinforcement learning (PPO, GRPO)",
    SFTConfig: "supervised fine-tuning",
    RWConfig: "a reward model",
    DPOConfig: "DPO",
}
"""Every kind that runs without a script, in words. The first one is the default where no section decides."""


def kind_of(tree: Mapping[str, Any], *, allow_unknown: bool = False) -> Kind:
    """The class of the top-level keys of `tree`. ConfigError when they belong to several kinds.

    `model` alone is a reward model with train_dataset.type=rw, else SFT; `actor` alone is DPO with it, else GRPO.
    `allow_unknown`: a script may define keys too, so the kind with most of the keys is chosen.
    """
    takers = {key: set(_takers(key)) for key in tree}
    telling = {key: kinds for key, kinds in takers.items() if kinds and len(kinds) < len(KINDS)}
    possible = [kind for kind in KINDS if all(kind in kinds for kinds in telling.values())]
    if not possible and allow_unknown:
        return max(KINDS, key=lambda kind: sum(kind in kinds for kinds in telling.values()))
    if not possible:
        problems = [
            ConfigProblem(key, " or ".join(KINDS[kind] for kind in _takers(key)), "config.mixed_kinds")
            for key in sorted(telling)
        ]
        lines = ["sections of different kinds of training: keep those of one kind:", *map(str, problems)]
        raise ConfigError("\n  ".join(lines), problems=problems)
    row_type = _row_type(tree)
    named = [kind for kind in possible if _row_type_of(kind) == row_type]
    return named[0] if named else possible[0]


def kind_of_section(path: str) -> Kind:
    """The first kind that has the dotted option `path`; GRPO when none has."""
    return next(iter(_takers(path.split(".")[0])), GRPOConfig)


def sections() -> list[str]:
    """The sections of all kinds."""
    return list(dict.fromkeys(name for kind in KINDS for name, spec in fields_of(kind).items() if spec.is_section))


def _takers(key: str) -> list[Kind]:
    """The kinds that read a top-level key or accept it from a file of AReaL."""
    return [kind for kind in KINDS if key in fields_of(kind) or legacy_rule(kind, key, "") is not None]


def _row_type_of(kind: Kind) -> str:
    return kind.row_type if issubclass(kind, SFTConfig | RWConfig | DPOConfig) else "rl"


def _row_type(tree: Mapping[str, Any]) -> str:
    data = tree.get("train_dataset")
    return str(cast("dict[str, Any]", data).get("type", "")) if isinstance(data, dict) else ""
