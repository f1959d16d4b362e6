"""Options of a train engine: model, optimiser, micro-batches, sharding."""

from dataclasses import dataclass, field

from areal.api.config.fields import Problem, Problems, choice, number, option, section
from areal.api.config.lora import LoRAConfig
from areal.api.config.megatron import MegatronEngineConfig
from areal.api.config.relevance import Condition, given, satisfies, when

DEFAULT_TOKENS_PER_MB = 16384
"""Tokens of a forward pass without mb_spec.max_tokens_per_mb; a longer sequence has a pass for itself."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchSpec:
    """How a batch is split into forward passes."""

    n_mbs: int | None = number(1, low=1)
    """Minimum number of micro-batches; null = 1."""
    granularity: int = number(1, low=1)
    """Number of consecutive sequences that stay in one micro-batch (2 for preference pairs)."""
    max_tokens_per_mb: int | None = number(None, low=1, also="verl: actor.ppo_max_token_len_per_gpu")
    """Maximum tokens of one forward pass; null = 16384, or the longest sequence."""
    max_patches_per_mb: int | None = number(None, low=1)
    """Maximum patches of the images of one forward pass, siblings counted separately; null = no limit."""
    n_mbs_divisor: int = number(1, low=1)
    """The number of micro-batches is rounded up to a multiple of this."""


_ADAM, _DECAYS = when("type", "adam", "adam_bf16", "adam_8bit"), when("lr_scheduler_type", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimiser and learning-rate schedule."""

    type: str = choice("adam", "adam", "adam_bf16", "adam_8bit", "sgd")
    """Optimiser: AdamW with moments in float32, bfloat16 or 8 bits, or sgd = gradient descent without momentum."""
    lr: float = number(1e-3, above=0, also="verl: actor.optim.lr; ROLL: training_args.learning_rate")
    """Peak learning rate."""
    lr_of: dict[str, float] = section(dict[str, float], also="cosmos-rl: optm_lr as a list")
    """Peak learning rates of parts: regular expression of weight names -> rate; other weights have lr."""
    weight_decay: float = number(0.01, low=0)
    """Coefficient of decoupled weight decay."""
    beta1: float = number(0.9, low=0, below=1, relevant=_ADAM)
    """Decay rate of the first moment."""
    beta2: float = number(0.999, low=0, below=1, relevant=_ADAM)
    """Decay rate of the second moment."""
    eps: float = number(1e-8, above=0, relevant=_ADAM)
    """Added to the denominator of the update."""
    min_lr_ratio: float = number(0.0, low=0, high=1, relevant=_DECAYS, also="verl: actor.optim.min_lr_ratio")
    """Final learning rate as a fraction of lr."""
    lr_scheduler_type: str = choice("constant", "constant", "linear", "cosine", also="verl: actor.optim.warmup_style")
    """Learning-rate schedule after the warm-up; linear and cosine end at min_lr_ratio x lr."""
    warmup_steps_proportion: float = number(0.001, low=0, high=1, also="verl: actor.optim.lr_warmup_steps_ratio")
    """Fraction of all optimiser steps in which the learning rate increases from 0 to lr."""
    gradient_clipping: float = number(1.0, above=0, also="verl: actor.grad_clip")
    """Maximum global gradient norm."""

    @property
    def state_bytes(self) -> float:
        """Bytes of the optimiser state of a parameter."""
        return {"adam": 8, "adam_bf16": 4, "adam_8bit": 2.25, "sgd": 0}[self.type]


@dataclass(frozen=True, kw_only=True)
class FSDPWrapPolicy:
    """Which modules FSDP shards separately."""

    transformer_layer_cls_to_wrap: list[str] | None = None
    """Class names of the modules; null = the model's own list of blocks."""


@dataclass(frozen=True, kw_only=True)
class FSDPEngineConfig:
    """Options of the FSDP2 engine."""

    wrap_policy: FSDPWrapPolicy | None = None
    """Modules that are sharded separately; null = the model's own list of blocks."""
    offload_params: bool = option(False, also="verl: actor.fsdp_config.param_offload")
    """Keep sharded parameters and optimiser state in CPU memory between uses."""
    offload_optimizer: bool = option(
        False, relevant=when("offload_params", False), also="verl: actor.fsdp_config.optimizer_offload"
    )
    """Keep the optimiser state alone in CPU memory; each weight is updated on the device, one after the other."""
    gradient_sync: str = choice("last", "last", "every")
    """Reduce gradients over ranks after the last micro-batch of a step, or after every: less memory, more traffic."""
    reshard_after_forward: bool = option(True, also="verl: actor.fsdp_config.reshard_after_forward")
    """Free the gathered weights of a block after its forward pass; false gathers them once per micro-batch."""
    prefetch_blocks: int = number(0, low=0, also="verl: actor.fsdp_config.forward_prefetch")
    """Blocks whose weights are gathered ahead of the one that runs; 0 = torch's order, one in the backward pass."""
    shard_size: int | None = number(None, low=1)
    """Ranks that share one copy of the weights (HSDP), a divisor of data x context ranks; null = all."""


