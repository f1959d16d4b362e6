"""Weight updates of a server: from a checkpoint folder or a broadcast, in place, by name.

Every weight is checked before the model changes. The caller ensures that no step of the engine runs while weights are
copied.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from areal.api.data import WeightSpec
from areal.api.errors import RequestError, WeightSyncError
from areal.system.checkpoint_files import stored_weights, weight_files
from areal.system.durable import COMPLETE, is_complete
from areal.weights.stored_form import StoredForm
from areal.weights.update_group import (
    UpdateGroup,
    bucket_bytes,
    bucket_views,
    check_trainer,
    is_finite,
    open_store,
)


class ServedWeights:
    """The tensors of a model that an update may write, by Hugging Face name, and the server's end of an update group.

    `is_whole` is false while they are a mixture of two policies. Methods block; they are called one at a time, except
    `leave`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.is_whole = True
        self._tensors: dict[str, Tensor] = {}  # tied weights appear under each name
        self._needed: dict[int, list[str]] = {}
        form = StoredForm(model)
        for own_name, tensor in model.state_dict(keep_vars=True).items():
            for name, view in form.views(own_name, tensor):
                self._tensors[name] = view
                if isinstance(tensor, nn.Parameter):  # parameters are required, buffers are optional
                    self._needed.setdefault(id(view), []).append(name)
        self._backups: dict[int, Tensor] = {}
        """By id of the tensor; in host memory, allocated once."""
        self._kept: dict[int, str] = {}
        """Id and name of the tensors whose backup is the value before the current update."""
        self._was_whole = True
        self._device = next(iter(self._tensors.values())).device
        self._group: UpdateGroup | None = None
        self._buffer: Tensor | None = None
        self._received: set[str] = set()

    def check(self, name: str, shape: list[int]) -> None:
        """Raise RequestError unless the model has weight `name` of this shape."""
        target = self._tensors.get(name)
        if target is None:
            raise RequestError(f"the model has no weight {name}", code="weights.do_not_fit")
        if list(target.shape) != list(shape):
            message = f"weight {name} has shape {list(shape)}, the model's has {list(target.shape)}"
            raise RequestError(message, code="weights.do_not_fit")

    def check_value(self, name: str, value: Tensor) -> None:
        """Raise RequestError unless every number of `value` is finite in the dtype of weight `name`."""
        target = self._tensors[name]
        if value.is_floating_point() != target.is_floating_point():
            message = f"weight {name} is {value.dtype}, the model's is {target.dtype}"
            raise RequestError(message, code="weights.do_not_fit")
        if not is_finite(value.to(target.dtype)):
            message = f"weight {name} has numbers that are not finite: the server keeps its weights"
            raise RequestError(message, code="weights.not_finite")

    def missing(self, names: set[str]) -> list[str]:
        """Weights of the model that are not in `names`; one name of a tied pair is enough."""
        return [aliases[0] for aliases in self._needed.values() if not names.intersection(aliases)]

    def copy(self, name: str, value: Tensor) -> None:
        """Overwrite weight `name` in place, converting device and dtype. The weights are then not whole."""
        self.is_whole = False
        with torch.no_grad():
            self._tensors[name].copy_(value)

    def keep(self, name: str) -> None:
        """Keep the value of weight `name` for `roll_back`, unless this was done since the last `commit`."""
        if not self._kept:
            self._was_whole = self.is_whole
        tensor = self._tensors[name]
        if id(tensor) in self._kept:
            return
        if id(tensor) not in self._backups:  # pinned memory: a GPU copies to it at the speed of the bus
            self._backups[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        with torch.no_grad():
            self._backups[id(tensor)].copy_(tensor, non_blocking=True)
        self._kept[id(tensor)] = name

    def commit(self) -> None:
        """The weights are those of one policy again."""
        self.is_whole = True
        self._kept.clear()

    def roll_back(self) -> None:
        """Restore the values that were kept since the last `commit`."""
        if not self._kept:
            return
        for tensor_id, name in self._kept.items():
            self.copy(name, self._backups[tensor_id])
        self._kept.clear()
        self.is_whole = self._was_whole

    @contextmanager
    def checkpoint(self, folder: Path) -> Iterator[Callable[[], None]]:
        """Open the safetensors checkpoint in `folder`, check every weight, and yield the function that copies them.

        Reads each weight once before that function does. RequestError for a folder that cannot be used.
        """
        with ExitStack() as stack:
            try:
                files = [stack.enter_context(safe_open(path, framework="pt")) for path in self._checked_files(folder)]
                for file in files:
                    for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                        self.check_value(name, file.get_tensor(name))
            except RequestError:
                raise
            except Exception as error:  # one request: a file can be wrong in any way
                message = f"the checkpoint folder cannot be read: {str(error) or type(error).__name__}"
                raise RequestError(message, code="weights.bad_folder") from error

            def copy_all() -> None:
                self.roll_back()  # an update over the collective that was not completed
                for file in files:
                    for name in file.keys():  # noqa: SIM118
                        self.copy(name, file.get_tensor(name))

            yield copy_all

    def _checked_files(self, folder: Path) -> list[Path]:
        """The weight files of a checkpoint that has every weight of the model in its shape, by its headers."""
        if not folder.is_dir():
            raise RequestError(f"checkpoint folder {folder} does not exist", code="weights.bad_folder")
        if (folder / COMPLETE).exists() and not is_complete(folder):
            message = f"checkpoint folder {folder} is incomplete: its {COMPLETE} marker does not match its files"
            raise RequestError(message, code="weights.bad_folder")
        found = stored_weights(folder)
        for name, weight in found.items():
            self.check(name, weight.shape)
        if missing := self.missing(set(found)):
            raise RequestError(f"checkpoint folder {folder} lacks {_listed(missing)}", code="weights.incomplete")
        return weight_files(folder)

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
        """Leave the old group and join a new one. Returns when all ranks have joined.

        RequestError unless `master_address` is that of a trainer, else WeightSyncError.
        """
        if not 0 < rank < world_size:
            message = f"rank {rank} of a server must be between 1 and world_size - 1 = {world_size - 1}"
            raise RequestError(message, code="weights.no_group")
        check_trainer(master_address)
        self.leave()
        store = open_store(master_address, master_port, timeout_s=timeout_s)
        self._group = UpdateGroup(
            store, rank=rank, world_size=world_size, group_name=group_name, backend=backend, timeout_s=timeout_s
        )

    def receive(self, specs: list[WeightSpec]) -> None:
        """Receive one broadcast bucket and copy its weights into the model.

        Raises RequestError for an unknown name, another shape, or numbers that are not finite. After any error the
        model has the weights from before the update, and the server leaves the group, so that the sender does not wait
        for it.
        """
        group = self._group
        if group is None:
            message = "this server is in no update group: call /init_weights_update_group first"
            raise RequestError(message, code="weights.no_group")
        try:
            for spec in specs:
                self.check(spec.name, spec.shape)
            buffer = self._buffer_of(bucket_bytes(specs))
            # `leave` in another thread ends the wait for a dead sender.
            group.broadcast(buffer, give_up=lambda: self._group is not group)
            values = bucket_views(buffer, specs)
            for name, value in values.items():
                self.check_value(name, value)
            for name, value in values.items():
                self.keep(name)
                self.copy(name, value)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the engine reads the weights on another stream
        except BaseException:
            self.leave()
            self.roll_back()
            raise
        self._received.update(spec.name for spec in specs)

    def finish(self) -> None:
        """Call after the last bucket. Unless every weight was received, restores them and raises WeightSyncError."""
        missing = self.missing(self._received)
        self._received = set()
        if missing:
            self.roll_back()
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
