"""Weight updates of a server: from a checkpoint folder or a broadcast, by name, into a second copy of the weights.

The engine computes with the first copy meanwhile. Between two steps the copies are exchanged.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn

from areal.api.config.train import LoRAConfig
from areal.api.data import WeightSpec
from areal.api.errors import InputError, RequestError, WeightSyncError
from areal.inference.quantization import quantized_layers
from areal.models.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, DOWN, PREFIX, UP, adapter_weights
from areal.models.checkpoint_files import stored_weights, weight_files
from areal.models.stored_form import StoredForm, StoredPart
from areal.system.durable import COMPLETE, is_complete
from areal.system.folder_delta import change
from areal.weights.update_group import (
    UpdateGroup,
    bucket_bytes,
    bucket_views,
    check_trainer,
    is_finite,
    open_store,
)
from areal.weights.weight_files import tensors_of
from areal.weights.weight_image import WeightImage


@dataclass(frozen=True)
class AdapterChanges:
    """What a LoRA adapter makes of the weights of its base checkpoint: W + s B A, computed in float32."""

    scale: float
    values: dict[str, Tensor]
    """Keys are the names of peft without their prefix."""
    device: torch.device

    @classmethod
    def read(cls, folder: Path, base: Path, device: torch.device) -> Self:
        """The adapter in `folder`. Raises InputError when it does not fit the checkpoint in `base`."""
        config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        lora = LoRAConfig(rank=config["r"], alpha=config["lora_alpha"], rslora=bool(config["use_rslora"]))
        adapter_weights(folder, lora, base)
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            values = {name.removeprefix(PREFIX): file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
        return cls(lora.scale, values, device)

    def applied(self, name: str, value: Tensor) -> Tensor:
        """The weight `name`, whose value in the base checkpoint is `value`."""
        if name in self.values:  # a module that is trained whole
            return self.values[name]
        module = name.removesuffix(".weight")
        if (down := self.values.get(module + DOWN)) is None:
            return value
        return torch.addmm(value.to(self.device, torch.float32), self.values[module + UP], down, alpha=self.scale)


class ServedWeights:
    """The tensors of a model that an update may write, by Hugging Face name, a second tensor of each, and the server's
    end of an update group.

    An update that fails before `install` leaves the weights of the model as they are. Methods block; they are called
    one at a time, except `leave`. `install` and `check_complete` run in the engine thread, all others in other threads.
    """

    def __init__(self, model: nn.Module, *, base: Path | None = None, in_host_memory: bool = False) -> None:
        """`base`: the checkpoint that adapters are merged into; `in_host_memory`: the second copy of the weights of a
        GPU is in pinned memory of the host, and `install` copies it to the GPU."""
        self.base = base
        self._places: dict[str, tuple[Tensor, StoredPart]] = {}
        """Name of a stored weight -> the tensor of the model, and which part of it; tied ones under each name."""
        self._needed: dict[tuple[int, int], list[str]] = {}
        form = StoredForm(model)
        for own_name, tensor in model.state_dict(keep_vars=True).items():
            for part in form.parts(own_name):
                self._places[part.name] = tensor, part
                if isinstance(tensor, nn.Parameter):  # parameters are required, buffers are optional
                    self._needed.setdefault((id(tensor), part.offset), []).append(part.name)
        self._quantized = {id(layer.weight): layer for layer in quantized_layers(model)}
        self._device = next(iter(self._places.values()))[0].device
        self._in_host_memory = in_host_memory and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._second: dict[int, Tensor] = {}
        """The second copy, by id of the model's tensor. Before the first update of a tensor it does not exist."""
        self._received: dict[str, tuple[Tensor, ...]] = {}
        """The tensors of the model whose second copy has new values, by name in the update."""
        self._update_id = ""
        """The update that they belong to, as its sender named it."""
        self._changes: AdapterChanges | None = None
        self.merged: AdapterChanges | None = None
        """The adapter that is merged into the weights of the model; None without one."""
        self._group: UpdateGroup | None = None
        self._image: tuple[WeightImage, list[WeightSpec], str] | None = None
        """The weights that were published last, in host memory, for differences: as their trainer listed them, which
        decides their places, and the name of their version."""
        self._buffer: Tensor | None = None

    def allocate(self) -> None:
        """Allocate the second copy now; otherwise the first update does it."""
        for target, _ in self._places.values():
            for tensor in self._held(target):
                self._second_of(tensor)

    def check(self, name: str, shape: list[int]) -> None:
        """Raise RequestError unless the model has weight `name` of this shape."""
        if name not in self._places:
            raise RequestError(f"the model has no weight {name}", code="weights.do_not_fit")
        expected = self._places[name][1].shape
        if list(expected) != list(shape):
            message = f"weight {name} has shape {list(shape)}, the model's has {list(expected)}"
            raise RequestError(message, code="weights.do_not_fit")

    def missing(self, names: set[str]) -> list[str]:
        """Weights of the model that are not in `names`; one name of a tied pair is enough."""
        return [aliases[0] for aliases in self._needed.values() if not names.intersection(aliases)]

    def receive_value(self, name: str, value: Tensor) -> None:
        """Copy one weight into the second copy, converting device and dtype.

        RequestError unless every number is finite in the dtype of the model's weight.
        """
        target, part = self._places[name]
        if value.is_floating_point() != target.is_floating_point():
            message = f"weight {name} is {value.dtype}, the model's is {target.dtype}"
            raise RequestError(message, code="weights.do_not_fit")
        with torch.no_grad():
            if (layer := self._quantized.get(id(target))) is None:
                second = part.of(self._second_of(target)).copy_(value)
            else:
                second = value.to(target.device, target.dtype)
        if not is_finite(second):
            message = f"weight {name} has numbers that are not finite: the server keeps its weights"
            raise RequestError(message, code="weights.not_finite")
        if layer is not None:
            for tensor, new in zip(layer.held, layer.scheme.stored(second), strict=True):
                self._second_of(tensor).copy_(new)
        self._received[name] = (target,) if layer is None else layer.held

    def start(self, update_id: str) -> None:
        """What follows belongs to the update `update_id`: values of another one are forgotten."""
        if update_id != self._update_id:
            self._update_id, self._received, self._changes = update_id, {}, None

    def check_complete(self, update_id: str) -> None:
        """Raise RequestError, and forget what was received, unless every weight of the update was received."""
        self.start(update_id)
        if missing := self.missing(set(self._received)):
            self._received = {}
            raise RequestError(f"the update lacks {_listed(missing)}", code="weights.incomplete")

    def install(self) -> None:
        """Exchange the weights of the model and those received. Without a copy, unless the latter are on the host."""
        received, self._received = self._received, {}
        self.merged, self._changes = self._changes, None
        for target_id, target in {id(tensor): tensor for held in received.values() for tensor in held}.items():
            second = self._second[target_id]
            if self._in_host_memory:
                target.data.copy_(second, non_blocking=True)
            else:
                self._second[target_id] = target.data
                target.data = second
        if self._in_host_memory:
            torch.cuda.synchronize(self._device)  # the next update writes to the second copy

    def receive_folder(self, folder: Path) -> None:
        """Receive the safetensors checkpoint in `folder`, or the base checkpoint with the adapter that is in it.
        RequestError for a folder that cannot be used."""
        try:
            with ExitStack() as stack, self._on_own_stream():
                changes = None
                if (folder / ADAPTER_CONFIG).exists() and self.base is not None:
                    changes, folder = AdapterChanges.read(folder, self.base, self._device), self.base
                files = [stack.enter_context(safe_open(path, framework="pt")) for path in self._checked_files(folder)]
                for file in files:
                    for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                        value = file.get_tensor(name)
                        self.receive_value(name, changes.applied(name, value) if changes else value)
                self._changes = changes
        except BaseException as error:
            self._forget(error)
            raise

    def receive_contents(self, contents: Mapping[str, NDArray[np.uint8]]) -> None:
        """Receive a safetensors checkpoint whose files are in memory. RequestError for one that cannot be used."""
        self._received, self._changes = {}, None
        try:
            with self._on_own_stream():
                for file, content in contents.items():
                    for name, value in tensors_of(content) if file.endswith(".safetensors") else ():
                        self.check(name, list(value.shape))
                        self.receive_value(name, value)
        except BaseException as error:
            self._forget(error)
            raise

    def _forget(self, error: BaseException) -> None:
        """Forget what was received of a checkpoint. RequestError for an unexpected error: its files can be wrong in any
        way, and the error ends one request."""
        self._received = {}
        if isinstance(error, Exception) and not isinstance(error, RequestError):
            message = f"the checkpoint folder cannot be read: {str(error) or type(error).__name__}"
            raise RequestError(message, code="weights.bad_folder") from error

    def _checked_files(self, folder: Path) -> list[Path]:
        """The weight files of a checkpoint that has every weight of the model in its shape, by its headers."""
        if not folder.is_dir():
            raise RequestError(f"checkpoint folder {folder} does not exist", code="weights.bad_folder")
        if (folder / COMPLETE).exists() and not is_complete(folder):
            message = f"checkpoint folder {folder} is incomplete: its {COMPLETE} marker does not match its files"
            raise RequestError(message, code="weights.bad_folder")
        weights = stored_weights(folder)
        for name, weight in weights.items():
            self.check(name, weight.shape)
        if missing := self.missing(set(weights)):
            raise RequestError(f"checkpoint folder {folder} lacks {_listed(missing)}", code="weights.incomplete")
        return weight_files(folder)

    def _held(self, target: Tensor) -> tuple[Tensor, ...]:
        """The tensors in which the model keeps a weight."""
        layer = self._quantized.get(id(target))
        return (target,) if layer is None else layer.held

    def _second_of(self, tensor: Tensor) -> Tensor:
        second = self._second.get(id(tensor))
        if second is None:
            if self._in_host_memory:
                second = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            else:
                second = torch.empty_like(tensor.data, memory_format=torch.contiguous_format)
            self._second[id(tensor)] = second
        return second

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Copies inside do not wait for the steps of the engine on a GPU; they are complete afterwards."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

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

    @contextmanager
    def _joined(self) -> Iterator[UpdateGroup]:
        """The group, which is left after an error in the block. If `leave` was called meanwhile, that is an error."""
        if (group := self._group) is None:
            message = "this server is in no update group: call /init_weights_update_group first"
            raise RequestError(message, code="weights.no_group")
        try:
            yield group
            if self._group is not group:
                raise WeightSyncError("the update group was left meanwhile", code="weights.transfer_failed")
        except BaseException:
            self.leave()
            raise

    def receive(self, specs: list[WeightSpec]) -> None:
        """Receive one broadcast bucket.

        Raises RequestError for an unknown name, another shape, or numbers that are not finite. After any error the
        server leaves the group, so that the sender does not wait for it, and nothing of the update is left.
        """
        with self._joined() as group:
            for spec in specs:
                self.check(spec.name, spec.shape)
            buffer = self._buffer_of(bucket_bytes(specs))
            with self._on_own_stream():
                # `leave` in another thread ends the wait for a dead sender.
                group.broadcast(buffer, give_up=lambda: self._group is not group)
                for name, value in bucket_views(buffer, specs).items():
                    self.receive_value(name, value)

    def receive_published(self, specs: list[WeightSpec], published: str, deltas: Mapping[str, int]) -> None:
        """Receive all weights as a trainer publishes them, or the differences since earlier versions, into a copy in
        host memory, and from there. `published`, `deltas`: as in `WeightUpdate`.

        Raises what `receive` raises, and RequestError (weights.bad_delta) when the copy is of none of these versions or
        the differences make other weights: then the server needs all weights. The group is left after any error.
        """
        with self._joined() as group:
            for spec in specs:
                self.check(spec.name, spec.shape)
                bucket_bytes([spec])
            if self._image is None or self._image[1] != specs:
                self._image = WeightImage(specs, {}), specs, ""
            (image, _, held), self._image = self._image, None
            received = {} if deltas else dict(image.contents)
            received |= {base: np.empty(size, np.uint8) for base, size in deltas.items()}
            device = self._device if group.backend == "nccl" else torch.device("cpu")
            with self._on_own_stream():
                for content in received.values():
                    group.broadcast_bytes(content, device, give_up=lambda: self._group is not group)
            bases = list(deltas)
            try:
                for base in bases[bases.index(held) :] if held in bases else []:
                    change(image.contents, received[base].data)
            except InputError as error:
                raise RequestError(str(error), code=error.code) from error
            if image.listed().name(published.partition("-")[0]) != published:
                message = f"this server has {held or 'no weights'}, and the differences did not make {published} of it"
                raise RequestError(message, code="weights.bad_delta")
            self._image = image, specs, published
            with self._on_own_stream():
                for name, value in image.weights():
                    self.receive_value(name, value)

    def leave(self) -> None:
        """Leave the group, if any, and forget what was received from it."""
        group, self._group = self._group, None
        self._received = {}
        if group is not None:
            group.close()

    def _buffer_of(self, num_bytes: int) -> Tensor:
        if self._buffer is None or self._buffer.numel() < num_bytes:
            on_device = self._group is not None and self._group.backend == "nccl"
            device = self._device if on_device else torch.device("cpu")
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._buffer[:num_bytes]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and stored buffers; tied weights count once."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    for layer in quantized_layers(model):
        del tensors[id(layer.weight)]
        tensors |= {id(tensor): tensor for tensor in layer.held}
    return sum(tensor.nbytes for tensor in tensors.values())


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more weights"