def _trained_by(backend: str) -> Condition:
    trains = f"allocation_mode has {backend} trainers"
    return satisfies("/", lambda config: config.train_backend in ("", backend), trains)


_SAME_OUTPUTS = ("path", "temperature", "dtype", "head_dtype", "attn_impl", "logprob_kernel")
"""Options that decide what a frozen model computes."""
NO_ADAPTERS = "adapts language models, and this model has a new head that is trained whole: remove it"


@dataclass(frozen=True, kw_only=True)
class TrainEngineConfig:
    """A model in the trainer."""

    path: str = option("", also="verl: actor_rollout_ref.model.path")
    """Checkpoint folder or Hugging Face hub name of the model."""
    attn_impl: str = choice("auto", "auto", "varlen", "sdpa", "flash_attention_2")
    """Attention: varlen = torch varlen kernel (CUDA), sdpa = one call per sequence; the others choose by device."""
    init_from_scratch: bool = False
    """Initialise random weights from the model config in `path` instead of loading its weights."""
    temperature: float = number(1.0, low=1e-6, high=1e6)
    """Divisor of the logits before log-probabilities; must equal gconfig.temperature, which it follows if not given."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """How batches are split into forward passes."""
    shared_prompts: bool = True
    """On the CPU in float32, compute a prompt once per micro-batch for all its answers; not with experts or dropout."""
    disable_dropout: bool = False
    """Set all dropout probabilities to 0."""
    gradient_checkpointing: bool = option(
        False, relevant=given("optimizer"), also="verl: model.enable_gradient_checkpointing"
    )
    """Recompute activations in the backward pass: less memory, more computation."""
    checkpointing: str = choice("full", "full", "selective", "offload", relevant=when("gradient_checkpointing", True))
    """The forward pass keeps: full = input of a block, selective = also matrix products, offload = input on the CPU."""
    compile: bool = option(False, also="verl: actor.use_torch_compile, which is true by default")
    """Compile each block with torch.compile: some minutes at the start, then faster; needs g++ on the CPU."""
    dtype: str = choice("bfloat16", "bfloat16", "float32")
    """Data type of computation; master weights and optimiser state are float32."""
    head_dtype: str = choice("auto", "auto", "float32", "compute", relevant=when("dtype", "bfloat16"))
    """Data type of logits: compute = that of `dtype`, auto = float32 on CUDA, else compute; as native.head_dtype."""
    logprob_kernel: str = choice("torch", "torch", "liger")
    """Log-probability kernel: torch = blocks of logits, liger = liger-kernel (CUDA only, no entropies)."""
    grad_reduce_dtype: str = choice("float32", "bfloat16", "float32", relevant=given("optimizer"))
    """Data type in which gradients are summed over micro-batches and reduced over ranks."""
    optimizer: OptimizerConfig | None = None
    """Optimiser; null = the model is not trained (a reference)."""
    fsdp: FSDPEngineConfig = section(FSDPEngineConfig, relevant=_trained_by("fsdp"))
    """Options of the FSDP engine."""
    megatron: MegatronEngineConfig = section(MegatronEngineConfig, relevant=_trained_by("megatron"))
    """Options of the Megatron-Core engine."""
    router_replay: bool = option(False, also="verl: actor.router_replay.mode=R3")
    """Models with experts: use the experts that the servers chose for each token, and own router weights for them."""
    router_aux_loss_coef: float = number(
        0.0, low=0, relevant=given("optimizer"), also="ROLL: router_aux_loss_coef; Megatron: moe_aux_loss_coeff"
    )
    """Coefficient of the load-balance loss of models with experts, over all layers and ranks of a micro-batch."""
    router_bias_update_rate: float = number(
        0.0, low=0, relevant=given("optimizer"), also="Megatron: moe_router_bias_update_rate"
    )
    """Change per optimiser step of the router bias of an expert, up below the mean load, down above (DeepSeek-V3)."""
    freeze: list[str] = section(
        list[str], relevant=given("optimizer"), also="verl: freeze_vision_tower; cosmos-rl: freeze_pattern"
    )
    """Regular expressions of the names of weights that are not trained, for example visual."""
    lora: LoRAConfig | None = option(None, also="AReaL: use_lora")
    """Train low-rank adapters of a frozen model; null = train all weights."""

    @property
    def router_option(self) -> str:
        """The first option that needs a model with experts; empty = none is set."""
        names = ("router_replay", "router_aux_loss_coef", "router_bias_update_rate")
        return next((name for name in names if getattr(self, name)), "")

    def is_base_of(self, policy: "TrainEngineConfig") -> bool:
        """Whether this frozen model computes what `policy` computes without its adapters, so that it needs no copy."""
        return policy.lora is not None and all(getattr(self, name) == getattr(policy, name) for name in _SAME_OUTPUTS)

    def megatron_problems(self, num_stages: int) -> Problems:
        """Options that only the FSDP engine has, or only one pipeline stage."""
        if self.router_aux_loss_coef and num_stages > 1:
            text = f"is a loss over all layers, but they are on {num_stages} stages: leave p out"
            yield Problem("router_aux_loss_coef", text, "config.unsupported")
        if self.lora is not None:
            yield Problem("lora", "is not supported by megatron: use fsdp in allocation_mode", "config.unsupported")
        if self.optimizer is not None and (kind := self.optimizer.type) in ("adam_bf16", "adam_8bit"):
            yield Problem("optimizer.type", f"{kind} needs fsdp in allocation_mode: use adam", "config.unsupported")
        if self.optimizer is not None and self.optimizer.type == "sgd" and self.megatron.use_precision_aware_optimizer:
            yield "megatron.use_precision_aware_optimizer", "needs optimizer.type=adam: use false with sgd"
        if self.freeze or (self.optimizer is not None and self.optimizer.lr_of):
            name = "freeze" if self.freeze else "optimizer.lr_of"
            yield Problem(name, "needs fsdp in allocation_mode: remove it", "config.unsupported")
        if self.logprob_kernel != "torch":
            text = f"{self.logprob_kernel} needs fsdp in allocation_mode: use torch"
            yield Problem("logprob_kernel", text, "config.unsupported")
        if self.compile:
            yield Problem("compile", "needs fsdp in allocation_mode: use compile=false", "config.unsupported")
        if self.checkpointing != "full":
            text = f"{self.checkpointing} needs fsdp in allocation_mode: use megatron.recompute_granularity"
            yield Problem("checkpointing", text, "config.unsupported")

    def problems(self) -> Problems:
        if not self.path:
            text = "is required: set a checkpoint folder or a hub model"
            yield Problem("path", text, "config.missing_requirement")
        if self.logprob_kernel == "liger" and self.temperature != 1.0:
            yield "logprob_kernel", f"liger does not support temperature={self.temperature:g}: use torch"
        if self.compile and self.gradient_checkpointing and self.checkpointing == "selective":
            yield "checkpointing", "selective cannot see the operators of a compiled block: use full or compile=false"
        if self.router_bias_update_rate and self.optimizer is None:
            yield "router_bias_update_rate", "is set, but a model without an optimizer is never trained: remove it"
        if self.lora is not None and self.optimizer is None:
            yield "lora", "is set, but a model without an optimizer is never trained: remove it"
        if self.lora is not None and self.init_from_scratch:
            yield "lora", "adapts the weights of a checkpoint, and init_from_scratch=true loads none: remove one"


@dataclass(frozen=True, kw_only=True)
class ScoreModelConfig(TrainEngineConfig):
    """A model with a one-output head, newly initialised when `path` has none."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.temperature != 1.0:
            yield "temperature", "applies to the logits of language models, and this model has none: remove it"
        if self.router_replay:
            yield "router_replay", "replays what the policy chose, and this model is another one: remove it"
        if self.logprob_kernel != "torch":
            yield "logprob_kernel", "applies to language models, and a score has no log-probabilities: remove it"
        if self.lora is not None:
            yield Problem("lora", NO_ADAPTERS, "config.unsupported")


def no_optimizer(model: str) -> Problem:
    """The problem of a trained model without an optimiser."""
    text = "is null, so the model would not be trained: set at least {lr: 1e-5}"
    return Problem(f"{model}.optimizer", text, "config.missing_requirement")
