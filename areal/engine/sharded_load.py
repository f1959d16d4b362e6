"""Fills a model that was built without memory: each rank reads, or draws, only the part that it keeps."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from areal.api.errors import ConfigError, InputError
from areal.engine.region import Region, local_part, region_of
from areal.system.checkpoint_files import weight_files
from areal.weights.stored_form import StoredForm, StoredPart

HEAD = "score.weight"


@torch.no_grad()
def read_weights(model: PreTrainedModel, form: StoredForm, folder: Path, *, head_seed: int | None) -> None:
    """Fill every parameter and saved buffer of an allocated model from the safetensors files in `folder`.

    `head_seed`: seed of a critic's head that the checkpoint lacks; None = a missing head is an error. Reads the part of
    this rank alone. A file is opened for one weight at a time, because pages that were read count as memory of the
    process while it is mapped. Raises InputError when a weight is missing or has another shape.
    """
    places = _places(folder)
    by_tensor: dict[int, list[str]] = {}  # tied weights have several names
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    missing: list[str] = []
    for key, names in by_tensor.items():
        target, parts = tensors[key], form.parts(names[0])
        if len(parts) > 1:
            missing += _read_parts(target, parts, places, model.base_model_prefix, folder)
            continue
        found = _stored_name([form.parts(name)[0].name for name in names], places, model.base_model_prefix)
        if found is not None:
            _read_rows(target, places[found], found, folder)
        elif names == [HEAD] and head_seed is not None:
            draw_head(target, head_seed)
        else:
            missing.append(names[0])
    raise_missing(folder, missing)


def raise_missing(folder: Path, names: list[str]) -> None:
    """Raise InputError when a checkpoint lacks weights of the model."""
    if names:
        message = f"checkpoint {folder}: {len(names)} weights of the model are missing, among them {min(names)}"
        raise InputError(message, code="model.weights_do_not_fit")


def _places(folder: Path) -> dict[str, Path]:
    """The file of each stored weight."""
    places: dict[str, Path] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    return places


def _stored_name(names: list[str], places: Mapping[str, Path], prefix: str) -> str | None:
    """The name in the checkpoint, which may be that of the model without its head."""
    short = [name.removeprefix(f"{prefix}.") for name in names]
    return next((name for name in [*names, *short] if name in places), None)


def _read_parts(
    target: Tensor, parts: Sequence[StoredPart], places: Mapping[str, Path], prefix: str, folder: Path
) -> list[str]:
    """Read the stored weights that have elements of this rank. Returns the names of those that are missing."""
    missing: list[str] = []
    for part in parts:
        found = _stored_name([part.name], places, prefix)
        if found is None:
            missing.append(part.name)
        elif len(_own_elements(target, part)[0]):
            with safe_open(places[found], framework="pt") as opened:
                stored = opened.get_tensor(found)
            if tuple(stored.shape) != part.shape:
                raise _other_shape(folder, found, stored.shape, part.shape)
            copy_stored_part(target, part, stored)
    return missing


def copy_stored_part(target: Tensor, part: StoredPart, stored: Tensor) -> None:
    """Copy a stored weight into this rank's elements of the parameter that contains it."""
    own, skipped = _own_elements(target, part)
    own.copy_(stored.flatten()[skipped : skipped + len(own)])


def _own_elements(target: Tensor, part: StoredPart) -> tuple[Tensor, int]:
    """This rank's elements of a stored weight, and the number of elements before them in the stored weight."""
    (rows, *others), own = region_of(target), local_part(target)
    if [each.stop - each.start for each in others] != list(target.shape[1:]):
        message = f"{part.name} is a part of a weight whose columns several tensor ranks split: leave t out"
        raise ConfigError(message, code="model.cannot_split")
    flat, begin = own.view(-1), rows.start * math.prod(target.shape[1:])
    start = max(part.offset, begin)
    end = max(start, min(part.offset + part.size, begin + flat.numel()))
    return flat[start - begin : end - begin], start - part.offset


def _other_shape(folder: Path, name: str, found: Sequence[int], wanted: Sequence[int]) -> InputError:
    shapes = f"{name} has shape {list(found)}, but {list(wanted)} according to config.json"
    return InputError(f"checkpoint {folder}: {shapes}", code="model.weights_do_not_fit")


