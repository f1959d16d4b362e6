"""Megatron-Core's configuration of a model from its Hugging Face configuration and the options of the engine."""
# pyright: reportMissingImports=false

import os
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from areal.api.allocation import ParallelDims
from areal.api.config import TrainEngineConfig
from areal.api.config.train import MegatronEngineConfig
from areal.api.errors import ConfigError
from areal.engine.megatron.weight_map import has_experts, has_latents, num_experts, shared_size
from areal.models.mesh_rules import MEGATRON_FAMILIES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.uint8}


def require_mapped(config: Any, options: TrainEngineConfig) -> None:
    """Raise ConfigError for a model that Megatron-Core cannot compute here exactly."""
    if config.model_type not in MEGATRON_FAMILIES:
        known = ", ".join(MEGATRON_FAMILIES)
        message = f"{config.model_type} models have no Megatron weight map, only {known}: use fsdp in allocation_mode"
        raise ConfigError(message, code="model.cannot_split")
    if config.hidden_act not in ("silu", "swish"):
        raise ConfigError(
            f"{config.model_type} with activation {config.hidden_act} has no map", code="model.unsupported"
        )
    dropout = 0.0 if options.optimizer is None or options.disable_dropout else config.attention_dropout
    if dropout:
        message = f"megatron does not apply attention_dropout={dropout:g} of the model: set disable_dropout=true"
        raise ConfigError(f"{message}, or use fsdp in allocation_mode", code="model.unsupported")
    bias, mlp_bias = (bool(getattr(config, name, False)) for name in ("attention_bias", "mlp_bias"))
    if bias and config.model_type not in ("llama", "qwen2", "qwen2_moe", "glm4_moe"):
        raise ConfigError(f"{config.model_type} with attention_bias has no map", code="model.unsupported")
    if bias != mlp_bias and config.model_type == "llama":
        message = "Megatron-Core has biases in all linear layers or in none, but the model has only some: use fsdp"
        raise ConfigError(message, code="model.unsupported")


def choose_kernels(options: MegatronEngineConfig) -> None:
    """Let this process use only kernels with equal results in each run, if the options say so.

    Before its first product of matrices: cuBLAS reads its variable then.
    """
    if options.use_deterministic_algorithms:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # of Transformer Engine
        torch.use_deterministic_algorithms(True)


def transformer_config(
    hf: Any, config: TrainEngineConfig, dims: ParallelDims, device: torch.device, *, dtype: torch.dtype, chunks: int
) -> TransformerConfig:
    """`chunks`: model chunks of a pipeline stage."""
    options, is_cuda = config.megatron, device.type == "cuda"
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    recomputed = _recompute_options(config)
    splits_tokens = dims.tp > 1 and not recomputed.get("distribute_saved_activations")
    build = MLATransformerConfig if has_latents(hf) else TransformerConfig
    return build(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=bool(getattr(hf, "mlp_bias", False)),
        add_qkv_bias=hf.model_type.startswith("qwen2") or (hf.model_type == "glm4_moe" and hf.attention_bias),
        qk_layernorm=hf.model_type.startswith("qwen3") or has_latents(hf) or bool(getattr(hf, "use_qk_norm", False)),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_backend=AttnBackend.unfused,
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=dims.cp,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.etp,
        sequence_parallel=splits_tokens,
        variable_seq_lengths=varies_rows(options),
        moe_token_dispatcher_type=options.moe_token_dispatcher_type,
        batch_p2p_comm=is_cuda and chunks == 1,
        overlap_p2p_comm=False,
        deallocate_pipeline_outputs=is_cuda,
        use_cpu_initialization=True,
        perform_initialization=False,
        calculate_per_token_loss=not options.ddp.average_in_collective,
        deterministic_mode=options.use_deterministic_algorithms,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=is_cuda,
        bias_dropout_fusion=is_cuda,
        masked_softmax_fusion=False,
        **_expert_options(hf, config),
        **_latent_options(hf),
        **_options_of_8_bits(options),
        **recomputed,
    )


def _options_of_8_bits(options: MegatronEngineConfig) -> dict[str, Any]:
    if options.fp8 is None:
        return {}
    return {"fp8": options.fp8, "fp8_recipe": options.fp8_recipe, "fp8_param": options.ddp.fp8_param_gather}


