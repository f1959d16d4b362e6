"""Loading of Hugging Face models into the trainer: location, construction, refusal of unsupported architectures."""

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.utils import logging as hf_logging

from areal.api.config import TrainEngineConfig
from areal.api.errors import ArealError, ConfigError, InputError
from areal.engine.mesh import Region, local_part, region_of
from areal.engine.packed_attention import require_known_layers, require_packed_attention
from areal.models.checkpoint_files import weight_files
from areal.models.recurrent_layers import PackedStates, has_states
from areal.models.stored_form import StoredForm, StoredPart, without_progress_bar

# ----------------------------------------------------------------------------------------------------------------------
# Fills a model that was built without memory: each rank reads, or draws, only the part that it keeps.

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
        stored = _stored_name([form.parts(name)[0].name for name in names], places, model.base_model_prefix)
        if stored is not None:
            _read_rows(target, places[stored], stored, folder)
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
        stored_name = _stored_name([part.name], places, prefix)
        if stored_name is None:
            missing.append(part.name)
        elif len(_own_elements(target, part)[0]):
            with safe_open(places[stored_name], framework="pt") as opened:
                stored = opened.get_tensor(stored_name)
            if tuple(stored.shape) != part.shape:
                raise _other_shape(folder, stored_name, stored.shape, part.shape)
            copy_stored_part(target, part, stored)
    return missing


def copy_stored_part(target: Tensor, part: StoredPart, stored: Tensor) -> None:
    """Copy a stored weight into this rank's elements of the parameter that contains it."""
    local, skipped = _own_elements(target, part)
    local.copy_(stored.flatten()[skipped : skipped + len(local)])


def _own_elements(target: Tensor, part: StoredPart) -> tuple[Tensor, int]:
    """This rank's elements of a stored weight, and the number of elements before them in the stored weight."""
    (rows, *others), local = region_of(target), local_part(target)
    if [each.stop - each.start for each in others] != list(target.shape[1:]):
        message = f"{part.name} is a part of a weight whose columns several tensor ranks split: leave t out"
        raise ConfigError(message, code="model.cannot_split")
    flat, begin = local.view(-1), rows.start * math.prod(target.shape[1:])
    start = max(part.offset, begin)
    end = max(start, min(part.offset + part.size, begin + flat.numel()))
    return flat[start - begin : end - begin], start - part.offset


def _other_shape(folder: Path, name: str, present: Sequence[int], wanted: Sequence[int]) -> InputError:
    shapes = f"{name} has shape {list(present)}, but {list(wanted)} according to config.json"
    return InputError(f"checkpoint {folder}: {shapes}", code="model.weights_do_not_fit")


def _read_rows(target: Tensor, file: Path, name: str, folder: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        stored = opened.get_slice(name)
        if (present := list(stored.get_shape())) != list(target.shape):
            raise _other_shape(folder, name, present, target.shape)
        if target.ndim == 0:
            target.copy_(opened.get_tensor(name))
        else:
            _copy_own(target, lambda region: stored[region])


def _copy_own(target: Tensor, part_of: Callable[[Region], Tensor]) -> None:
    """Copy this rank's part of a parameter."""
    region, local = region_of(target), local_part(target)
    assert local.shape == torch.Size([each.stop - each.start for each in region]), "the parameter is split otherwise"
    if local.numel():
        local.copy_(part_of(region))


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
        with _replaced_parameters(module, whole), torch.random.fork_rng(devices=[]), torch.device("cpu"):
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
    unset: list[tuple[str, nn.Module, PreTrainedModel, str]] = []
    for path, module, owner in _owned_modules(model):
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers[name]) is not None:
                module._buffers[name] = torch.full(buffer.shape, _unset(buffer), dtype=buffer.dtype, device=device)
                unset.append((path, module, owner, name))
    for path, module, owner, name in unset:
        for ruled in (module, owner):  # some models have a rule for the buffers of all layers
            if _is_unset(cast("Tensor", module._buffers[name])).any():
                with _replaced_parameters(ruled, {}):
                    owner._init_weights(ruled)
        if _is_unset(cast("Tensor", module._buffers[name])).any():
            message = f"{type(model).__name__} has the buffer {path}.{name}, which several ranks cannot compute"
            raise ConfigError(message, code="model.unsupported")


