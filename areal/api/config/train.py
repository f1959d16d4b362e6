"""Options of a train engine: model, optimiser, micro-batches, sharding."""

import re
from dataclasses import dataclass, field

from areal.api.config.schema import (
    Condition,
    Problem,
    Problems,
    choice,
    choice_of,
    given,
    number,
    option,
    satisfies,
    section,
    unless,
    when,
)
from areal.api.registry import registered

# ----------------------------------------------------------------------------------------------------------------------
# Options of LoRA adapters, under the names of peft.

ALL_LINEAR, OUTPUT_HEAD = "all-linear", "output-head"


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters of a frozen base model; peft's LoraConfig."""

    rank: int = number(32, low=1, also="peft: r; AReaL: lora_rank; verl: model.lora_rank")
    """Rank of the adapters."""
    alpha: float = number(16.0, above=0, also="peft: lora_alpha; AReaL: lora_alpha; verl: model.lora_alpha")
    """The product of the adapter is multiplied by alpha / rank."""
    rslora: bool = option(False, also="peft: use_rslora")
    """Scale adapters by alpha / sqrt(rank), not alpha / rank."""
    dropout: float = number(0.0, low=0, below=1, also="peft: lora_dropout")
    """Dropout probability of the adapters' input while training."""
    target_modules: str | list[str] = option(ALL_LINEAR)
    """Modules with adapters, never experts: all-linear (no routers), names (also output-head), or a pattern."""
    exclude_modules: str | list[str] = section(list[str], also="verl: model.exclude_modules")
    """Modules without adapters among those of target_modules: a list of names, or a regular expression."""
    init: str = choice("default", "default", "gaussian", "pissa", "olora", also="peft: init_lora_weights")
    """Initial adapters: default = uniform A, gaussian = normal A, both with B = 0; pissa, olora = from the weights."""
    modules_to_save: list[str] = field(default_factory=list[str])
    """Names of modules that are trained whole, for example lm_head."""
    path: str = ""
    """Folder of an adapter in the format of peft to continue from; empty = new adapters."""

    @property
    def scale(self) -> float:
        """The factor of B @ A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def served_rank(self) -> int:
        """Rank of the adapters that servers get: twice the rank where the initial adapters are subtracted."""
        return self.rank * (2 if self.init in ("pissa", "olora") else 1)

    def problems(self) -> Problems:
        targets = self.target_modules
        if not targets:
            yield Problem("target_modules", "names no module: use all-linear", "config.missing_requirement")
        for key, patterns in (("target_modules", targets), ("exclude_modules", self.exclude_modules)):
            if isinstance(patterns, str) and patterns != ALL_LINEAR:
                try:
                    re.compile(patterns)
                except re.error as error:
                    yield key, f"{patterns!r} is no regular expression: {error}"


def is_target(name: str, targets: str | list[str]) -> bool:
    """Whether `targets`, which are not all-linear, choose the module `name`, as in peft."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


# ----------------------------------------------------------------------------------------------------------------------
# Options of the Megatron-Core train engine.

_OVERLAPS = "overlap_param_gather"
MAX_BFLOAT16_BETA = 0.99
"""The largest decay rate of a moment that is rounded to nearest in bfloat16: numbers there are 0.4% to 0.8% apart, and
a step of 0.1%, that of 0.999, is lost."""
_DTYPES = ("float32", "bfloat16", "float16", "fp8")
_WITH_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "mla_up_proj")
"""Parts whose outputs are freed before they are recomputed."""
_RECOMPUTED = ("core_attn", "mlp", "moe", "shared_experts", *_WITH_TRANSFORMER_ENGINE)
_PRECISION = when("use_precision_aware_optimizer", True)
_RECOMPUTES = when("../gradient_checkpointing", True)
_WHOLE_LAYERS = _RECOMPUTES & when("recompute_granularity", "full")


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """Megatron's data parallelism: how gradients and weights travel between data ranks."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in float32; false, or grad_reduce_dtype=bfloat16: in the type of the weights."""
    overlap_grad_reduce: bool = False
    """Reduce gradients in buckets during the backward pass."""
    overlap_param_gather: bool = option(
        False, relevant=when("use_distributed_optimizer", True) & unless("../../optimizer.type", "sgd")
    )
    """Gather updated weights in buckets during the next forward pass."""
    align_param_gather: bool = option(False, relevant=when(_OVERLAPS, True))
    """All pipeline stages start their gathers together."""
    use_distributed_optimizer: bool = True
    """Split the optimiser state over the data and context ranks."""
    check_for_nan_in_grad: bool = False
    """Check the gradients of each data rank before they are reduced."""
    bucket_size: int | None = number(None, low=1, relevant=when("overlap_grad_reduce", True))
    """Elements of a bucket; null = 40 million, more with over 40 data ranks."""
    average_in_collective: bool = False
    """The collective averages gradients, in place of a sum of scaled gradients."""
    fp8_param_gather: bool = option(False, relevant=unless("../fp8", None))
    """Keep and gather weights in 8 bits (needs Transformer Engine)."""

    def problems(self) -> Problems:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            text = "needs overlap_grad_reduce=true: the buckets are the same"
            yield Problem("overlap_param_gather", text, "config.missing_requirement")


