"""Checks that the installed vLLM has what areal needs, and reports what an old version lacks."""

# pyright: reportMissingImports=false
from __future__ import annotations

TESTED_VERSION = "0.32.0"

try:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    # The versions with these names have transfer engines that control the whole update.
    _ = WeightTransferEngine.start_weight_update, WeightTransferEngine.finish_weight_update
except (ImportError, AttributeError) as error:
    import vllm

    raise ImportError(
        f"areal's worker extension was written for vLLM {TESTED_VERSION}; the installed {vllm.__version__} lacks what "
        f"it needs ({error}): install vllm>={TESTED_VERSION}"
    ) from error

__all__ = [
    "TESTED_VERSION",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "finalize_layerwise_reload",
    "get_layerwise_info",
    "initialize_layerwise_reload",
]
