"""Receives the weights that a trainer sends in a vLLM worker: bucket by bucket, layer by layer.

`receive_weights` waits for the trainer's broadcast, the trainer's end (gloo reports it at once), or the time-out of
the group. vLLM repacks weights for its kernels, so they pass through its layerwise reload, which keeps a layer's old
tensors until all new ones of that layer were received.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from areal_transfer import group as update_group
from areal_transfer import layout

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
        f"areal's worker extension needs vLLM {TESTED_VERSION}; the installed {vllm.__version__} lacks a part of it "
        f"({error}): install vllm>={TESTED_VERSION}"
    ) from error

log = logging.getLogger("vllm.areal")

BACKEND = "areal"


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The update group that a worker joins."""

    master_address: str
    master_port: int
    rank_offset: int
    """Rank of this server's first worker; the others follow."""
    world_size: int
    group_name: str
    backend: str
    """gloo or nccl."""
    timeout_s: float
    """Longest wait for the other ranks, and for one bucket."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """The weights of one broadcast, in order. The three lists have equal length."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class ArealTransferEngine(WeightTransferEngine[GroupInfo, BucketInfo]):
    """Receives flat buckets over gloo or NCCL."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weights_whole = True
        """False from the start of an update until it is finished: the weights are a mixture."""
        self.first_folder = str(self.model_config.model)
        """What the server was started with; vLLM's own note of it changes with every folder it loads."""
        self._group: update_group.TransferGroup | None = None
        self._timeout_s = 0.0
        self._expected: frozenset[str] = frozenset()
        self._loaded: set[str] = set()

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Leave the previous group and join a new one; waits until all its ranks have joined."""
        if not update_group.is_trainer(init_info.master_address, os.environ):
            raise ValueError(f"{init_info.master_address} is not in {update_group.TRAINERS_VARIABLE}")
        self.shutdown()
        self._timeout_s = init_info.timeout_s
        parallel = self.parallel_config
        self._group = update_group.connect(
            init_info.master_address,
            init_info.master_port,
            rank=init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank,
            world_size=init_info.world_size,
            group_name=init_info.group_name,
            backend=init_info.backend,
            timeout_s=init_info.timeout_s,
        )

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            update_group.leave(group)

    def start_weight_update(self) -> None:
        """Start an update: until `finish_weight_update` the weights belong to no single policy."""
        self.weights_whole = False
        before = self._parameter_names()
        self._loaded = set()
        initialize_layerwise_reload(self.model)
        self._expected = before & self._parameter_names()  # scales of quantized weights are in no update

    def _parameter_names(self) -> frozenset[str]:
        """Of the kernels; within a reload, of a checkpoint."""
        return frozenset(name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The update of the base class without its synchronisation with an accelerator, which a CPU server lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Receive one bucket. After a failure each tensor is complete, but of one of two policies."""
        try:
            if self._group is None:
                raise RuntimeError("this worker is in no update group: /init_weight_transfer_engine comes first")
            num_bytes = layout.bucket_bytes(update_info.dtype_names, update_info.shapes)
            # A new one each time: vLLM keeps views of it until their layers are complete.
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            update_group.broadcast(self._group, buffer, self._timeout_s)
            weights = layout.views(buffer, update_info.dtype_names, update_info.shapes)
            for name, value in zip(update_info.names, weights, strict=True):
                check_finite(name, value)
            self._loaded |= self.model.load_weights(zip(update_info.names, weights, strict=True)) or set()
        except BaseException:
            self.give_up()
            self.shutdown()
            raise

    def finish_weight_update(self) -> None:
        """Use the new weights, if all were received."""
        missing = sorted(self._expected - self._loaded) or self._unfinished_layers()
        finalize_layerwise_reload(self.model, self.model_config)
        self.repack_tied_weights()
        if missing:
            raise RuntimeError(f"the update lacked {len(missing)} of the model's weights, {missing[0]} for one")
        self.weights_whole = True

    def _unfinished_layers(self) -> list[str]:
        """Layers that got some of their weights: vLLM makes one of several, as of q, k and v, and knows it as loaded
        when the first has come. Vocabularies and quantised weights are padded, so they never come whole. vLLM counts
        buffers too, of which some are in no checkpoint."""
        if self.model_config.quantization is not None:
            return []
        unfinished: list[str] = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            is_padded = hasattr(layer, "num_embeddings_padded")
            unstored = sum(layer.get_buffer(each).numel() for each in info.kernel_non_persistent_buffers)
            if info.can_load() and not is_padded and 0 < info.load_numel < info.load_numel_total - unstored:
                unfinished.append(name)
        return unfinished

    def repack_tied_weights(self) -> None:
        """Renew the copy of the weights with which a tied output layer computes on a CPU.

        vLLM's reload renews that of the layer which was loaded; the tied one would still use the old weights.
        """
        if self.device.type == "cpu":
            for layer in self.model.modules():
                if hasattr(layer, "num_embeddings_padded") and hasattr(layer, "cpu_linear"):
                    layer.quant_method.process_weights_after_loading(layer)

    def give_up(self) -> None:
        """End an update in the middle: layers without new weights get their old tensors back, so that the server runs
        and the next update starts from a clean state."""
        try:
            finalize_layerwise_reload(self.model, self.model_config)
            self.repack_tied_weights()
        except Exception:  # post-processing of an incomplete layer; the next update replaces it
            log.exception("putting the weights back after a failed update failed")


def check_finite(name: str, value: torch.Tensor) -> None:
    """Raise ValueError unless every number of a new weight is finite."""
    if not layout.is_finite(value):
        raise ValueError(f"weight {name} has numbers that are not finite")


def register() -> None:
    """Register the engine in vLLM under its name; may be repeated."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ArealTransferEngine)
