"""The model of a native server: loading, its vocabulary, and faster modules with equal results."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText

from areal.api.errors import ConfigError
from areal.inference.attention import ATTENTION_NAME, register_attention
from areal.weights.output_head import has_float32_head, unrounded_linear


def load_model(path: Path, dtype: torch.dtype, device: str, *, from_scratch: bool = False) -> PreTrainedModel:
    """The model in `path`, whose decoder uses our attention; `from_scratch`: with random weights."""
    if not (path / "config.json").is_file():
        message = f"model_path={path} has no config.json: set it to the folder of a Hugging Face checkpoint"
        raise ConfigError(message, code="model.not_found")
    try:
        config = AutoConfig.from_pretrained(path)
        auto = AutoModelForImageTextToText if "vision_config" in config.sub_configs else AutoModelForCausalLM
        if from_scratch:
            model = auto.from_config(config, dtype=dtype)
        else:
            model = auto.from_pretrained(path, config=config, dtype=dtype)
        use_paged_attention(model)
    except (ValueError, OSError) as error:
        message = f"model_path={path}: transformers cannot load it ({error})"
        raise ConfigError(message, code="model.not_loadable") from error
    model.to(torch.device(device))  # pyright: ignore[reportArgumentType] - its stub lacks the device form
    return model.eval().requires_grad_(False)


def use_paged_attention(model: PreTrainedModel) -> None:
    """Our attention in the decoder; a vision tower, whose tokens are never cached, uses that of torch."""
    register_attention()
    has_tower = "vision_config" in model.config.sub_configs
    model.set_attn_implementation(
        {"text_config": ATTENTION_NAME, "vision_config": "sdpa"} if has_tower else ATTENTION_NAME
    )


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of token ids of the model."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def fuse_norms(model: nn.Module) -> int:
    """Use the fused RMS norm kernel of torch on CPU for norms where it is bitwise equal. Returns their number.

    The seven operations of an unfused norm take a tenth of the decode step of a small model.
    """
    num_fused = 0
    for module in model.modules():
        weight, epsilon = module.__dict__.get("_parameters", {}).get("weight"), module.__dict__.get("variance_epsilon")
        if not type(module).__name__.endswith("RMSNorm") or weight is None or epsilon is None:
            continue
        fused = partial(_rms_norm, module, epsilon)
        trial = torch.linspace(-3.0, 5.0, 7 * weight.numel(), dtype=weight.dtype).view(7, -1).sin()
        with torch.inference_mode():
            if weight.device.type == "cpu" and torch.equal(fused(trial), module(trial)):
                module.forward = fused
                num_fused += 1
    return num_fused


def _rms_norm(module: nn.Module, epsilon: float, hidden_states: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return rms_norm(hidden_states, weight.shape, weight, epsilon)


def use_float32_head(model: PreTrainedModel, head_dtype: str) -> None:
    """Compute logits as native.head_dtype says."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and has_float32_head(head_dtype, model.device, model.dtype):
        head.forward = partial(_unrounded_head, head)


def _unrounded_head(head: nn.Linear, input: Tensor) -> Tensor:
    return unrounded_linear(input.flatten(0, -2), head.weight, head.bias).unflatten(0, input.shape[:-1])
