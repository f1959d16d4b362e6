"""The sizes of a model, read from the config.json of its checkpoint folder."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts of a layer in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The sizes of a vision tower that decide how much memory it takes."""

    layers: int
    hidden: int
    intermediate: int
    gated: bool
    """The MLP has three matrices."""
    rotary: bool
    """Positions are rotations of queries and keys."""
    merge: int
    """Patches that become one token, in each direction."""
    patch_values: int
    """Numbers of one patch."""
    projections: int
    """Weights between the tower and the language model."""

    @classmethod
    def read(cls, config: dict[str, Any]) -> Self | None:
        """The shape in a config.json; None without a tower of a known form."""
        tower: dict[str, Any] | None = config.get("vision_config")
        if not isinstance(tower, dict) or "patch_size" not in tower:
            return None
        text = int(config.get("text_config", config).get("hidden_size", 0))
        hidden = int(tower.get("embed_dim") or tower["hidden_size"])  # Qwen2-VL: hidden_size is that of the text
        side = tower["patch_size"][0] if isinstance(tower["patch_size"], list) else int(tower["patch_size"])
        is_qwen = "depth" in tower
        merge = _merged(config, tower, side)
        joined = hidden * merge**2
        within = joined if is_qwen else text  # of the first of two matrices
        mergers = 1 + len(tower.get("deepstack_visual_indexes") or ())
        has_one = str(config.get("model_type")) in ("idefics3", "smolvlm", "gemma3")
        source = hidden if config.get("model_type") == "gemma3" else joined
        return cls(
            layers=int(tower["depth"] if is_qwen else tower["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(tower.get("intermediate_size") or hidden * tower.get("mlp_ratio", 4)),
            gated=tower.get("hidden_act") == "silu",
            rotary=is_qwen,
            merge=merge,
            patch_values=3 * int(tower.get("temporal_patch_size", 1)) * side * side,
            projections=source * text if has_one else mergers * (joined * within + within * text),
        )

    @property
    def parameters(self) -> int:
        """Number of weights, without biases, norms and tables of positions."""
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        return self.layers * (4 * self.hidden**2 + mlp) + self.patch_values * self.hidden + self.projections


def _merged(config: dict[str, Any], tower: dict[str, Any], side: int) -> int:
    if "mm_tokens_per_image" in config:
        return int(tower["image_size"]) // side // math.isqrt(config["mm_tokens_per_image"])
    ratio = config.get("downsample_ratio")
    return int(tower.get("spatial_merge_size") or config.get("scale_factor") or (round(1 / ratio) if ratio else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only model that decide how much memory it takes."""

    family: str
    """`model_type` in config.json."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Columns of the MLP, or of an expert."""
    vocabulary: int
    tied: bool
    experts: int
    experts_per_token: int
    attention_bias: bool
    query_key_norm: bool
    dense_intermediate: int = 0
    """Columns of what computes all tokens in a model with experts: MLPs of layers without experts, shared experts."""
    latents: int = 0
    """Common divisor of the sizes of latents in attention; 0 without them."""
    states: int = 0
    """Numbers that layers with a state keep of a sequence, over all layers."""
    vision: VisionShape | None = None

    @classmethod
    def read(cls, folder: str) -> Self | None:
        """Read a local checkpoint folder. None when it has no config.json, or one of another kind of model."""
        try:
            config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
            vision = VisionShape.read(config)
            config = config.get("text_config", {}) | config  # of a model for images and text
            kind = str(config.get("model_type", ""))
            heads = int(config["num_attention_heads"])
            experts = int(next((config[name] for name in _EXPERTS if config.get(name)), 0))
            width = config.get("moe_intermediate_size") if experts else None
            return cls(
                family=kind,
                hidden=int(config["hidden_size"]),
                layers=int(config.get("num_hidden_layers") or len(config["layers_block_type"])),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
                intermediate=int(width or config["intermediate_size"]),
                vocabulary=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                experts=experts,
                experts_per_token=int(config.get("num_experts_per_tok") or 0) if experts else 0,
                attention_bias=bool(config.get("attention_bias", False)) or kind.startswith("qwen2"),
                query_key_norm=kind.startswith("qwen3"),
                dense_intermediate=_dense_size(config, int(width)) if width else 0,
                latents=_latents(config),
                states=_states(config),
                vision=vision,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def parameters(self) -> int:
        """Number of weights: those of the text, and of a vision tower."""
        return self.text_parameters + (0 if self.vision is None else self.vision.parameters)

    @property
    def text_parameters(self) -> int:
        """Number of weights: exact for Llama, Mistral, Qwen2 and Qwen3, approximate for similar architectures."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden
        if self.attention_bias:
            attention += queries + 2 * keys
        if self.query_key_norm:
            attention += 2 * self.head_dim
        mlp = 3 * self.hidden * self.intermediate
        if self.experts:
            mlp = self.experts * mlp + self.hidden * self.experts
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * (attention + mlp + 2 * self.hidden) + self.hidden

    @property
    def block_matrices(self) -> int:
        """Weights of the linear layers and experts in the decoder's blocks."""
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (heads + 3 * self.intermediate * max(self.experts, 1))

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


def _dense_size(config: dict[str, Any], width: int) -> int:
    """`width`: of an expert."""
    shared = int(config.get("shared_expert_intermediate_size") or width * int(config.get("n_shared_experts") or 0))
    is_mixed = any(config.get(name) for name in ("mlp_only_layers", "first_k_dense_replace"))
    is_mixed = is_mixed or config.get("decoder_sparse_step", 1) > 1
    return math.gcd(shared, int(config["intermediate_size"]) if is_mixed else 0)


def _latents(config: dict[str, Any]) -> int:
    if not config.get("kv_lora_rank"):
        return 0
    return math.gcd(int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]), int(config.get("q_lora_rank") or 0))


def _states(config: dict[str, Any]) -> int:
    """Where config.json does not say which layers have a state, all count."""

    def size(*names: str) -> int:
        return next((value for name in names if isinstance(value := config.get(name), int)), 0)

    hidden, heads = int(config["hidden_size"]), size("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    kinds = config.get("layer_types") or config.get("layers_block_type") or [""] * config["num_hidden_layers"]
    count = sum(not ("attention" in kind and "linear" not in kind) and kind not in ("mlp", "moe") for kind in kinds)
    inner = heads * size("mamba_head_dim", "mamba_d_head") or size("mamba_expand", "expand") * hidden
    width = size("mamba_d_state", "ssm_state_size", "state_size")
    convolved = inner + (2 * max(size("mamba_n_groups", "n_groups", "mamba_ngroups"), 1) * width if heads else 0)
    mamba = convolved * size("mamba_d_conv", "conv_kernel", "mamba_conv_kernel") + inner * width
    keys, values = (size(f"linear_num_{part}_heads") * size(f"linear_{part}_head_dim") for part in ("key", "value"))
    linear = values * size("linear_key_head_dim") + (2 * keys + values) * size("linear_conv_kernel_dim")
    if kimi := config.get("linear_attn_config"):
        config = config | {f"linear_{name}": value for name, value in kimi.items()}
    width_of_head = size("linear_head_dim")
    kernel = size("linear_conv_kernel_dim", "linear_short_conv_kernel_size")
    linear += size("linear_num_heads") * width_of_head * (width_of_head + 3 * kernel)
    return count * (hidden * size("conv_L_cache") + linear + (mamba if width else 0))


def context_length(folder: str) -> int | None:
    """Maximum sequence length of a local checkpoint in tokens; None when its config.json does not state it."""
    try:
        result = json.loads((Path(folder) / "config.json").read_text())["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if isinstance(result, int) else None
