"""LoRA adapters in a Hugging Face model: layers, initial values, merged weights, and the base model without them."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from areal.api.config import LoRAConfig
from areal.api.config.train import ALL_LINEAR, OUTPUT_HEAD, is_target
from areal.api.errors import ConfigError
from areal.engine.hf_model import other_towers, seed_of
from areal.engine.mesh import copy_part, local_part, region_of, whole_tensor
from areal.models.adapter_files import is_of_experts, is_saved, prefixes, require_targets
from areal.models.recurrent_layers import linear_without_call

DOWN, UP = "lora_A", "lora_B"
START_DOWN, START_UP = "start_A", "start_B"
"""Initial values that are not zero together: their product is subtracted, so that training begins at the base model."""
ROUTERS = {"gate", "router"}
_NAMES = (DOWN, UP, START_DOWN, START_UP)


class LoRALinear(nn.Linear):
    """A frozen linear layer with an adapter: y = x W^T + b + scale (dropout(x) A^T B^T - x A0^T B0^T).

    `weight` and `bias` keep their names, and `state_dict` has only them. A is [rank, in], B [out, rank]; both float32.
    A0 and B0 exist where the initial adapter changes the output (pissa, olora); peft subtracts them from W instead.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    start_A: nn.Parameter | None
    start_B: nn.Parameter | None

    @classmethod
    def around(cls, linear: nn.Linear, config: LoRAConfig) -> "LoRALinear":
        """A layer with the parameters of `linear`, which are frozen, and an adapter without values on its device."""
        layer = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.requires_grad_(False)
        down, up = (config.rank, linear.in_features), (linear.out_features, config.rank)
        has_start = config.init in ("pissa", "olora")
        for name, shape in zip(_NAMES, (down, up, down, up), strict=True):
            value = None
            if has_start or name in (DOWN, UP):
                empty = torch.empty(shape, dtype=torch.float32, device=linear.weight.device)
                value = nn.Parameter(empty, requires_grad=name in (DOWN, UP))
            layer.register_parameter(name, value)
        layer.scale, layer.dropout, layer.is_enabled = config.scale, config.dropout, True
        layer.product = F.linear
        return layer

    scale: float
    dropout: float
    is_enabled: bool
    """False: the output is that of the base model."""
    own_columns: slice = slice(None)
    """The columns of W, of all `in_features`, that this tensor rank has."""
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """x W^T + b of the frozen layer."""

    def forward(self, input: Tensor) -> Tensor:
        result = self.product(input, self.weight, self.bias)
        if not self.is_enabled:
            return result
        states = input
        if self.dropout and self.training:
            states = _dropout(input, self.dropout, self.in_features, self.own_columns)
        result = result + F.linear(F.linear(states, self.lora_A), self.lora_B) * self.scale
        if self.start_A is not None and self.start_B is not None:
            result = result - F.linear(F.linear(input, self.start_A), self.start_B) * self.scale
        return result

    @torch.no_grad()
    def merged(self) -> Tensor:
        """W + scale (B A - B0 A0) in float32, sharded as W. A collective for a sharded layer."""
        weight = self.weight.detach()
        columns = region_of(weight)[1]
        change = _product(self.lora_A, self.lora_B, columns)
        if self.start_A is not None and self.start_B is not None:
            change -= _product(self.start_A, self.start_B, columns)
        local = local_part(weight).float() + change * self.scale
        if not isinstance(weight, DTensor):
            return local
        place = (weight.device_mesh, weight.placements)
        return DTensor.from_local(local, *place, run_check=False, shape=weight.shape, stride=weight.stride())

    def effective_weight(self) -> Tensor:
        """W + scale B A with gradients of A and B, in the type of W: of an output head, which is not called."""
        change = (self.lora_B @ self.lora_A) * self.scale
        return self.weight + change.to(self.weight.dtype) if self.is_enabled else self.weight

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _NAMES:
            destination.pop(prefix + name, None)


def _product(down: Tensor, up: Tensor, columns: slice) -> Tensor:
    """The part of B A that this rank has of W: the rows of B are split as those of W."""
    return local_part(up) @ whole_tensor(down)[:, columns]


def _dropout(input: Tensor, probability: float, width: int, columns: slice) -> Tensor:
    """Dropout with the mask of one process: every tensor rank draws the mask of all columns and uses its own."""
    if input.shape[-1] == width:
        return F.dropout(input, probability)
    return input * F.dropout(input.new_ones(*input.shape[:-1], width), probability)[..., columns]


