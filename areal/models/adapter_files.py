"""Folders of LoRA adapters in the format of peft, and whether one fits a configuration and its base model.

Reads the configuration, headers and samples of the weights: milliseconds for any model.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.api.config.train import ALL_LINEAR, OUTPUT_HEAD, LoRAConfig, is_target
from areal.api.errors import ConfigError, InputError
from areal.models.checkpoint_files import StoredWeight, file_header, stored_weights, weight_files
from areal.system.durable import open_regular

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_KEY = "areal_base"
"""Key in the metadata of the weights: the fingerprint of the base model."""
PREFIX = "base_model.model."
"""Begins the names of all weights of an adapter."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
BASE_COPY = ".base_layer.weight"
"""Ends the name of a weight of the base model, which peft stores with the adapter of an output head."""
_SAMPLE_BYTES = 4096
_NEUTRAL: dict[str, Any] = {
    "bias": "none", "use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "use_qalora": False,
    "rank_pattern": {}, "alpha_pattern": {}, "target_parameters": [], "layers_to_transform": [],
    "layer_replication": [], "trainable_token_indices": [], "alora_invocation_tokens": [],
}  # fmt: skip
"""Options of peft that change the result and that areal does not have, with the value besides null that does not."""


def base_fingerprint(folder: Path) -> str:
    """32 hexadecimal digits of the names, shapes, dtypes and samples of all weights of a checkpoint.

    The samples are the first, middle and last 4 KiB of each weight. Training changes all of them.
    """
    headers = {file: file_header(file) for file in weight_files(folder)}
    digest = hashlib.blake2b(digest_size=16)
    for name, file in sorted((name, file) for file, header in headers.items() for name in header.weights):
        weight, (begin, end) = headers[file].weights[name], headers[file].places[name]
        digest.update(f"{name} {weight.dtype} {weight.shape}\n".encode())
        with open_regular(file) as opened:
            for first in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                opened.seek(first)
                digest.update(opened.read(min(_SAMPLE_BYTES, end - first)))
    return digest.hexdigest()


def adapter_weights(
    folder: Path, lora: LoRAConfig, base: Path | None, shapes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, StoredWeight]:
    """The weights of an adapter by the names of peft, after checks. `base`: folder of the model that is adapted, None =
    any one. `shapes`: of its weights that can be adapted; None = all of its folder.

    Raises InputError when it is no adapter, was trained on another base model, or has other settings than `lora`.
    """
    path = folder / ADAPTER_CONFIG
    try:
        with open_regular(path) as file:
            content = json.loads(file.read())
        kind = content["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{folder} is no adapter in the format of peft: {error}"
        raise InputError(message, code="adapter.not_readable") from error
    expected = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}
    start = "default" if content.get("init_lora_weights") not in ("pissa", "olora") else content["init_lora_weights"]
    has = {"peft_type": kind, "r": content.get("r"), "lora_alpha": content.get("lora_alpha")}
    has |= {"use_rslora": content.get("use_rslora") or False}
    if start != "default" or lora.init in ("pissa", "olora"):
        expected, has = expected | {"init_lora_weights": lora.init}, has | {"init_lora_weights": start}
    expected |= {key: value for key, value in _NEUTRAL.items() if content.get(key)}
    has |= {key: content[key] for key in _NEUTRAL if content.get(key)}
    if other := [f"{key} is {has[key]}, not {expected[key]}" for key in expected if has[key] != expected[key]]:
        message = f"the adapter in {folder} was trained in another way: {', '.join(other)}; change actor.lora"
        raise InputError(message, code="adapter.other_settings")
    header = file_header(folder / ADAPTER_WEIGHTS)
    named = content.get("base_model_name_or_path") or ""
    trained_on = header.metadata.get(BASE_KEY)
    if trained_on is None and any(Path(named).expanduser().glob("*.safetensors")):
        trained_on = base_fingerprint(Path(named).expanduser())
    if trained_on is not None and base is not None and trained_on != base_fingerprint(base):
        message = f"the adapter in {folder} was trained on another base model ({named or 'unknown'}), not on {base}"
        raise InputError(message, code="adapter.other_base")
    if shapes is None:
        shapes = {} if base is None else {name: weight.shape for name, weight in stored_weights(base).items()}
    _require_fit(folder, header.weights, shapes)
    return header.weights


def _require_fit(folder: Path, stored: dict[str, StoredWeight], model: Mapping[str, Sequence[int]]) -> None:
    """Raise InputError when a weight of an adapter has no place in the base model."""
    for name, weight in stored.items():
        if name.endswith(BASE_COPY):
            continue
        module = name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
        target = model.get(f"{module}.weight") or model.get(module)
        size = -1 if name.endswith(DOWN) else 0
        is_adapter = name.endswith((DOWN, UP))
        fits = target is not None and (
            weight.shape[size] == target[size] if is_adapter else list(weight.shape) == list(target)
        )
        if not fits:
            shape = "no such module" if target is None else f"{module} of shape {list(target)}"
            message = f"the adapter in {folder} has {name} {weight.shape}, but the base model has {shape}"
            raise InputError(message, code="adapter.other_base")


_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")


def is_of_experts(name: str) -> bool:
    """Whether a weight belongs to experts, whose matrices a model holds together and which get no adapters."""
    return "experts" in name.split(".")


def require_targets(lora: LoRAConfig, linear: list[str], modules: list[str], *, has_experts: bool) -> None:
    """Raise ConfigError when an entry of target_modules, exclude_modules or modules_to_save matches nothing.

    `linear`: the linear layers that can have adapters. `modules`: every module with weights. With experts a list may
    name their matrices beside others: those get no adapters.
    """
    wanted: dict[str, bool] = {}
    for key, patterns in (("target_modules", lora.target_modules), ("exclude_modules", lora.exclude_modules)):
        if patterns in (ALL_LINEAR, [ALL_LINEAR]):
            continue
        for entry in [patterns] if isinstance(patterns, str) else patterns:
            if entry in (ALL_LINEAR, OUTPUT_HEAD):
                continue
            wanted[f"{key}: {entry}"] = any(is_target(x, patterns if patterns is entry else [entry]) for x in linear)
            if has_experts and patterns is not entry and entry in _OF_EXPERTS:
                wanted[f"{key}: {entry}"] = any(is_target(x, patterns) for x in linear)
    for entry in lora.modules_to_save:
        wanted[f"modules_to_save: {entry}"] = any(is_saved(x, [entry]) for x in modules)
    for entry, has_match in wanted.items():
        if not has_match:
            names = modules if entry.startswith("modules") else linear
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ConfigError(f"lora.{entry} matches no module; there are {known}", code="adapter.no_target")


def is_saved(name: str, modules: list[str]) -> bool:
    """Whether lora.modules_to_save chooses the module `name`: by its end, as in peft."""
    return name.endswith(tuple(modules))


def prefixes(name: str) -> list[str]:
    """The names of a module and of those around it."""
    return [name[: place.start()] for place in re.finditer(r"\.|$", name)]