def _read_rows(target: Tensor, file: Path, name: str, folder: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        stored = opened.get_slice(name)
        if (found := list(stored.get_shape())) != list(target.shape):
            raise _other_shape(folder, name, found, target.shape)
        if target.ndim == 0:
            target.copy_(opened.get_tensor(name))
        else:
            _copy_own(target, lambda region: stored[region])


def _copy_own(target: Tensor, part_of: Callable[[Region], Tensor]) -> None:
    """Copy this rank's part of a parameter."""
    region, own = region_of(target), local_part(target)
    assert own.shape == torch.Size([each.stop - each.start for each in region]), "the parameter is split otherwise"
    if own.numel():
        own.copy_(part_of(region))


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw random weights by the rules of the architecture: equal for every number of ranks and every stored dtype."""
    targets = dict(model.named_parameters())
    for name, values in drawn_parameters(model, seed):
        _copy_own(targets[name], values.__getitem__)


@torch.no_grad()
def drawn_parameters(model: PreTrainedModel, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random weights, of which the model keeps none; tied ones once.

    Each module has its own random numbers, from `seed` and its name. One module is whole in memory at a time.
    """
    drawn: set[int] = set()
    for path, module, owner in _owned_modules(model):
        targets = {name: value for name, value in module._parameters.items() if value is not None}
        targets = {name: value for name, value in targets.items() if id(value) not in drawn}  # tied
        drawn.update(map(id, targets.values()))
        if not targets:
            continue
        whole = {
            name: nn.Parameter(torch.full(value.shape, torch.nan, device="cpu")) for name, value in targets.items()
        }
        with _replaced(module, whole), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed_of(seed, path))
            owner._init_weights(module)
        for name in targets:
            values = whole[name].detach()
            if values.isnan().any():
                message = (
                    f"init_from_scratch: {type(model).__name__} has no rule for the initial value of {path}.{name}"
                )
                raise ConfigError(message, code="model.unsupported")
            yield f"{path}.{name}", values


@torch.no_grad()
def draw_head(weight: Tensor, seed: int) -> None:
    """Draw a critic's head [1, hidden]: normal with a standard deviation of 1 / (hidden + 1)."""
    generator = torch.Generator().manual_seed(seed_of(seed, HEAD))
    values = torch.randn(weight.shape, generator=generator) / (weight.shape[1] + 1)
    _copy_own(weight, values.__getitem__)


@torch.no_grad()
def compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that checkpoints do not contain. ConfigError for a model without a rule for one."""
    for path, module, owner in _owned_modules(model):
        names = module._non_persistent_buffers_set
        for name in names:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = torch.full(buffer.shape, _unset(buffer), dtype=buffer.dtype, device=device)
        if not names:
            continue
        with _replaced(module, {}):
            owner._init_weights(module)
        for name in names:
            buffer = module._buffers[name]
            if buffer is not None and _is_unset(buffer).any():
                message = f"{type(model).__name__} has the buffer {path}.{name}, which several ranks cannot compute"
                raise ConfigError(message, code="model.unsupported")


@contextmanager
def _replaced(module: nn.Module, own: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside the block the module has the parameters `own`, and others of it and of its children have no memory.

    A rule may also draw weights of children, and on sharded ones that is a collective.
    """
    kept = [
        (one, {name: value for name, value in one._parameters.items() if value is not None}) for one in module.modules()
    ]
    for one, parameters in kept:
        for name, value in parameters.items():
            one._parameters[name] = nn.Parameter(torch.empty(value.shape, device="meta"))
    module._parameters.update(own)
    try:
        yield
    finally:
        for one, parameters in kept:
            one._parameters.update(parameters)


def _owned_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Path, module, and the innermost model around it: the rules of a model are not those of a tower inside it."""
    owners: dict[str, PreTrainedModel] = {}
    for path, module in model.named_modules():
        owners[path] = module if isinstance(module, PreTrainedModel) else owners[path.rpartition(".")[0]]
        yield path, module, owners[path]


def _is_unset(buffer: Tensor) -> Tensor:
    return buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer)


def _unset(buffer: Tensor) -> float:
    """What no rule computes."""
    if buffer.dtype == torch.bool:
        return False
    return torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min


def seed_of(seed: int, path: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