@dataclass(frozen=True, kw_only=True)
class MegatronEngineConfig:
    """Options of the Megatron-Core engine, for `megatron:` in allocation_mode."""

    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    """Options of Megatron's data parallelism."""
    virtual_pipeline_parallel_size: int = number(1, low=1)
    """Parts of the layers on each pipeline stage (interleaved schedule); needs p of at least 2."""
    use_deterministic_algorithms: bool = False
    """Use kernels with equal results in each run, in all models; slower on a GPU, an error where torch has none."""
    recompute_granularity: str | None = choice("full", "full", "selective", relevant=_RECOMPUTES)
    """Recompute whole layers (full) or parts of them (selective); null = nothing."""
    recompute_method: str | None = choice("uniform", "uniform", "block", relevant=_WHOLE_LAYERS)
    """uniform = units of recompute_num_layers layers, block = the first recompute_num_layers layers of a stage."""
    recompute_num_layers: int | None = number(1, low=1, relevant=_WHOLE_LAYERS)
    """Layers of a unit (uniform) or layers that are recomputed (block)."""
    recompute_modules: list[str] | None = option(
        None, relevant=_RECOMPUTES & when("recompute_granularity", "selective")
    )
    """Recomputed: core_attn (null), mlp, moe, shared_experts; by Transformer Engine layernorm, moe_act, mla_up_proj."""
    distribute_saved_activations: bool | None = option(
        None, relevant=_RECOMPUTES & unless("recompute_granularity", None)
    )
    """Split the saved inputs of layers over tensor ranks; replaces sequence parallelism."""
    moe_token_dispatcher_type: str = choice("alltoall", "alltoall", "allgather", "flex")
    """How tokens reach the ranks of their experts; allgather: each gets all tokens; flex needs the package deep_ep."""
    moe_router_dtype: str | None = choice("fp32", "fp32", "fp64")
    """Data type in which routers compute; null = that of the weights."""
    moe_shared_expert_overlap: bool = option(False, relevant=when("moe_token_dispatcher_type", "alltoall"))
    """Compute shared experts while tokens travel."""
    moe_permute_fusion: bool = False
    """One kernel sorts tokens by expert (needs Transformer Engine)."""
    fp8: str | None = choice(None, "e4m3", "hybrid")
    """Linear layers compute in 8 bits, hybrid: gradients as e5m2 (needs Transformer Engine); null = in dtype."""
    fp8_recipe: str = choice("delayed", "delayed", "tensorwise", "mxfp8", "blockwise", relevant=unless("fp8", None))
    """How numbers of 8 bits are scaled; mxfp8 needs a Blackwell GPU."""
    offload_optimizer: bool = option(False, also="verl: actor.megatron.optimizer_offload")
    """Keep the moments of the optimiser in CPU memory; each weight is updated on the device, one after the other."""
    overlap_param_gather_with_optimizer_step: bool = False
    """Gather the first part of the layers of a stage while the optimiser updates the others."""
    use_precision_aware_optimizer: bool = False
    """Optimiser state in the types below (needs Transformer Engine)."""
    main_grads_dtype: str = choice("float32", "float32", "bfloat16", relevant=_PRECISION)
    """Data type of main gradients."""
    main_params_dtype: str = choice("float32", "float32", "float16", relevant=_PRECISION)
    """Data type of main weights."""
    exp_avg_dtype: str = choice("float32", *_DTYPES, relevant=_PRECISION)
    """Data type of first moments."""
    exp_avg_sq_dtype: str = choice("float32", *_DTYPES, relevant=_PRECISION)
    """Data type of second moments."""

    def problems(self) -> Problems:
        if self.overlap_param_gather_with_optimizer_step and not self.ddp.overlap_param_gather:
            text = "needs ddp.overlap_param_gather=true"
            yield Problem("overlap_param_gather_with_optimizer_step", text, "config.missing_requirement")
        if self.overlap_param_gather_with_optimizer_step and self.virtual_pipeline_parallel_size == 1:
            text = "needs virtual_pipeline_parallel_size of at least 2"
            yield Problem("overlap_param_gather_with_optimizer_step", text, "config.missing_requirement")
        if self.use_precision_aware_optimizer and not self.ddp.use_distributed_optimizer:
            text = "needs ddp.use_distributed_optimizer=true"
            yield Problem("use_precision_aware_optimizer", text, "config.missing_requirement")
        if self.use_precision_aware_optimizer and self.offload_optimizer:
            yield "offload_optimizer", "does not work with use_precision_aware_optimizer=true: use one of them"
        if self.recompute_granularity == "full" and None in (self.recompute_method, self.recompute_num_layers):
            text = "needs recompute_method and recompute_num_layers"
            yield Problem("recompute_granularity", text, "config.missing_requirement")
        for name in self.recompute_modules or ():
            if name not in _RECOMPUTED:
                text = f"{name!r} is not a part of a layer: use {', '.join(_RECOMPUTED)}"
                yield Problem("recompute_modules", text, "config.not_a_choice")
        if self.moe_shared_expert_overlap and "shared_experts" in (self.recompute_modules or ()):
            yield (
                "recompute_modules",
                "shared_experts does not work with moe_shared_expert_overlap=true: use one of them",
            )

    def needing_transformer_engine(self) -> list[str]:
        """The options that are set and that only Transformer Engine implements."""
        recomputed = [name for name in self.recompute_modules or () if name in _WITH_TRANSFORMER_ENGINE]
        wants = {
            f"fp8={self.fp8}": self.fp8 is not None,
            "use_precision_aware_optimizer": self.use_precision_aware_optimizer,
            "ddp.fp8_param_gather": self.ddp.fp8_param_gather,
            "moe_permute_fusion": self.moe_permute_fusion,
            f"recompute_modules={','.join(recomputed)}": bool(recomputed and self.recompute_granularity == "selective"),
        }
        return [name for name, is_set in wants.items() if is_set]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What the checks before a start know of an optimiser."""

    state_bytes: float
    """Bytes of the state of a parameter, at most."""
    has_moments: bool = False
    """Whether it reads beta1, beta2 and eps."""
    has_matrices: bool = False
    """Whether it updates matrices in another way than other weights."""
    rounds_weights: bool = False
    """Whether it updates bfloat16 weights, rounded up or down at random, without a float32 copy of them."""


def _has_moments(name: str) -> bool:
    return registered("optimizers", name, key="optimizer.type").facts.has_moments


_ADAM = satisfies("type", _has_moments, "is an optimiser with moments")
_DECAYS = when("lr_scheduler_type", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimiser and learning-rate schedule."""

    type: str = choice_of("optimizers", "adam")
    """Optimiser: AdamW with moments in float32, bfloat16 or 8 bits, Muon with AdamW for what is no matrix, or sgd."""
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
        return registered("optimizers", self.type, key="optimizer.type").facts.state_bytes


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