class Adapters:
    """The trained parameters of a model with LoRA: adapters, and modules that are trained whole."""

    def __init__(self, model: PreTrainedModel, config: LoRAConfig) -> None:
        """Freeze `model` and add adapters to it, without values. Raises ConfigError."""
        self.config = config
        self._model = model
        chosen = _targets(model, config)
        saved = _saved_modules(model, config)
        model.requires_grad_(False)
        self._layers: dict[str, LoRALinear] = {}
        for name, linear in chosen.items():
            parent, _, attribute = name.rpartition(".")
            self._layers[name] = LoRALinear.around(linear, config)
            setattr(model.get_submodule(parent), attribute, self._layers[name])
        for module in saved:
            module.float().requires_grad_(True)
        self._base: dict[str, Tensor] = {}
        """This rank's part of the base model's values of the modules that are trained whole, in the compute type."""
        self._set_aside: dict[str, Tensor] = {}
        """Trained values while the base model is used."""

    @property
    def layers(self) -> Mapping[str, LoRALinear]:
        """Name of the module -> layer."""
        return self._layers

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimiser updates, by name."""
        return {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}

    def trained_whole(self) -> dict[str, nn.Parameter]:
        """The weights of lora.modules_to_save."""
        return {name: weight for name, weight in self.trained().items() if not name.endswith((f".{DOWN}", f".{UP}"))}

    def target_names(self) -> list[str]:
        """The shortest names that choose these layers in this model: last parts if they choose no other layer."""
        short = sorted({name.rpartition(".")[2] for name in self._layers})
        others = [name for name, module in self._model.named_modules() if isinstance(module, nn.Linear)]
        fits = all(name in self._layers for name in others if is_target(name, short))
        return short if fits else sorted(self._layers)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must contain besides the base model: adapters with their start, modules trained whole."""
        names = tuple(f".{name}" for name in _NAMES)
        every = self._model.named_parameters()
        return {name: weight for name, weight in every if weight.requires_grad or name.endswith(names)}

    @torch.no_grad()
    def draw(self, seed: int, compute: torch.dtype) -> None:
        """Set initial values, equal for every number of ranks; a collective.

        `compute`: the type in which the base model computes.
        """
        self._base = {name: local_part(weight).to(compute, copy=True) for name, weight in self.trained_whole().items()}
        for name, layer in self._layers.items():
            down, up = _initial(layer, self.config, seed_of(seed, f"{name}.{DOWN}"))
            for value, targets in ((down, (layer.lora_A, layer.start_A)), (up, (layer.lora_B, layer.start_B))):
                for target in targets:
                    if target is not None:
                        copy_part(target, value)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The weight `name` of the model, merged with its adapter if it has one; a collective.

        ConfigError where the head has an adapter and its weight is that of the embedding, which has none.
        """
        head = self._model.get_output_embeddings()
        if isinstance(head, LoRALinear) and head.weight is self._model.get_input_embeddings().weight:
            text = "lora.target_modules: the head is tied to the embedding, so its adapter cannot be merged"
            raise ConfigError(f"{text}: leave out the head", code="adapter.no_target")
        layer = self._layers.get(name.removesuffix(".weight"))
        return weight if layer is None or not name.endswith(".weight") else layer.merged()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside the block the model is the base model. Sharded weights must not be gathered outside of passes."""
        self._set_enabled(False)
        try:
            yield
        finally:
            self._set_enabled(True)

    @torch.no_grad()
    def _set_enabled(self, enabled: bool) -> None:
        for layer in self._layers.values():
            layer.is_enabled = enabled
        trained = self.trained()
        for name, base in self._base.items():
            local = local_part(trained[name])
            if not enabled:
                self._set_aside[name] = local.clone()
                local.copy_(base)
            else:
                local.copy_(self._set_aside.pop(name))


