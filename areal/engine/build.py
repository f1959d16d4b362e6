"""The train engines by backend name: a new backend adds its module and one row of the table."""

from areal.engine.fsdp_builder import build_fsdp_engine

TRAIN_ENGINES = {"fsdp": build_fsdp_engine}
"""Backend name in `allocation_mode` -> factory. `areal.api.allocation.check_supported` accepts the same names."""
