"""Adapters of a model in the format of peft: what is written, published and loaded."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from areal.api.config import TrainEngineConfig
from areal.api.data import WeightSpec
from areal.api.errors import InputError
from areal.engine.lora import Adapters
from areal.engine.mesh import copy_part, whole_tensor
from areal.models.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE_KEY,
    DOWN,
    PREFIX,
    UP,
    adapter_weights,
    base_fingerprint,
)
from areal.models.checkpoint_files import stored_weights
from areal.weights.weight_files import write_tensors


class PeftAdapter:
    """Implements `areal.api.engine.AdapterSource`: the adapters of a model by the names of peft, in float32.

    Initial values that are subtracted make an adapter of twice the rank, B' = [B, -B0] and A' = [A; A0], which fits the
    base model as it is.
    """

    def __init__(self, adapters: Adapters, base: Path, base_name: str) -> None:
        """`base`: folder of the base model; `base_name`: how the configuration names it."""
        self.adapters = adapters
        self._base = base
        self._base_name = base_name
        self._fingerprint = base_fingerprint(base)
        config = adapters.config
        settings = f"rank {config.rank}, alpha {config.alpha:g}, rslora {config.rslora}, init {config.init}"
        self.identity = f"LoRA ({settings}) on the base model {self._fingerprint}"
        """What a recovery checkpoint of the adapters depends on."""

        self._rank, self._alpha = config.rank, config.alpha

    def cut_to(self, rank: int, alpha: float) -> None:
        """Use and write only the first `rank` rows of every A and columns of every B, with this alpha."""
        self._rank, self._alpha = rank, alpha
        for layer in self.adapters.layers.values():
            layer.scale = replace(self.adapters.config, rank=rank, alpha=alpha).scale

    def named_weights(self, *, stored: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Full weights, gathered one by one; a collective. `stored` changes nothing."""
        for name, layer in self.adapters.layers.items():
            down = [whole_tensor(layer.lora_A.detach())[: self._rank]]
            up = [whole_tensor(layer.lora_B.detach())[:, : self._rank]]
            if layer.start_A is not None and layer.start_B is not None:
                down, up = [*down, whole_tensor(layer.start_A.detach())], [*up, -whole_tensor(layer.start_B.detach())]
            yield f"{PREFIX}{name}{DOWN}", torch.cat(down)
            yield f"{PREFIX}{name}{UP}", torch.cat(up, 1)
        for name, weight in self.adapters.trained_whole().items():
            yield f"{PREFIX}{name}", whole_tensor(weight.detach())

    def weight_specs(self) -> list[WeightSpec]:
        factor = self._rank_factor
        specs: list[WeightSpec] = []
        for name, layer in self.adapters.layers.items():
            rank, inside, outside = self._rank, layer.lora_A.shape[1], layer.lora_B.shape[0]
            specs.append(WeightSpec(name=f"{PREFIX}{name}{DOWN}", shape=[rank * factor, inside], dtype="float32"))
            specs.append(WeightSpec(name=f"{PREFIX}{name}{UP}", shape=[outside, rank * factor], dtype="float32"))
        for name, weight in self.adapters.trained_whole().items():
            specs.append(WeightSpec(name=f"{PREFIX}{name}", shape=[*weight.shape], dtype="float32"))
        return specs

    def write(self, folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write `named_weights` as a folder that peft loads; on one rank."""
        tensors = {name: weight.cpu().contiguous() for name, weight in weights}
        write_tensors(folder / ADAPTER_WEIGHTS, tensors, {BASE_KEY: self._fingerprint})
        config, factor = self.adapters.config, self._rank_factor
        facts = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._base_name,
            "r": self._rank * factor,
            "lora_alpha": self._alpha * (factor**0.5 if config.rslora else factor),
            "use_rslora": config.rslora,
            "lora_dropout": config.dropout,
            "target_modules": self.adapters.target_names(),
            "modules_to_save": config.modules_to_save or None,
            "init_lora_weights": True,
            "inference_mode": True,
            "bias": "none",
        }
        (folder / ADAPTER_CONFIG).write_text(json.dumps(facts, indent=2, sort_keys=True))

    def load(self, folder: Path) -> None:
        """Continue from an adapter folder; a collective. Raises InputError when it does not fit."""
        targets = self.adapters.trained()
        names = {_peft_name(name): name for name in targets}
        shapes = {name: weight.shape for name, weight in stored_weights(self._base).items()}
        # the checkpoint of a model with a tied head does not have it
        shapes |= {f"{name}.weight": layer.weight.shape for name, layer in self.adapters.layers.items()}
        adapter_weights(folder, self.adapters.config, self._base, shapes)
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as opened:
            stored = set(opened.keys())
            if other := sorted(stored ^ set(names)):
                what = "has weights that the model does not train" if other[0] in stored else "lacks weights"
                message = f"the adapter in {folder} {what}, among them {other[0]}: change actor.lora"
                raise InputError(message, code="adapter.other_settings")
            for name_in_file, name in names.items():
                value: Tensor = opened.get_tensor(name_in_file)
                if value.shape != targets[name].shape:
                    shapes = f"{list(value.shape)}, not {list(targets[name].shape)}"
                    message = f"the adapter in {folder}: {name_in_file} has shape {shapes}"
                    raise InputError(message, code="adapter.other_base")
                copy_part(targets[name], value)

    @property
    def _rank_factor(self) -> int:
        return 2 if any(layer.start_A is not None for layer in self.adapters.layers.values()) else 1


def _peft_name(name: str) -> str:
    """The name in an adapter folder of a trained parameter."""
    return f"{PREFIX}{name}.weight" if name.endswith((".lora_A", ".lora_B")) else f"{PREFIX}{name}"


def with_values(
    adapters: Adapters, base: Path, config: TrainEngineConfig, seed: int, compute: torch.dtype
) -> PeftAdapter:
    """The adapters of the filled model `base` with initial values, or with those in lora.path; a collective."""
    adapters.draw(seed, compute)
    adapter = PeftAdapter(adapters, base, config.path)
    if adapters.config.path:
        adapter.load(Path(adapters.config.path).expanduser())
    return adapter
