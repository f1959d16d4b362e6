"""FP8 training through torchao: which linear layers compute in 8 bits, and how their weights reach the ranks."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from areal.api.config.train import FLOAT8_MULTIPLE, Float8Config
from areal.api.errors import ConfigError
from areal.engine.hf_model import other_towers
from areal.engine.lora import ROUTERS, LoRALinear
from areal.engine.mesh import TrainerMesh
from areal.models.adapter_files import is_of_experts
from areal.models.recurrent_layers import linear_without_call
from areal.observe.log import get_logger

_CAPABILITY = (8, 9)
"""Compute capability of the first CUDA cards with FP8 (Ada, Hopper)."""


class Float8Layers:
    """The linear layers of a model that compute in 8 bits, in all three products: output, gradients of input and
    weight. On the CPU torchao emulates them: values are rounded to 8 bits and multiplied in float32.

    Scaling is dynamic: every call divides a tensor (tensorwise) or each row (rowwise) by its largest absolute value.
    Parameters keep their names and types, so gradients, optimiser, checkpoints and exports are those without FP8.
    """

    def __init__(
        self, model: PreTrainedModel, config: Float8Config, *, mesh: TrainerMesh, shards: int, gathers: bool
    ) -> None:
        """Convert layers of `model`, which may have adapters, before ranks split it. Raises ConfigError.

        `gathers`: FSDP will split its weights over `shards` ranks, which can gather them in 8 bits.
        """
        if importlib.util.find_spec("torchao") is None:
            text = "fp8 needs the package torchao: pip install -e '.[quantization]' in the repository of areal"
            raise ConfigError(text, code="launch.package_missing")
        _require_card(mesh.device)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        recipe = Float8LinearConfig.from_recipe_name(config.recipe)
        is_emulated = mesh.device.type == "cpu"
        recipe = replace(recipe, emulate=is_emulated, pad_inner_dim=True)  # the tokens of a row are no multiple of 16
        layers = _chosen(model, config, mesh, is_emulated=is_emulated)
        whole = {name: layer for name, layer in layers.items() if not isinstance(layer, LoRALinear)}
        is_even = all(layer.out_features % shards == 0 for layer in whole.values())  # torchao does not pad parts
        self._model = model
        self._gathers = gathers and is_even and config.recipe == "tensorwise" and mesh.tensor.size == 1
        """Whether ranks gather weights in 8 bits."""
        convert_to_float8_training(
            model,
            module_filter_fn=lambda module, name: whole.get(name) is module,
            config=replace(recipe, enable_fsdp_float8_all_gather=self._gathers),
        )
        for layer in layers.values():
            if isinstance(layer, LoRALinear):
                layer.product = _product_of(Float8Linear.from_float(layer, recipe))
        self.exact = [model.get_submodule(name) for name in whole if config.recipe == "tensorwise"]
        """Layers that round the stored weights, as ranks do that gather them in 8 bits; others those in the compute
        type."""

    def scale_weights(self) -> None:
        """Compute the scales of all weights that ranks gather in 8 bits, in one reduction; a collective. It precedes
        the first pass with changed weights."""
        if self._gathers:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self._model)


def _require_card(device: torch.device) -> None:
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        text = f"fp8 needs a GPU of compute capability 8.9 (Ada, Hopper): {torch.cuda.get_device_name(device)} has"
        raise ConfigError(f"{text} {capability[0]}.{capability[1]}: remove it", code="launch.no_gpu")


def _chosen(
    model: PreTrainedModel, config: Float8Config, mesh: TrainerMesh, *, is_emulated: bool
) -> dict[str, nn.Linear]:
    """The linear layers that compute in 8 bits, by name, also those with adapters.

    Not the heads, routers, experts, parts that only images use, layers whose weights a fused kernel reads, those that
    fp8.filter_fqns names, and those of other sizes than 16 divides, also after a split over tensor ranks.
    """
    left_out = {model.get_output_embeddings(), model._modules.get("score"), *linear_without_call(model)}
    left_out |= {part for tower in other_towers(model) for part in tower.modules()}
    linear = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) in (nn.Linear, LoRALinear)
        and isinstance(layer, nn.Linear)
        and layer not in left_out
        and not (is_of_experts(name) or ROUTERS & set(name.split(".")))
    }
    for part in config.filter_fqns:
        if not any(part in name for name in linear):
            text = (
                f"fp8.filter_fqns: {part!r} is in no name of a linear layer; the first one is {next(iter(linear), '')}"
            )
            raise ConfigError(text, code="model.no_such_weight")
    named = {name: layer for name, layer in linear.items() if not any(part in name for part in config.filter_fqns)}
    multiple = FLOAT8_MULTIPLE * mesh.tensor.size
    chosen = {
        name: layer
        for name, layer in named.items()
        if layer.in_features % multiple == layer.out_features % multiple == 0
    }
    text = f"fp8: {len(chosen)} of {len(linear)} linear layers compute in 8 bits ({config.recipe}"
    text += f"{', emulated on the CPU' if is_emulated else ''}), {len(linear) - len(named)} are in filter_fqns, "
    text += f"{len(named) - len(chosen)} have sizes that {multiple} does not divide"
    if not chosen:
        raise ConfigError(f"{text}: remove fp8", code="model.unsupported")
    if mesh.rank == 0:
        get_logger("engine").info(text)
    return chosen


def _product_of(layer: Any) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """F.linear as a layer of torchao computes it, with given weights that are not trained."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as torchao_product

    config, options = layer.config, layer.linear_mm_config
    for_gradient: Any = SimpleNamespace(  # a whole configuration must also fit the gradient of the weight
        cast_config_input=config.cast_config_grad_output,
        cast_config_weight=config.cast_config_weight_for_grad_input,
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    of_gradient = options._replace(output=options.grad_input)

    class Product(torch.autograd.Function):
        """That of torchao without the gradient of the weight, which is a product too, and keeps the input."""

        @staticmethod
        def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return torchao_product.forward(_Unused(), input, weight.t(), options, config)

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
            (weight,) = ctx.saved_tensors
            # The product of the upstream gradient [t, out] and [out, in], with the formats of that gradient.
            return torchao_product.forward(_Unused(), upstream[0], weight, of_gradient, for_gradient), None

    def product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Any = Product.apply(input, weight)
        return result if bias is None else result + bias.to(result.dtype)

    return product


class _Unused:
    """The context of a product whose gradient torchao does not compute."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Nothing is kept."""
