"""Imports Megatron-Core for the CPU: the server of tests/rank_processes.py does this once for all ranks."""

import warnings

from tests.megatron.cpu.megatron_on_cpu import enable_cpu_mode

enable_cpu_mode()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import areal.engine.megatron.assembly  # noqa: F401