def _recompute_options(config: TrainEngineConfig) -> dict[str, Any]:
    options = config.megatron
    if config.optimizer is None or not config.gradient_checkpointing or not options.recompute_granularity:
        return {}
    is_full = options.recompute_granularity == "full"
    return {
        "recompute_granularity": options.recompute_granularity,
        "recompute_method": options.recompute_method if is_full else None,
        "recompute_num_layers": options.recompute_num_layers if is_full else None,
        "recompute_modules": None if is_full else options.recompute_modules,
        "distribute_saved_activations": bool(options.distribute_saved_activations),
    }


def row_multiple(options: MegatronEngineConfig) -> int:
    """What divides the tokens of a rank: the products of 8 bits want rows of 16, or 32 with a scale for 32 numbers."""
    return 1 if options.fp8 is None else 32 if options.fp8_recipe == "mxfp8" else 16


def varies_rows(options: MegatronEngineConfig) -> bool:
    """Whether micro-batches have different numbers of tokens.

    Two stages of several chunks confuse the shapes of both directions, and allgather wants equal rows on all ranks.
    """
    return options.virtual_pipeline_parallel_size == 1 and options.moe_token_dispatcher_type != "allgather"


def _expert_options(hf: Any, config: TrainEngineConfig) -> dict[str, Any]:
    """The routers are those of transformers: `areal.engine.megatron.model`."""
    options, count = config.megatron, num_experts(hf)
    if not count:
        return {}
    overlaps = options.moe_shared_expert_overlap and options.moe_token_dispatcher_type == "alltoall"
    return {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size,
        "moe_shared_expert_intermediate_size": shared_size(hf) or None,
        "moe_shared_expert_gate": hf.model_type == "qwen2_moe",
        "moe_shared_expert_overlap": overlaps and shared_size(hf) > 0,
        "moe_layer_freq": [int(has_experts(hf, layer)) for layer in range(hf.num_hidden_layers)],
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": True,
        "moe_permute_fusion": options.moe_permute_fusion,
        "moe_grouped_gemm": HAVE_TE,
    }


def _latent_options(hf: Any) -> dict[str, Any]:
    if not has_latents(hf):
        return {}
    rope: dict[str, Any] = hf.rope_parameters
    is_plain = rope.get("rope_type", "default") == "default"
    return {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "rope_type": "rope",  # unused: positions are those of transformers
        "rotary_scaling_factor": 1.0 if is_plain else float(rope["factor"]),  # for the scale of the softmax
        "mscale_all_dim": 0.0 if is_plain else float(rope.get("mscale_all_dim") or 0.0),
    }


def shares_state(config: TrainEngineConfig) -> bool:
    """Whether data ranks share the optimiser's state: Megatron-Core does so for AdamW only."""
    has_moments = config.optimizer is not None and config.optimizer.type != "sgd"
    return config.megatron.ddp.use_distributed_optimizer and has_moments


def ddp_config(config: TrainEngineConfig) -> DistributedDataParallelConfig:
    options = config.megatron.ddp
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.grad_reduce_in_fp32 and config.grad_reduce_dtype == "float32",
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather and shares_state(config),
        align_param_gather=options.align_param_gather,
        use_distributed_optimizer=shares_state(config),
        check_for_nan_in_grad=options.check_for_nan_in_grad,
        bucket_size=options.bucket_size,
        average_in_collective=options.average_in_collective,
        fp8_param_gather=options.fp8_param_gather,
    )


def optimizer_config(config: TrainEngineConfig, dtype: torch.dtype) -> OptimizerConfig:
    assert config.optimizer is not None
    ours, options = config.optimizer, config.megatron
    return OptimizerConfig(
        optimizer="sgd" if ours.type == "sgd" else "adam",
        lr=ours.lr,
        min_lr=0.0,
        weight_decay=ours.weight_decay,
        adam_beta1=ours.beta1,
        adam_beta2=ours.beta2,
        adam_eps=ours.eps,
        sgd_momentum=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        clip_grad=0.0,  # clipped with the norm that was checked
        use_distributed_optimizer=shares_state(config),
        overlap_param_gather=options.ddp.overlap_param_gather,
        overlap_param_gather_with_optimizer_step=options.overlap_param_gather_with_optimizer_step,
        fp8_recipe=None if options.fp8 is None else options.fp8_recipe,
        store_param_remainders=False,  # a checkpoint has whole float32 weights
        use_precision_aware_optimizer=options.use_precision_aware_optimizer,
        main_grads_dtype=DTYPES[options.main_grads_dtype],
        main_params_dtype=DTYPES[options.main_params_dtype],
        exp_avg_dtype=DTYPES[options.exp_avg_dtype],
        exp_avg_sq_dtype=DTYPES[options.exp_avg_sq_dtype],
    )
