"""Options of the Megatron-Core train engine."""

from dataclasses import dataclass, field

from areal.api.config.fields import Problem, Problems, choice, number, option
from areal.api.config.relevance import unless, when

_OVERLAPS = "overlap_param_gather"
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
    """Only kernels with equal results in each run, in all models; slower on a GPU, an error where torch has none."""
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