@contextmanager
def _replaced_parameters(module: nn.Module, own_parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside the block the module has `own_parameters`, and others of it and of its children have no memory.

    A rule may also draw weights of children, and on sharded ones that is a collective.
    """
    kept = [
        (part, {name: value for name, value in part._parameters.items() if value is not None})
        for part in module.modules()
    ]
    for part, parameters in kept:
        for name, value in parameters.items():
            part._parameters[name] = nn.Parameter(torch.empty(value.shape, device="meta"))
    module._parameters.update(own_parameters)
    try:
        yield
    finally:
        for part, parameters in kept:
            part._parameters.update(parameters)


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


def resolve_model_folder(path: str) -> Path:
    """Return the local folder of a checkpoint: `path` itself, or the hub's cache. Raises InputError otherwise."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            message = f"model folder {folder} has no config.json: name a Hugging Face checkpoint folder"
            raise InputError(message, code="model.not_found")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (OSError, ValueError, HFValidationError) as error:  # absent, offline, not a name
        reason = str(error).splitlines()[0]
        message = f"model {path!r} is neither a local folder nor available from the hub ({reason})"
        raise InputError(message, code="model.not_found") from error


def load_model(
    folder: Path,
    config: TrainEngineConfig,
    *,
    is_critic: bool,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
    is_empty: bool = False,
    takes_images: bool = False,
) -> PreTrainedModel:
    """Build the model in `folder` on the CPU, equal on every rank. A trained critic without a head gets a new one.

    `is_empty`: without memory, on the meta device; `fill_model` gives it weights after it was sharded.
    `takes_images`: its parts for images are used; else they are frozen in the type of the checkpoint.
    """
    model_config = read_config(folder, is_critic=is_critic)
    text_config, stored = model_config.get_text_config(), model_config.dtype or torch.float32
    for name, value in text_config.to_dict().items() if config.disable_dropout else ():
        if isinstance(value, float) and (name.endswith("dropout") or name.endswith("_pdrop")):
            setattr(text_config, name, 0.0)
    auto = AutoModelForSequenceClassification if is_critic else AutoModelForCausalLM
    if getattr(model_config, "vision_config", None) is not None:  # not every configuration has the name
        auto = AutoModelForImageTextToText
        if is_critic:
            raise _unsupported(f"model type {model_config.model_type} has a vision tower, so it cannot be a critic")
    with _reported_errors(folder):
        if is_empty or config.init_from_scratch:
            with torch.random.fork_rng(devices=[]), torch.device("meta" if is_empty else "cpu"):
                model = auto.from_config(model_config, attn_implementation=attention, dtype=dtype)
            if not is_empty:
                draw_weights(model, seed)
        else:
            model = _from_weights(auto, folder, model_config, attention, dtype, _head_seed(config, is_critic, seed))
    if model.base_model is model and hasattr(model, "model"):  # Llama4ForCausalLM of transformers 5.23 names no decoder
        model.base_model_prefix = "model"
    states = PackedStates(model, device, getattr(torch, config.compute_dtype), in_compiled=config.compile)
    _refuse_unsupported_model(model, states, is_critic=is_critic)
    if takes_images:
        model.set_attn_implementation({"text_config": attention, "vision_config": "sdpa"})
        return model
    for tower in other_towers(model):  # in the type of the checkpoint: an export has the same bits
        tower.requires_grad_(False).to(stored)
    return model


def other_towers(model: PreTrainedModel) -> list[nn.Module]:
    """The parts of a model for images and text that only images use."""
    used = [model.base_model, model.get_decoder(), model.get_output_embeddings()]
    if getattr(model.config, "vision_config", None) is None:
        return []
    children = [*model.children(), *model.base_model.children()]
    return [child for child in children if not any(child is tower for tower in used)]


def fill_model(
    model: PreTrainedModel,
    form: StoredForm,
    folder: Path,
    config: TrainEngineConfig,
    *,
    is_critic: bool,
    seed: int,
    device: torch.device,
) -> None:
    """Allocate an empty model that is sharded, on `device`, and give this rank its part of the weights."""
    with _reported_errors(folder):
        model.to_empty(device=device)
        compute_buffers(model, device)
        if config.init_from_scratch:
            draw_weights(model, seed)
        else:
            read_weights(model, form, folder, head_seed=_head_seed(config, is_critic, seed))


def _head_seed(config: TrainEngineConfig, is_critic: bool, seed: int) -> int | None:
    """Seed of a new head; None for a frozen model, whose head would stay random."""
    return seed if is_critic and config.optimizer is not None else None


@contextmanager
def _reported_errors(folder: Path) -> Iterator[None]:
    """InputError for a model that cannot be loaded; no output of transformers."""
    with _quiet_transformers():
        try:
            yield
        except ArealError:
            raise
        except KeyError as error:  # a table of attention classes
            raise _unsupported(
                f"the model in {folder} knows no attention called {error}, so it cannot train"
            ) from error
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            message = f"model in {folder} cannot be loaded: {_first_lines(error)}"
            raise InputError(message, code="model.not_loadable") from error


def shard_units(model: PreTrainedModel, class_names: list[str] | None) -> list[nn.Module]:
    """The modules that FSDP shards separately: those of the named classes, by default the model's blocks. Nested
    ones are the innermost."""
    wanted = set(class_names if class_names is not None else model._no_split_modules or [])
    units = [module for module in model.modules() if type(module).__name__ in wanted]
    missing = wanted - {type(module).__name__ for module in units}
    if missing and class_names is not None:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"fsdp.wrap_policy.transformer_layer_cls_to_wrap names {', '.join(sorted(missing))}, but the model has "
            f"only {', '.join(known)}",
            code="model.unknown_layer_class",
        )
    return [unit for unit in units if not any(part in units for part in unit.modules() if part is not unit)]


