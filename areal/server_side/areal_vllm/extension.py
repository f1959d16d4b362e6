"""The methods that areal adds to each vLLM worker; areal's vLLM client calls them through /collective_rpc.

Importing this module registers the transfer engine in vLLM. vLLM imports a worker extension before it loads the model,
and runs no other code of it at that time.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from areal_vllm import transfer
from vllm.config import set_current_vllm_config

log = logging.getLogger("vllm.areal")


class WorkerExtension:
    """Mixed into vLLM's worker class; `self` is the worker."""

    def areal_state(self) -> dict[str, Any]:
        """State that the client needs and vLLM's endpoints do not report."""
        worker: Any = self
        model = worker.model_config
        return {
            "vocab_size": model.get_vocab_size(),
            "context_length": model.max_model_len,
            "weights_whole": self._areal_engine().weights_whole,
            "first_folder": self._areal_engine().first_folder,
            "has_dummy_weights": worker.vllm_config.load_config.load_format == "dummy",
        }

    def areal_join(self, info: dict[str, Any]) -> dict[str, str]:
        """Join the update group of a trainer; `info` is a `transfer.GroupInfo`."""
        worker: Any = self
        return _outcome(lambda: worker.init_weight_transfer_engine(info))

    def areal_start_update(self) -> dict[str, str]:
        """Start a collective update."""
        worker: Any = self

        def start() -> None:
            self._areal_end_open_update()
            worker.start_weight_update()

        return _outcome(start)

    def areal_receive(self, bucket: dict[str, Any]) -> dict[str, str]:
        """Receive one bucket of the update; `info` is a `transfer.BucketInfo`."""
        worker: Any = self
        return _outcome(lambda: worker.update_weights(bucket))

    def areal_finish_update(self) -> dict[str, str]:
        """End the update when all weights were received."""
        worker: Any = self
        return _outcome(worker.finish_weight_update)

    def areal_load_folder(self, path: str) -> dict[str, str]:
        """Load all weights from a checkpoint folder. A failure leaves complete tensors of two policies."""
        return _outcome(lambda: self._areal_reload(path))

    def _areal_reload(self, path: str) -> None:
        worker: Any = self
        engine = self._areal_engine()
        self._areal_end_open_update()
        load_config = worker.vllm_config.load_config
        if load_config.load_format == "dummy":  # the server started with random weights: now there are weights to read
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
        """End an update whose controller died: vLLM would count its weights as part of the next update."""
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


def _outcome(act: Callable[[], None]) -> dict[str, str]:
    """The result or error of a call, as its answer. A method must not raise: vLLM would leave the answers of the other
    workers unread, and use them as answers to the next call."""
    try:
        act()
    except Exception as error:
        log.exception("a call of areal failed")
        return {"error": str(error) or repr(error)}
    return {}


transfer.register()
