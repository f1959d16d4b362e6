"""The train engines by backend name: a new backend adds its module and one row of the table."""

from __future__ import annotations

from typing import Protocol

from areal.api.batch import OutputSpec
from areal.api.config import TrainEngineConfig
from areal.api.engine import ModelRole, TrainEngine
from areal.engine.fsdp_builder import build_fsdp_engine
from areal.engine.mesh import TrainerMesh


class TrainEngineFactory(Protocol):
    """Builds the engine of one model."""

    def __call__(
        self,
        config: TrainEngineConfig,
        *,
        role: ModelRole,
        total_steps: int,
        mesh: TrainerMesh,
        seed: int,
        outputs: OutputSpec | None = None,
    ) -> TrainEngine:
        """Load the model that `config` names; a collective over all trainer ranks.

        `total_steps`: optimiser steps of the learning-rate schedule. `seed`: of random initial weights. `outputs`: what
        `forward` returns besides log-probabilities (actor and ref only). Raises ConfigError or InputError.
        """
        ...


TRAIN_ENGINES: dict[str, TrainEngineFactory] = {"fsdp": build_fsdp_engine}
"""Backend name in `allocation_mode` -> factory. `areal.api.allocation.check_supported` accepts the same names."""