NO_RECIPES = {
    "delayed": "torchao 0.18 has dynamic scaling only: use tensorwise or rowwise",
    **dict.fromkeys(
        ("nvfp4", "mxfp4"),
        "training in 4 bits needs a Blackwell GPU (B200: compute capability 10.0) and a torchao that trains in FP4, "
        "which 0.18 does not: use rowwise",
    ),
}
"""Recipes that torchao does not train with -> why, and what to use."""
FLOAT8_MULTIPLE = 16
"""Both sizes of a matrix that torch multiplies in 8 bits are multiples of it."""
_RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """Linear layers compute in 8 bits, by torchao with dynamic scaling; weights, gradients and optimiser do not."""

    recipe: str = option("rowwise", also="cosmos-rl: fp8.quant_recipe, fp8.fp8_recipe, fp4.quant_recipe")
    """Scale of each row, each row but weight gradients in dtype (rowwise_with_gw_hp), or each tensor (tensorwise)."""
    filter_fqns: list[str] = section(list[str], also="torchtitan: filter_fqns")
    """Parts of the names of linear layers that stay in dtype, as do heads, routers, experts and vision towers."""

    def problems(self) -> Problems:
        if self.recipe not in _RECIPES:
            default = f"is not one of {', '.join(_RECIPES)}"
            yield Problem("recipe", f"{self.recipe}: {NO_RECIPES.get(self.recipe, default)}", "config.not_a_choice")


