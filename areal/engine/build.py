"""The train engines by backend name: a new backend adds its module and one row of the table."""

from collections.abc import Callable, Mapping

from areal.api.engine import TrainEngine
from areal.engine.fsdp_builder import build_fsdp_engine
from areal.engine.megatron.builder import build_megatron_engine

TRAIN_ENGINES: Mapping[str, Callable[..., TrainEngine]] = {
    "fsdp": build_fsdp_engine,
    "megatron": build_megatron_engine,
}
"""Backend name in `allocation_mode` -> factory."""
