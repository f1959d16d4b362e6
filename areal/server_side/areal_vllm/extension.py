"""Owns the methods that areal adds to each vLLM worker; its adapter calls them through /collective_rpc.

Importing this module makes the transfer engine known to vLLM: the import, which comes before the model is loaded, is
the only moment at which a worker extension runs.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

from areal_vllm import transfer
from vllm.config import set_current_vllm_config


class WorkerExtension:
    """Mixed into vLLM's worker class; `self` is the worker."""

    def areal_state(self) -> dict[str, Any]:
        """What the adapter must know that vLLM's endpoints do not tell."""
        worker: Any = self
        model = worker.model_config
        return {
            "vocab_size": model.get_vocab_size(),
            "context_length": model.max_model_len,
            "weights_whole": self._areal_engine().weights_whole,
            "first_folder": self._areal_engine().first_folder,
            "has_sleep_mode": model.enable_sleep_mode,
            "has_dummy_weights": worker.vllm_config.load_config.load_format == "dummy",
        }

    def areal_start_update(self) -> None:
        """Start a collective update."""
        worker: Any = self
        self._areal_end_open_update()
        worker.start_weight_update()

    def areal_load_folder(self, path: str) -> None:
        """Load all weights from a checkpoint folder. A failure leaves whole tensors behind, though of two policies."""
        worker: Any = self
        engine = self._areal_engine()
        self._areal_end_open_update()
        load_config = worker.vllm_config.load_config
        if load_config.load_format == "dummy":  # started from scratch: there are weights to read now
            load_config.load_format = "auto"
        engine.weights_whole = False
        try:
            worker.reload_weights(weights_path=path)
            engine.repack_tied_weights()
        except BaseException:
            with set_current_vllm_config(worker.vllm_config):
                engine.give_up()
            raise
        engine.weights_whole = True

    def _areal_end_open_update(self) -> None:
        """Of a controller that died in the middle: vLLM would count what it brought as part of the next."""
        worker: Any = self
        if worker._weight_update_active:
            with set_current_vllm_config(worker.vllm_config):
                self._areal_engine().give_up()
            worker._weight_update_active = False

    def _areal_engine(self) -> transfer.ArealTransferEngine:
        worker: Any = self
        engine = worker.weight_transfer_engine
        if not isinstance(engine, transfer.ArealTransferEngine):
            raise RuntimeError('this vLLM server lacks --weight-transfer-config \'{"backend":"areal"}\'')
        return engine


transfer.register()
