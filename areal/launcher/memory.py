"""Owns the memory estimate of a plan: parameters from a model's config.json, bytes by what a process keeps of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from areal.api.config import NativeServerConfig, TrainEngineConfig

_BYTES = {"bfloat16": 2, "float32": 4}
_CPU_TOKENS_PER_REQUEST = 512
"""What NativeServerConfig.max_total_tokens=null means per running request on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only model that decide its memory."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    experts: int
    attention_bias: bool
    query_key_norm: bool

    @classmethod
    def read(cls, folder: str) -> Self | None:
        """From a local checkpoint folder; None when there is none or it is no model of the kind counted here."""
        try:
            found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
            kind = str(found.get("model_type", ""))
            heads = int(found["num_attention_heads"])
            experts = int(found.get("num_experts") or found.get("num_local_experts") or 0)
            width = found.get("moe_intermediate_size") if experts else None
            return cls(
                hidden=int(found["hidden_size"]),
                layers=int(found["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(found.get("num_key_value_heads") or heads),
                head_dim=int(found.get("head_dim") or int(found["hidden_size"]) // heads),
                intermediate=int(width or found["intermediate_size"]),
                vocabulary=int(found["vocab_size"]),
                tied=bool(found.get("tie_word_embeddings", False)),
                experts=experts,
                attention_bias=bool(found.get("attention_bias", False)) or kind.startswith("qwen2"),
                query_key_norm=kind.startswith("qwen3"),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def parameters(self) -> int:
        """Exact for Llama, Mistral, Qwen2 and Qwen3; close for their relatives."""
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
    def kv_values_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


def context_length(folder: str) -> int | None:
    """Longest sequence a local checkpoint's model takes; None when its config.json does not say."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text())["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


def trained_bytes(model: TrainEngineConfig, ranks: int) -> int | None:
    """Sharded float32 weights, gradients and optimiser state on one rank; None when the model is not at hand."""
    shape = ModelShape.read(model.path)
    if shape is None:
        return None
    per_parameter = 4 if model.optimizer is None else {"adam": 16, "sgd": 8}[model.optimizer.type]
    return shape.parameters * per_parameter // ranks


def served_bytes(native: NativeServerConfig, path: str, *, on_gpu: bool) -> int | None:
    """Weights and KV cache of one server; None when the model is not at hand.

    On a GPU a cache without a configured size takes what is left, and only the weights are counted.
    """
    shape = ModelShape.read(path)
    if shape is None:
        return None
    default = 0 if on_gpu else native.max_running_requests * _CPU_TOKENS_PER_REQUEST
    tokens = native.max_total_tokens or default
    return (shape.parameters + tokens * shape.kv_values_per_token) * _BYTES[native.dtype]


def foreign_served_bytes(path: str, flags: Mapping[str, Any]) -> int | None:
    """The same of an SGLang or vLLM server, all its devices together, by the flags it is started with."""
    shape = ModelShape.read(path)
    if shape is None:
        return None
    element = 4 if flags.get("dtype") in ("float32", "float") else 2
    tokens, cache = flags.get("max_total_tokens"), flags.get("kv_cache_memory_bytes")
    if not isinstance(cache, int):  # else on a GPU the cache takes what is left
        cache = tokens * shape.kv_values_per_token * element if isinstance(tokens, int) else 0
    return shape.parameters * element + cache


def bytes_text(count: int | None) -> str:
    """For people: 1.5 GiB."""
    if count is None:
        return "unknown"
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
