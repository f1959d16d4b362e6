"""Weight updates of a server: from a checkpoint folder or a broadcast, in place, by name.

The caller ensures that no step of the engine runs while weights are copied.
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
    """The tensors of a model that an update may write, by Hugging Face name, and the completeness of an update."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)  # tied weights appear under each name
        self._needed: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            if isinstance(tensor, nn.Parameter):  # parameters are required, buffers are optional
                self._needed.setdefault(id(tensor), []).append(name)

    def check(self, name: str, shape: list[int]) -> None:
        """Raise RequestError unless the model has weight `name` of this shape."""
        target = self._tensors.get(name)
        if target is None:
            raise RequestError(f"the model has no weight {name}", code="weights.do_not_fit")
        if list(target.shape) != list(shape):
            message = f"weight {name} has shape {list(shape)}, the model's has {list(target.shape)}"
            raise RequestError(message, code="weights.do_not_fit")

    def missing(self, names: set[str]) -> list[str]:
        """Weights of the model that are not in `names`; one name of a tied pair is enough."""
        return [aliases[0] for aliases in self._needed.values() if not names.intersection(aliases)]

    def copy(self, name: str, value: Tensor) -> None:
        """Overwrite weight `name` in place, converting device and dtype."""
        with torch.no_grad():
            self._tensors[name].copy_(value)


def load_weights_from_folder(model: nn.Module, folder: Path) -> None:
    """Copy the safetensors checkpoint in `folder` into `model`.

    Raises RequestError before the first copy, so the model is then unchanged.
    """
    if not folder.is_dir():
        raise RequestError(f"checkpoint folder {folder} does not exist", code="weights.bad_folder")
    if (folder / COMPLETE).exists() and not is_complete(folder):
        message = f"checkpoint folder {folder} is incomplete: its {COMPLETE} marker does not match its files"
        raise RequestError(message, code="weights.bad_folder")
    targets = WeightTargets(model)
    try:
        found, files = stored_weights(folder), weight_files(folder)
    except InputError as error:
        raise RequestError(str(error), code="weights.bad_folder") from error
    for name, weight in found.items():
        targets.check(name, weight.shape)
    if missing := targets.missing(set(found)):
        raise RequestError(f"checkpoint folder {folder} lacks {_listed(missing)}", code="weights.incomplete")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                targets.copy(name, file.get_tensor(name))


class WeightReceiver:
    """A server's end of the update group. Blocking; call it from a thread, one call at a time."""

    def __init__(self, model: nn.Module, device: torch.device | str) -> None:
        self._targets = WeightTargets(model)
        self._device = torch.device(device)
        self._group: UpdateGroup | None = None
        self._buffer: Tensor | None = None
        self._received: set[str] = set()

    @property
    def group_name(self) -> str:
        """Name of the current group; empty = none."""
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
        """Leave the old group and join a new one. Returns when all ranks have joined. Raises WeightSyncError."""
        if not 0 < rank < world_size:
            message = f"rank {rank} of a server must be between 1 and world_size - 1 = {world_size - 1}"
            raise RequestError(message, code="weights.no_group")
        self.leave()
        store = open_store(master_address, master_port, timeout_s=timeout_s)
        self._group = UpdateGroup(
            store, rank=rank, world_size=world_size, group_name=group_name, backend=backend, timeout_s=timeout_s
        )

    def receive(self, specs: list[WeightSpec]) -> None:
        """Receive one broadcast bucket and copy its weights into the model.

        Raises RequestError for an unknown name or another shape before anything is received. After any error the
        server leaves the group, so that the sender does not wait for it.
        """
        group = self._group
        if group is None:
            message = "this server is in no update group: call /init_weights_update_group first"
            raise RequestError(message, code="weights.no_group")
        try:
            for spec in specs:
                self._targets.check(spec.name, spec.shape)
            buffer = self._buffer_of(bucket_bytes(specs))
            # `leave` in another thread ends the wait for a dead sender.
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
        """Call after the last bucket: raises WeightSyncError unless every weight was received since the last call."""
        missing = self._targets.missing(self._received)
        self._received = set()
        if missing:
            raise WeightSyncError(f"the update lacks {_listed(missing)}", code="weights.incomplete")

    def leave(self) -> None:
        """Leave the group, if any."""
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
