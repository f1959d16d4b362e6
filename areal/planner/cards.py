"""Service times from the specification of a card and the sizes of a model: what follows from them is extrapolated."""

import math
from dataclasses import dataclass

from areal.api.config import PPOConfig
from areal.api.errors import ConfigError
from areal.launcher.memory_plan import CARD_SHARE, largest_micro_batch
from areal.models.model_shape import ModelShape
from areal.planner.service import ServerTimes, ServiceTimes, TrainerTimes, most_running


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Figures of the maker's data sheet, without sparsity."""

    tflops: float
    """Peak in bf16."""
    bytes_per_s: float
    """Bandwidth of the memory."""
    memory_bytes: float
    near_bytes_per_s: float
    """Bandwidth of NVLink in one direction."""
    far_bytes_per_s: float
    """Bandwidth of the network between machines in one direction, for each card. Assumed: 200 (a100) or 400 Gbit/s."""
    fp8: int = 2
    """Peak rate in FP8 by that in bf16; 0 = the card has none."""


CARDS = {
    "a100": Card(
        tflops=312.0, bytes_per_s=2.0e12, memory_bytes=80e9, near_bytes_per_s=300e9, far_bytes_per_s=25e9, fp8=0
    ),
    "h100": Card(tflops=989.0, bytes_per_s=3.35e12, memory_bytes=80e9, near_bytes_per_s=450e9, far_bytes_per_s=50e9),
    "h200": Card(tflops=989.0, bytes_per_s=4.8e12, memory_bytes=141e9, near_bytes_per_s=450e9, far_bytes_per_s=50e9),
    "b200": Card(tflops=2250.0, bytes_per_s=8.0e12, memory_bytes=180e9, near_bytes_per_s=900e9, far_bytes_per_s=50e9),
}
MEMORY_SHARE, PREFILL_SHARE, TRAIN_SHARE, FP8_SHARE, LINK_SHARE = 0.7, 0.5, 0.4, 0.3, 0.5
"""Fractions of the peak rates of memory, card and links that are reached. They are assumptions, and printed."""
STEP_OVERHEAD_S, REDUCE_S = 0.003, 10e-6
"""Time of a decode step without its computation (scheduling, sampling, launches), and of each of two sums over the
cards of a server in each layer. Assumptions."""
_WIDTH = 2.0  # Bytes of a number of the weights and the cache.


def card_times(name: str, config: PPOConfig, *, tokens: float) -> ServiceTimes:
    """`tokens`: of a train step. ConfigError for an unknown card or model, and for a card without what it needs.

    A trainer's micro-batch takes as long as its computation with the sums of its tensor ranks, or as gathering the
    weights of a data rank, whichever is longer; stages of a pipeline wait for its first and last micro-batches.
    """
    card, shape = known_card(name), ModelShape.read(config.actor.path)
    if shape is None:
        text = f"actor.path={config.actor.path} has no config.json that can be read: --card needs a local model folder"
        raise ConfigError(text, code="plan.no_model")
    inference, dims = config.allocation.inference, config.allocation.train[0].parallel
    assert inference is not None
    size, ranks, layers = inference.instance_size, dims.world_size, shape.layers
    expert = 3 * shape.hidden * shape.intermediate * layers
    unused = max(0, shape.experts - shape.experts_per_token) * expert
    operations = 2 * (shape.parameters - unused)  # of a token
    weight_bytes, kv_bytes = shape.parameters * _WIDTH, shape.kv_values_per_token * _WIDTH
    served_bytes = weight_bytes - shape.block_matrices * _WIDTH + _served_block_bytes(config, shape.block_matrices)
    memory_per_s, link_s = card.bytes_per_s * MEMORY_SHARE * size, 1 / (card.far_bytes_per_s * LINK_SHARE)
    token_s = operations / (card.tflops * 1e12 * PREFILL_SHARE * size)
    transfer_s = weight_bytes / size * link_s
    has_second_copy = config.server_backend == "native"
    kept_bytes = card.memory_bytes * CARD_SHARE * size - served_bytes * (1 + has_second_copy)

    pass_s = operations / (card.tflops * 1e12 * TRAIN_SHARE * ranks)  # of a token, over all ranks
    summed_bytes = 4 * layers * shape.hidden * _WIDTH * (dims.tp - 1) / dims.tp
    pass_s += summed_bytes / (card.near_bytes_per_s * LINK_SHARE * ranks / dims.tp)
    is_megatron, micro_tokens = config.train_backend == "megatron", largest_micro_batch(config)
    gathered_bytes = 0.0 if is_megatron else weight_bytes / (dims.tp * dims.pp) * (1 - 1 / (dims.dp * dims.cp))
    gather_s = gathered_bytes * link_s / (micro_tokens * dims.dp)
    bubble = 1 + (dims.pp - 1) / max(1.0, tokens / (micro_tokens * dims.dp * config.actor.ppo_n_minibatches))
    passes, fp8 = 3 + config.actor.gradient_checkpointing, config.actor.fp8
    saved_s = 0.0  # of a pass of the actor by products in FP8
    if config.actor.megatron.fp8 if is_megatron else fp8:
        if not card.fp8:
            key = "actor.megatron.fp8" if is_megatron else "actor.fp8"
            raise ConfigError(f"{key}: --card {name} has no FP8: remove it, or name another card", code="plan.no_fp8")
        # torchao leaves experts in the compute type
        weights = shape.block_matrices - (unused if is_megatron else shape.experts * expert)
        saved_s = (1 / TRAIN_SHARE - 1 / (card.fp8 * FP8_SHARE)) * 2 * weights / (card.tflops * 1e12 * ranks)
    faster = passes - (fp8 is not None and fp8.recipe == "rowwise_with_gw_hp")  # not the gradients of weights
    return ServiceTimes(
        server=ServerTimes(
            step_s=served_bytes / memory_per_s + STEP_OVERHEAD_S + (size > 1) * 2 * layers * REDUCE_S,
            sequence_s=token_s,
            context_s=kv_bytes / memory_per_s,
            prefill_s=token_s,
            prepare_s=transfer_s,
            install_s=0.1,
            has_second_copy=has_second_copy,
            max_running=most_running(config),
            max_context=max(0.0, kept_bytes / (kv_bytes or math.inf)),
        ),
        trainer=TrainerTimes(
            before_token_s=bubble
            * (max(pass_s - saved_s, gather_s) + (config.ref is not None) * max(pass_s, gather_s)),
            update_token_s=bubble * max(passes * pass_s - faster * saved_s, 2 * gather_s),
            publish_s=transfer_s,
            after_s=0.5,
        ),
        source=f"extrapolated from the specification of {name} for {shape.parameters / 1e9:.1f}B parameters, of whose "
        f"peaks {MEMORY_SHARE:.0%} (memory), {PREFILL_SHARE:.0%} (prefill), {TRAIN_SHARE:.0%} (training, "
        f"{FP8_SHARE:.0%} in FP8) and {LINK_SHARE:.0%} (links) are assumed, and updates of whole weights",
        is_extrapolated=True,
    )


def known_card(name: str) -> Card:
    if (card := CARDS.get(name.lower())) is None:
        raise ConfigError(f"--card {name}: choose one of {', '.join(CARDS)}", code="plan.unknown_card")
    return card


def _served_block_bytes(config: PPOConfig, count: int) -> float:
    """Bytes of `count` weights of linear layers on a server."""
    if config.server_backend == "native":
        return config.native.quantized_bytes(count, int(_WIDTH))
    return count * (config.served_bits or 8 * _WIDTH) / 8