def _trained_by(backend: str) -> Condition:
    trains = f"allocation_mode has {backend} trainers"
    return satisfies("/", lambda config: config.train_backend in ("", backend), trains)


_SAME_OUTPUTS = ("path", "temperature", "compute_dtype", "head_dtype", "attn_impl", "logprob_kernel", "fp8")
"""What decides the outputs of a frozen model."""
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
    shared_prefixes: str = choice("auto", "auto", "tree", "off", also="AReaL: enable_tree_training")
    """Compute tokens that rows of a micro-batch share once; auto = on the CPU, if the model can; tree = on CUDA too."""
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
    dtype: str = choice("auto", "auto", "bfloat16", "float32")
    """Data type of computation; auto = bfloat16, or float32 if all processes use a CPU without bfloat16 products."""
    head_dtype: str = choice("auto", "auto", "float32", "compute", relevant=when("dtype", "auto", "bfloat16"))
    """Data type of logits: compute = that of `dtype`, auto = float32 on CUDA, else compute; as native.head_dtype."""
    fp8: Float8Config | None = option(None, also="cosmos-rl: train.fp8, train.fp4; AReaL: fp8_config")
    """Linear layers of the blocks compute in 8 bits: needs torchao, and CUDA from 8.9 on or the CPU, which emulates."""
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
    def compute_dtype(self) -> str:
        """bfloat16 or float32. Where auto means float32, `areal.launcher.preflight.with_dtypes` has set it."""
        return "bfloat16" if self.dtype == "auto" else self.dtype

    @property
    def has_masters(self) -> bool:
        """Whether the weights that the optimiser updates are float32."""
        if self.optimizer is None or self.lora is not None or self.dtype == "float32":
            return self.optimizer is not None
        return not registered("optimizers", self.optimizer.type, key="optimizer.type").facts.rounds_weights

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
        if self.optimizer is not None and (kind := self.optimizer.type) not in ("adam", "sgd"):
            yield Problem("optimizer.type", f"{kind} needs fsdp in allocation_mode: use adam", "config.unsupported")
        if self.optimizer is not None and self.optimizer.type == "sgd" and self.megatron.use_precision_aware_optimizer:
            yield "megatron.use_precision_aware_optimizer", "needs optimizer.type=adam: use false with sgd"
        if self.optimizer is not None and self.megatron.use_precision_aware_optimizer:
            for name, moment in (("beta1", "exp_avg_dtype"), ("beta2", "exp_avg_sq_dtype")):
                if getattr(self.megatron, moment) == "bfloat16" and getattr(self.optimizer, name) > MAX_BFLOAT16_BETA:
                    text = f"is above {MAX_BFLOAT16_BETA}, and megatron.{moment}=bfloat16, rounded to nearest, would"
                    yield f"optimizer.{name}", f"{text} never decay: lower it, or use float32"
        if self.freeze or (self.optimizer is not None and self.optimizer.lr_of):
            name = "freeze" if self.freeze else "optimizer.lr_of"
            yield Problem(name, "needs fsdp in allocation_mode: remove it", "config.unsupported")
        if self.shared_prefixes == "tree":
            yield Problem("shared_prefixes", "tree needs fsdp in allocation_mode: use auto", "config.unsupported")
        if self.logprob_kernel != "torch":
            text = f"{self.logprob_kernel} needs fsdp in allocation_mode: use torch"
            yield Problem("logprob_kernel", text, "config.unsupported")
        if self.compile:
            yield Problem("compile", "needs fsdp in allocation_mode: use compile=false", "config.unsupported")
        if self.fp8 is not None:
            text = "needs fsdp in allocation_mode: use megatron.fp8 and megatron.fp8_recipe"
            yield Problem("fp8", text, "config.unsupported")
        if self.checkpointing != "full":
            text = f"{self.checkpointing} needs fsdp in allocation_mode: use megatron.recompute_granularity"
            yield Problem("checkpointing", text, "config.unsupported")

    def problems(self) -> Problems:
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
