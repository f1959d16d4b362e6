"""The methods that areal adds to each vLLM worker; areal's vLLM client calls them through /collective_rpc.

Importing this module registers the transfer engine in vLLM. vLLM imports a worker extension before it loads the model,
and runs no other code of it at that time.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_vllm import transfer
from safetensors import safe_open
from vllm.config import set_current_vllm_config

log = logging.getLogger("vllm.areal")


class WorkerExtension:
    """Mixed into vLLM's worker class; `self` is that worker."""

    def areal_state(self: Any) -> dict[str, Any]:
        """State that the client needs and vLLM's endpoints do not report."""
        model = self.model_config
        return {
            "vocab_size": model.get_vocab_size(),
            "context_length": model.max_model_len,
            "weights_whole": self._areal_engine().weights_whole,
            "first_folder": self._areal_engine().first_folder,
            "has_dummy_weights": self.vllm_config.load_config.load_format == "dummy",
        }

    def areal_join(self: Any, info: dict[str, Any]) -> dict[str, str]:
        """Join the update group of a trainer; `info` is a `transfer.GroupInfo`."""
        return _outcome(lambda: self.init_weight_transfer_engine(info))

    def areal_start_update(self: Any) -> dict[str, str]:
        """Start a collective update."""

        def start() -> None:
            self._areal_end_open_update()
            self.start_weight_update()

        return _outcome(start)

    def areal_receive(self: Any, bucket: dict[str, Any]) -> dict[str, str]:
        """Receive one bucket of the update; `info` is a `transfer.BucketInfo`."""
        return _outcome(lambda: self.update_weights(bucket))

    def areal_finish_update(self: Any) -> dict[str, str]:
        """End the update when all weights were received."""
        return _outcome(self.finish_weight_update)

    def areal_load_folder(self: Any, path: str) -> dict[str, str]:
        """Load all weights from a checkpoint folder. A failure while vLLM loads leaves tensors of two policies; before
        that, every number is checked."""
        return _outcome(lambda: self._areal_reload(path))

    def _areal_reload(self: Any, path: str) -> None:
        engine = self._areal_engine()
        for file in sorted(Path(path).glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - a safe_open is no mapping
                    transfer.check_finite(name, opened.get_tensor(name))
        self._areal_end_open_update()
        load_config = self.vllm_config.load_config
        if load_config.load_format == "dummy":  # the server started with random weights: now there are weights to read
            load_config.load_format = "auto"
        engine.weights_whole = False
        try:
            self.reload_weights(weights_path=path)
            engine.repack_tied_weights()
        except BaseException:
            with set_current_vllm_config(self.vllm_config):
                engine.give_up()
            raise
        engine.weights_whole = True

    def _areal_end_open_update(self: Any) -> None:
        """End an update whose controller died: vLLM would count its weights as part of the next update."""
        if self._weight_update_active:
            with set_current_vllm_config(self.vllm_config):
                self._areal_engine().give_up()
            self._weight_update_active = False

    def _areal_engine(self: Any) -> transfer.ArealTransferEngine:
        engine = self.weight_transfer_engine
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
