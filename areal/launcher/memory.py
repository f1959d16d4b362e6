"""Memory that one trainer rank needs for its model, and byte counts as text."""

from __future__ import annotations

from areal.api.config import TrainEngineConfig
from areal.system.model_shape import ModelShape


def trained_bytes(model: TrainEngineConfig, ranks: int) -> int | None:
    """Sharded float32 weights, gradients and optimiser state on one rank; None when the model is not at hand."""
    shape = ModelShape.read(model.path)
    if shape is None:
        return None
    per_parameter = 4 if model.optimizer is None else {"adam": 16, "sgd": 8}[model.optimizer.type]
    return shape.parameters * per_parameter // ranks


def bytes_text(count: int | None) -> str:
    """For people: 1.5 GiB."""
    if count is None:
        return "unknown"
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