def _initial(layer: LoRALinear, config: LoRAConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Initial A and B, in float32, as peft computes them. A collective for pissa and olora of a sharded layer, whose
    factors are those of rank 0: the last bits can differ between processors."""
    down, up = torch.zeros(layer.lora_A.shape), torch.zeros(layer.lora_B.shape)
    if config.init in ("default", "gaussian"):
        generator = torch.Generator().manual_seed(seed)
        if config.init == "default":
            nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
        else:
            nn.init.normal_(down, std=1 / config.rank, generator=generator)
        return down, up
    weight, rank = whole_tensor(layer.weight.detach()).float().cpu(), config.rank
    if config.init == "olora":
        left, right = torch.linalg.qr(weight)
        down, up = right[:rank].contiguous(), left[:, :rank].contiguous()
    else:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        root = (values[:rank] / config.scale).sqrt()
        down, up = root[:, None] * right[:rank], left[:, :rank] * root
    if isinstance(layer.weight, DTensor):
        for factor in (down, up):
            dist.broadcast(factor, 0)
    return down, up


def _targets(model: PreTrainedModel, config: LoRAConfig) -> dict[str, nn.Linear]:
    """The linear layers that get adapters, by name.

    all-linear is every one but the output head, the routers of experts, and those of the parts that only images use.
    Names and patterns choose layers of all parts, output-head the head. exclude_modules leaves out some of them.
    Experts, whose weights are one tensor for all, have none, nor have layers whose weights a fused kernel reads (of
    Mamba).
    """
    head, targets = model.get_output_embeddings(), config.target_modules
    excluded = {head, *linear_without_call(model)}
    linear = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear and module not in excluded
    }
    saved = config.modules_to_save
    linear = {
        name: layer for name, layer in linear.items() if not any(is_saved(part, saved) for part in prefixes(name))
    }
    linear = {name: layer for name, layer in linear.items() if not is_of_experts(name)}
    has_experts = any(map(is_of_experts, _with_weights(model)))
    require_targets(config, list(linear), list(_with_weights(model)), has_experts=has_experts)
    every = targets == ALL_LINEAR or (not isinstance(targets, str) and ALL_LINEAR in targets)
    others = {id(module) for tower in other_towers(model) for module in tower.modules()} if every else set[int]()
    if every and has_experts:
        others |= {id(layer) for name, layer in linear.items() if ROUTERS & set(name.split("."))}
    result = {
        name: layer for name, layer in linear.items() if (every or is_target(name, targets)) and id(layer) not in others
    }
    result = {name: layer for name, layer in result.items() if not is_target(name, config.exclude_modules)}
    if not isinstance(targets, str) and OUTPUT_HEAD in targets:
        if config.init in ("pissa", "olora"):
            text = f"lora.init={config.init} cannot start the adapter of {OUTPUT_HEAD}: use default"
            raise ConfigError(text, code="adapter.no_target")
        result |= {
            name: module for name, module in model.named_modules() if module is head and type(module) is nn.Linear
        }
    if not result:
        text = f"lora.exclude_modules: {config.exclude_modules} leaves no module of target_modules"
        raise ConfigError(text, code="adapter.no_target")
    for name, layer in result.items() if config.init in ("pissa", "olora") else ():
        if config.rank > min(layer.weight.shape):
            text = (
                f"lora.rank={config.rank} with init={config.init} exceeds the size {min(layer.weight.shape)} of {name}"
            )
            raise ConfigError(f"{text}: lower it", code="adapter.rank")
    return result


def frozen_experts(model: nn.Module, config: LoRAConfig) -> str:
    """A line for the start when the user may expect adapters in experts, which stay frozen; else empty."""
    experts = {
        name: weight for name, weight in model.named_parameters() if is_of_experts(name) and not weight.requires_grad
    }
    targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    ends = {name.rpartition(".")[2] for name in experts} | {"gate_proj", "up_proj"}
    if not experts or not (ALL_LINEAR in targets or ends & set(targets)):
        return ""
    part = sum(weight.numel() for weight in experts.values()) / sum(weight.numel() for weight in model.parameters())
    return f"lora.target_modules: experts, {part:.0%} of the parameters, get no adapters and stay frozen, as routers do"


def _with_weights(model: PreTrainedModel) -> dict[str, nn.Module]:
    return {
        name: module for name, module in model.named_modules() if name and next(module.parameters(), None) is not None
    }


def _saved_modules(model: PreTrainedModel, config: LoRAConfig) -> list[nn.Module]:
    """The modules of lora.modules_to_save."""
    modules = _with_weights(model)
    saved = {name: module for name, module in modules.items() if is_saved(name, config.modules_to_save)}
    for name, saved_module in saved.items():
        weights = set(map(id, saved_module.parameters()))
        for other, two in modules.items():
            is_apart = not f"{name}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{name}.")
            if is_apart and weights & set(map(id, two.parameters())):
                text = f"lora.modules_to_save: {name} and {other} have one weight, and an adapter cannot replace both"
                raise ConfigError(f"{text}: remove it", code="model.unsupported")
    return list(saved.values())
