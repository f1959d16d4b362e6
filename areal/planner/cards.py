"""Service times from the specification of a card and the sizes of a model: what follows from them is extrapolated."""

from dataclasses import dataclass

from areal.api.config import PPOConfig
from areal.api.errors import ConfigError
from areal.models.model_shape import ModelShape
from areal.planner.service import ServerTimes, ServiceTimes, TrainerTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """From the data sheet of the maker: dense bf16."""

    tflops: float
    bytes_per_s: float
    """Of the memory."""
    link_bytes_per_s: float
    """Of the network between machines, one direction, for each card: assumed 400 Gbit/s."""


CARDS = {
    "a100": Card(tflops=312.0, bytes_per_s=2.0e12, link_bytes_per_s=25e9),
    "h100": Card(tflops=989.0, bytes_per_s=3.35e12, link_bytes_per_s=50e9),
    "h200": Card(tflops=989.0, bytes_per_s=4.8e12, link_bytes_per_s=50e9),
    "b200": Card(tflops=2250.0, bytes_per_s=8.0e12, link_bytes_per_s=50e9),
}
MEMORY_SHARE, PREFILL_SHARE, TRAIN_SHARE, LINK_SHARE = 0.7, 0.5, 0.4, 0.5
"""Fractions of the peak rates of memory, card and link that are reached. They are assumptions, and printed."""
STEP_OVERHEAD_S = 0.003
"""Time of a decode step without its computation: scheduling, sampling, launches. An assumption."""


def card_times(name: str, config: PPOConfig, *, ranks: int, server_size: int) -> ServiceTimes:
    """`ranks`: of the trainers; `server_size`: cards of one server. ConfigError for an unknown card or model."""
    card = CARDS.get(name.lower())
    if card is None:
        raise ConfigError(f"--card {name}: choose one of {', '.join(CARDS)}", code="plan.unknown_card")
    shape = ModelShape.read(config.actor.path)
    if shape is None:
        text = f"actor.path={config.actor.path} has no config.json that can be read: --card needs a local model folder"
        raise ConfigError(text, code="plan.no_model")
    active, width = _active_parameters(shape), 2.0
    memory_per_s = card.bytes_per_s * MEMORY_SHARE * server_size
    flops = card.tflops * 1e12
    token_s = 2 * active / (flops * PREFILL_SHARE * server_size)
    passes = 6.0 * (4 / 3 if config.actor.gradient_checkpointing else 1.0)
    before = 2.0 * (1 + (config.ref is not None))
    trained_per_s = flops * TRAIN_SHARE * ranks
    transfer_s = shape.parameters * width / (card.link_bytes_per_s * LINK_SHARE)
    source = (
        f"extrapolated from the specification of {name} for {shape.parameters / 1e9:.1f}B parameters, of whose peaks "
        f"{MEMORY_SHARE:.0%} (memory), {PREFILL_SHARE:.0%} (prefill) and {TRAIN_SHARE:.0%} (training) are assumed"
    )
    return ServiceTimes(
        server=ServerTimes(
            step_s=shape.parameters * width / memory_per_s + STEP_OVERHEAD_S,
            sequence_s=token_s,
            context_s=shape.kv_values_per_token * width / memory_per_s,
            prefill_s=token_s,
            prepare_s=transfer_s,
            install_s=0.1,
            has_second_copy=config.server_backend == "native",
        ),
        trainer=TrainerTimes(
            before_token_s=before * active / trained_per_s,
            update_token_s=passes * active / trained_per_s,
            publish_s=transfer_s,
            after_s=0.5,
        ),
        source=source,
        is_extrapolated=True,
    )


def _active_parameters(shape: ModelShape) -> float:
    """Weights that compute a token."""
    if not shape.experts:
        return float(shape.parameters)
    unused = (shape.experts - shape.experts_per_token) * 3 * shape.hidden * shape.intermediate * shape.layers
    return float(shape.parameters - unused)
