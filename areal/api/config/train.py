"""Owns the options of a train engine: model, optimiser, micro-batches, sharding."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal.api.config.fields import Problems, choice, number


@dataclass(frozen=True, kw_only=True)
class MicroBatchSpec:
    """How a batch is cut into forward passes."""

    n_mbs: int | None = number(1, low=1)
    """Fewest micro-batches; null = 1."""
    granularity: int = number(1, low=1)
    """Neighbouring sequences that stay in one micro-batch (2 for preference pairs)."""
    max_tokens_per_mb: int | None = number(None, low=1)
    """Most tokens of one forward pass; null = no limit."""
    n_mbs_divisor: int = number(1, low=1)
    """The number of micro-batches is raised to a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimiser and learning-rate schedule."""

    type: str = choice("adam", "adam", "sgd")
    """adam = AdamW; sgd = plain gradient descent."""
    lr: float = number(1e-3, above=0)
    """Peak learning rate."""
    weight_decay: float = number(0.01, low=0)
    """Decoupled weight decay."""
    beta1: float = number(0.9, low=0, below=1)
    """Decay of the first moment (adam)."""
    beta2: float = number(0.999, low=0, below=1)
    """Decay of the second moment (adam)."""
    eps: float = number(1e-8, above=0)
    """Added to adam's denominator."""
    min_lr_ratio: float = number(0.0, low=0, high=1)
    """Floor of the schedule as a fraction of lr."""
    lr_scheduler_type: str = choice("constant", "constant", "linear", "cosine")
    """Shape after the warm-up, down to min_lr_ratio at the last step."""
    warmup_steps_proportion: float = number(0.001, low=0, high=1)
    """Fraction of all optimiser steps spent rising from 0 to lr."""
    gradient_clipping: float = number(1.0, above=0)
    """Largest global gradient norm."""


@dataclass(frozen=True, kw_only=True)
class FSDPWrapPolicy:
    """Which modules FSDP shards one by one."""

    transformer_layer_cls_to_wrap: list[str] | None = None
    """Module class names; null = the model's own list of blocks."""


@dataclass(frozen=True, kw_only=True)
class FSDPEngineConfig:
    """Options of the FSDP2 engine."""

    wrap_policy: FSDPWrapPolicy | None = None
    """Which modules become shard units; null = the model's own list of blocks."""
    offload_params: bool = False
    """Keep sharded parameters and optimiser state in CPU memory between uses."""


@dataclass(frozen=True, kw_only=True)
class TrainEngineConfig:
    """A model in the trainer."""

    path: str = ""
    """Checkpoint folder or hub name of the model."""
    attn_impl: str = choice("auto", "auto", "varlen", "sdpa", "flash_attention_2")
    """Packed attention: varlen = torch's kernel (CUDA), sdpa = one call a sequence; the others pick by device."""
    init_from_scratch: bool = False
    """Random weights in the shape of `path`'s config instead of its weights."""
    temperature: float = number(1.0, above=0)
    """Divides the logits before log-probabilities; must equal gconfig.temperature."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """How batches are cut into forward passes."""
    disable_dropout: bool = False
    """Set every dropout probability to 0."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more work."""
    dtype: str = choice("bfloat16", "bfloat16", "float32")
    """Compute type; master weights and optimiser state stay float32."""
    logprob_kernel: str = choice("torch", "torch", "liger")
    """Source of log-probabilities: torch = blocks of logits; liger = liger-kernel on CUDA, which gives no entropies."""
    grad_reduce_dtype: str = choice("float32", "bfloat16", "float32")
    """Type in which gradients are summed over ranks."""
    optimizer: OptimizerConfig | None = None
    """Optimiser; null = the model is never trained (a reference)."""
    fsdp: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    """Options of the FSDP engine."""

    def problems(self) -> Problems:
        if not self.path:
            yield "path", "is required: name a checkpoint folder or a hub model"
        if self.logprob_kernel == "liger" and self.temperature != 1.0:
            yield (
                "logprob_kernel",
                f"is liger, which divides logits by nothing, and temperature is {self.temperature:g}: use torch",
            )


@dataclass(frozen=True, kw_only=True)
class ScoreModelConfig(TrainEngineConfig):
    """A model with a head of one output; the backbone of `path` gets a new head when it has none."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.temperature != 1.0:
            yield "temperature", "divides the logits of a language model, and a score has none: remove it"
        if self.logprob_kernel != "torch":
            yield "logprob_kernel", "makes log-probabilities of a language model, and a score is none: remove it"