def enable_checkpointing(model: PreTrainedModel, *, is_selective: bool) -> None:
    """Recompute the activations of every block in the backward pass; `is_selective`: without products of matrices."""
    options: dict[str, Any] = {"use_reentrant": False}
    if is_selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _kept_or_not)
    try:
        if hasattr(model, "activation_checkpointing_enable"):  # renamed in transformers 5.2x
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    except ValueError as error:
        raise ConfigError(f"gradient_checkpointing=true: {error}", code="model.unsupported") from error


def require_compiler(device: torch.device) -> None:
    """Raise ConfigError when torch.compile lacks the C++ compiler that it needs on the CPU."""
    name = os.environ.get("CXX") or "g++"
    if device.type == "cpu" and shutil.which(name) is None:
        message = f"compile=true needs a C++ compiler, and there is no program {name}: install it or set CXX"
        raise ConfigError(message, code="model.no_compiler")


def _kept_or_not(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Whether a selectively checkpointed block keeps the result of an operator: of attention and matrix products."""
    name = getattr(operator, "__name__", str(operator))
    is_kept = name.startswith(("mm.", "addmm.", "bmm.")) or "attention" in name or "_varlen_attn" in name
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def drawn_weights(config: PretrainedConfig, *, is_critic: bool, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The random weights of a new model, equal to those that `load_model` draws, by their names in checkpoints."""
    auto = AutoModelForSequenceClassification if is_critic else AutoModelForCausalLM
    with _quiet_transformers(), torch.device("meta"):
        model = auto.from_config(config)
    form = StoredForm(model)
    for name, values in drawn_parameters(model, seed):
        yield from form.views(name, values)


def read_config(folder: Path, *, is_critic: bool) -> PretrainedConfig:
    """The configuration of a checkpoint. Raises InputError when transformers cannot use it."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        message = f"config.json in {folder} cannot be used: {_first_lines(error)}"
        raise InputError(message, code="model.not_loadable") from error
    if is_critic:
        config.num_labels = 1
    return config


def _from_weights(
    auto: Any, folder: Path, config: PretrainedConfig, attention: str, dtype: torch.dtype, head_seed: int | None
) -> PreTrainedModel:
    model, info = auto.from_pretrained(
        folder,
        config=config,
        attn_implementation=attention,
        dtype=dtype,
        output_loading_info=True,
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # refused below, in one line
    )
    for name, present, wanted in sorted(info["mismatched_keys"]):
        message = f"checkpoint {folder}: {name} has shape {list(present)}, but {list(wanted)} according to config.json"
        raise InputError(message, code="model.weights_do_not_fit")
    missing = sorted(info["missing_keys"])
    if head_seed is not None and missing == [HEAD]:
        draw_head(model.get_parameter(HEAD), head_seed)
        missing = []
    raise_missing(folder, missing)  # transformers would continue with random numbers
    return model


class _States(BaseModelOutputWithPast):
    """The output of a decoder, None for what is asked of it besides hidden states."""

    def __getattr__(self, name: str) -> None:
        return None


@dataclass(frozen=True, slots=True)
class LogitsRule:
    """What a model does with the products of its head: softcap * tanh(factor * product / softcap)."""

    factor: float
    softcap: float | None
    """None: factor * product."""


def logits_rule(model: PreTrainedModel) -> LogitsRule:
    """The factor (Cohere, Granite, MiniCPM) or cap (Gemma) of a model's logits.

    The model's forward function shows it, with numbers in place of the decoder's states. ConfigError for another rule.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    states = torch.tensor([[[0.025, -0.05, 1.0]]]) * (cap or 40.0)
    with ExitStack() as replaced:
        for decoder in {model.base_model, model.get_decoder()}:
            replaced.enter_context(
                _replaced_forward(decoder, lambda *args, **kwargs: _States(last_hidden_state=states))
            )
        head = cast("nn.Module", model.get_output_embeddings())
        replaced.enter_context(_replaced_forward(head, lambda states: states))
        try:
            logits = model(input_ids=torch.zeros((1, 1), dtype=torch.int64)).logits.double()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise _unsupported(f"the logits of {name} cannot be checked: {_first_lines(error)}") from error
    products = logits if cap is None else logits.div(cap).atanh() * cap
    factors = products.div(states)
    factor = factors[0, 0, 0].item()  # the most exact one
    if not torch.allclose(factors, factors.mean(), rtol=1e-6 if cap is None else 1e-5):
        raise _unsupported(f"{name} changes its logits by more than a factor and final_logit_softcapping")
    if factor == 1.0 and getattr(config, "logit_scale", None) not in (None, 1.0):
        raise _unsupported(f"{name} of transformers ignores the logit_scale of its configuration")
    return LogitsRule(1.0 if abs(factor - 1.0) < 1e-6 else factor, cap)


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Use another forward function while it is active."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _refuse_unsupported_model(model: PreTrainedModel, states: PackedStates, *, is_critic: bool) -> None:
    name = type(model).__name__
    if is_critic and not isinstance(model._modules.get("score"), nn.Linear):
        raise _unsupported(f"{name} has no linear head called score, so it cannot be a critic")
    if not is_critic and not isinstance(model.get_output_embeddings(), nn.Linear):
        raise _unsupported(f"{name} has no linear output head, which the FSDP engine needs for log-probabilities")
    if not (model._supports_attention_backend or has_states(model.config)):
        raise _unsupported(f"{name} accepts no custom attention function, which packed rows need")
    require_known_layers(model, states.layers)
    require_packed_attention(model, states.layers)


def _unsupported(message: str) -> ConfigError:
    return ConfigError(message, code="model.unsupported")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar and no report of missing or extra weights, which are checked here."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        with without_progress_bar():
            yield
    finally:
        hf_logging.set_verbosity(verbosity)


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
