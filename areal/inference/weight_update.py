"""Owns how a server takes in new weights: from a checkpoint folder or from a broadcast, in place, by name.

Nothing here knows requests or scheduling: the caller makes sure that no step runs while weights are copied.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from areal.api.data import WeightSpec
from areal.api.errors import InputError, RequestError, WeightSyncError
from areal.system.checkpoint_files import stored_weights, weight_files
from areal.system.durable import COMPLETE, is_complete
from areal.weights.update_group import UpdateGroup, bucket_bytes, bucket_views, open_store


class WeightTargets:
    """The tensors of a model that an update may write, by Hugging Face name, and what makes an update whole."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)  # tied weights appear under each name
        self._needed: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            if isinstance(tensor, nn.Parameter):  # buffers may come, parameters must
                self._needed.setdefault(id(tensor), []).append(name)

    def check(self, name: str, shape: list[int]) -> None:
        """Raise RequestError unless the model has weight `name` of this shape."""
        target = self._tensors.get(name)
        if target is None:
            raise RequestError(f"the model has no weight called {name}")
        if list(target.shape) != list(shape):
            raise RequestError(f"weight {name} has shape {list(shape)}, the model's has {list(target.shape)}")

    def missing(self, names: set[str]) -> list[str]:
        """Weights of the model that `names` leaves out; one name of a tied pair is enough."""
        return [aliases[0] for aliases in self._needed.values() if not names.intersection(aliases)]

    def copy(self, name: str, value: Tensor) -> None:
        """Overwrite weight `name` in place, converting device and dtype."""
        with torch.no_grad():
            self._tensors[name].copy_(value)


def load_weights_from_folder(model: nn.Module, folder: Path) -> None:
    """Copy the safetensors checkpoint in `folder` into `model`.

    Everything that can be wrong with the folder is found before the first copy, so a RequestError
    means that the model is unchanged.
    """
    if not folder.is_dir():
        raise RequestError(f"checkpoint folder {folder} does not exist")
    if (folder / COMPLETE).exists() and not is_complete(folder):
        raise RequestError(f"checkpoint folder {folder} is incomplete: its {COMPLETE} marker does not match its files")
    targets = WeightTargets(model)
    try:
        found, files = stored_weights(folder), weight_files(folder)
    except InputError as error:
        raise RequestError(str(error)) from error
    for name, weight in found.items():
        targets.check(name, weight.shape)
    if missing := targets.missing(set(found)):
        raise RequestError(f"checkpoint folder {folder} lacks {_listed(missing)}")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                targets.copy(name, file.get_tensor(name))


class WeightReceiver:
    """A server's end of the update group. Blocking: call it from a thread, one call at a time."""

    def __init__(self, model: nn.Module, device: torch.device | str) -> None:
        self._targets = WeightTargets(model)
        self._device = torch.device(device)
        self._group: UpdateGroup | None = None
        self._buffer: Tensor | None = None
        self._received: set[str] = set()

    @property
    def group_name(self) -> str:
        """Name of the group this server is in; empty = none."""
        return self._group.group_name if self._group else ""

    def join(
        self,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join a new group, leaving the old one. Returns when all ranks are there; WeightSyncError otherwise."""
        if not 0 < rank < world_size:
            raise RequestError(f"rank {rank} of a server must lie between 1 and world_size - 1 = {world_size - 1}")
        self.leave()
        store = open_store(master_address, master_port, is_master=False, timeout_s=timeout_s)
        self._group = UpdateGroup(
            store, rank=rank, world_size=world_size, group_name=group_name, backend=backend, timeout_s=timeout_s
        )

    def receive(self, specs: list[WeightSpec]) -> None:
        """Take in one broadcast bucket and copy its weights into the model.

        An unknown name or another shape is a RequestError before anything is received. The group is left then, as
        after any failure, so that the sender does not wait for this server.
        """
        group = self._group
        if group is None:
            raise RequestError("this server is in no update group: call /init_weights_update_group first")
        try:
            for spec in specs:
                self._targets.check(spec.name, spec.shape)
            buffer = self._buffer_of(bucket_bytes(specs))
            # `leave` of another thread ends the wait for a sender that has died.
            group.broadcast(buffer, give_up=lambda: self._group is not group)
            for name, value in bucket_views(buffer, specs).items():
                self._targets.copy(name, value)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the engine reads the weights on another stream
        except BaseException:
            self.leave()
            raise
        self._received.update(spec.name for spec in specs)

    def finish(self) -> None:
        """The last bucket was received: raise WeightSyncError unless every weight has come since the last finish."""
        missing = self._targets.missing(self._received)
        self._received = set()
        if missing:
            raise WeightSyncError(f"the update lacks {_listed(missing)}")

    def leave(self) -> None:
        """Leave the group; without one nothing happens."""
        group, self._group = self._group, None
        self._received = set()
        if group is not None:
            group.close()

    def _buffer_of(self, num_bytes: int) -> Tensor:
        if self._buffer is None or self._buffer.numel() < num_bytes:
            on_device = self._group is not None and self._group.backend == "nccl"
            device = self._device if on_device else torch.device("cpu")
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._buffer[:num_bytes]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more weights"
