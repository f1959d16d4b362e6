"""Linear layers of a server with quantized weights: `native.quantization`.

The rule: the linear layers inside the decoder's blocks are quantised. Embeddings, norms, the output head and vision
towers keep their type, because few bytes are in them or their errors reach the logits unchanged. A model with experts
or with layers that have a state is refused: most of its weights are in neither kind of layer. Weights arrive in the
type of the checkpoint by every path of an update, and the same weights always give the same bits.
"""

import re
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_utils import PreTrainedModel

from areal.api.config.rollout import QUANTIZED_GROUP, quantization_refusal
from areal.api.errors import ConfigError
from areal.models.output_head import routers_of
from areal.models.recurrent_layers import state_layers
from areal.observe.log import get_logger
from areal.weights.update_group import is_finite

_LOG = get_logger(__name__)
_IN_BLOCK = re.compile(r"(^|\.)layers\.\d+\.")
_FEW_ROWS = 8
"""Up to this number of rows torch's kernel for 8-bit weights is faster on the CPU than a product of widened ones."""
_KERNEL_INPUTS = 16
"""Inputs of which that kernel takes multiples (torch 2.13 with AVX-512; 8 with AVX2): others end the process."""
_KERNEL_ROWS = 16
_INNER_TILES = 2
"""Multiples of which torch's kernels for 4-bit weights take: rows on the CPU; tiles of 16 columns on CUDA."""
_MX_BLOCK, _NV_BLOCK = 32, 16
_E2M1_LARGEST, _E4M3_LARGEST = 6.0, 448.0


class Scheme(Protocol):
    """How a weight [out, in] is stored."""

    def fits(self, out_features: int, in_features: int) -> bool: ...

    def stored(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Codes and scales of a finite floating-point weight on its device."""
        ...

    def product(self, states: Tensor, held: tuple[Tensor, ...]) -> Tensor:
        """states [rows, in] times the transposed weight that is stored as `held`: [rows, out], in the type of the
        states."""
        ...


class PerChannel:
    """One scale for each output: weight = codes * scales[:, None]. Symmetric, as torchao's PerRow."""

    def __init__(self, dtype: torch.dtype, largest: float, limits: tuple[float, float]) -> None:
        """`largest`: the code of the largest weight of a row; codes are cut to `limits`."""
        self._dtype, self._largest, self._limits = dtype, largest, limits

    def fits(self, out_features: int, in_features: int) -> bool:
        return True

    def stored(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        values = weight.float()
        scales = (values.abs().amax(dim=1) / self._largest).clamp(min=torch.finfo(torch.float32).tiny)
        scales = scales.to(weight.dtype)  # rounded before the codes are chosen, which correct for it
        codes = values * scales.float().reciprocal()[:, None]
        codes = codes if self._dtype.is_floating_point else codes.round_()
        return codes.clamp_(*self._limits).to(self._dtype), scales

    def product(self, states: Tensor, held: tuple[Tensor, ...]) -> Tensor:
        codes, scales = held
        if (
            codes.dtype == torch.int8
            and states.dtype == torch.bfloat16
            and states.device.type == "cpu"
            and len(states) <= _FEW_ROWS
            and states.shape[1] % _KERNEL_INPUTS == 0
        ):
            return torch.ops.aten._weight_int8pack_mm(states, codes, scales)
        return linear(states, widened(codes, states.dtype)).mul_(scales)


def widened(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of 8-bit codes, exact in each type. On the CPU torch converts eight-bit floats one at a time."""
    if codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu":
        # sign, 4 bits of exponent, 3 of mantissa -> the same with 8 and 7 bits; the biases are 7 and 127
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x7810)
        codes = bits.view(torch.bfloat16).mul_(2.0**120)
    return codes.to(dtype)


class Int4Groups:
    """A scale and a zero for each 32 inputs of an output, in the layout of torch's kernels: weight = (code - 8) * scale
    + zero, with codes from 0 to 15."""

    def fits(self, out_features: int, in_features: int) -> bool:
        return out_features % _KERNEL_ROWS == 0 and in_features % QUANTIZED_GROUP == 0

    def stored(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        groups = weight.float().unflatten(1, (-1, QUANTIZED_GROUP))
        lowest, highest = groups.aminmax(dim=-1)
        kept = torch.bfloat16 if weight.device.type == "cuda" else weight.dtype
        scales = ((highest - lowest) / 15).clamp(min=torch.finfo(torch.float32).tiny).to(kept)
        zeros = (lowest + 8 * scales.float()).to(kept)
        codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None] + 8).round_().clamp_(0, 15)
        codes = codes.to(torch.int32).flatten(1)
        if weight.device.type == "cuda":
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_TILES)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, _INNER_TILES)
        return packed, torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous()

    def product(self, states: Tensor, held: tuple[Tensor, ...]) -> Tensor:
        codes, scales = held
        if states.device.type == "cuda":
            product = torch.ops.aten._weight_int4pack_mm(states.to(scales.dtype), codes, QUANTIZED_GROUP, scales)
            return product.to(states.dtype)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(states, codes, QUANTIZED_GROUP, scales)


class Fp4Blocks:
    """4-bit floats (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign) that share a scale in blocks of inputs.

    mxfp4: blocks of 32 with powers of two as scales (E8M0), by the OCP Microscaling Formats specification 1.0; the
    largest number of a block is rounded to E2M1 before its power of two is taken, so that it is never cut.
    nvfp4: blocks of 16 with scales in E4M3, and a float32 scale that makes the largest of these 448, by NVIDIA's
    description of the format. Both are stored transposed, for products on the CPU: codes [in / 2, out] with input i in
    the low half of byte i and input i + in / 2 in the high one, scales [in / block, out].
    """

    def __init__(self, block: int) -> None:
        self._block = block

    def fits(self, out_features: int, in_features: int) -> bool:
        return in_features % self._block == 0

    def stored(self, weight: Tensor) -> tuple[Tensor, ...]:
        blocks = weight.float().T.unflatten(0, (-1, self._block))
        largest = blocks.abs().amax(dim=1)
        if self._block == _MX_BLOCK:
            exponents = ((largest.view(torch.int32) + (1 << 21)) >> 23) - 2  # biased by 127; 4 is the power of two of 6
            kept = (exponents.clamp(min=1).to(torch.uint8),)
            inverse = _powers(254 - kept[0]).float()
        else:
            whole = (largest.amax() / (_E4M3_LARGEST * _E2M1_LARGEST)).clamp(min=2.0**-100)  # its inverse is finite
            scales = (largest / _E2M1_LARGEST / whole).clamp(min=2.0**-6).to(torch.float8_e4m3fn)
            kept, inverse = (scales, whole), 1 / whole / scales.float()
        values = (blocks * inverse[:, None]).flatten(0, 1)
        sizes = values.abs()
        above_2 = torch.where(sizes < 4, sizes.round() + 2, (sizes / 2).round() + 4)
        codes = torch.where(sizes < 2, (2 * sizes).round(), above_2).clamp(max=7).to(torch.uint8)
        low, high = (codes | values.signbit().to(torch.uint8) << 3).chunk(2)
        return low | high << 4, *kept

    def product(self, states: Tensor, held: tuple[Tensor, ...]) -> Tensor:
        codes, scales, *whole = held
        scales = _powers(scales) if scales.dtype == torch.uint8 else widened(scales, states.dtype)
        blocks = _numbers(codes).to(states.dtype).unflatten(0, (-1, self._block)).mul_(scales[:, None])
        product = states @ blocks.flatten(0, 1)
        return product.mul_(whole[0]) if whole else product


def _powers(exponents: Tensor) -> Tensor:
    """2 to the power of (exponent - 127) in bfloat16, of bytes from 1 to 254."""
    return exponents.to(torch.int16).bitwise_left_shift_(7).view(torch.bfloat16)


def _numbers(codes: Tensor) -> Tensor:
    """The numbers [in, out] in bfloat16 of codes [in / 2, out]: exact."""
    signed = codes.view(torch.int8)
    # sign, 2 bits of exponent, 1 of mantissa -> the same with 8 and 7 bits; the biases are 1 and 127
    bits = torch.cat((signed << 4, signed)).to(torch.int16).bitwise_left_shift_(2).bitwise_and_(-0x7E40)
    return bits.view(torch.bfloat16).mul_(2.0**126)


SCHEMES: dict[str, Scheme] = {
    "int8": PerChannel(torch.int8, 127.5, (-128, 127)),
    "fp8": PerChannel(torch.float8_e4m3fn, 448.0, (-448, 448)),
    "int4": Int4Groups(),
    "mxfp4": Fp4Blocks(_MX_BLOCK),
    "nvfp4": Fp4Blocks(_NV_BLOCK),
}


class QuantizedLinear(nn.Linear):
    """A linear layer that keeps its weight as codes and scales.

    `weight` is a stand-in of the same shape, type and device without memory, for code that looks at these.
    """

    def __init__(self, source: nn.Linear, scheme: Scheme) -> None:
        weight = source.weight
        super().__init__(source.in_features, source.out_features, bias=False, device="meta", dtype=weight.dtype)
        self.scheme = scheme
        self.weight = nn.Parameter(weight.new_zeros(()).expand(weight.shape), requires_grad=False)
        self.bias = source.bias
        self.held = scheme.stored(weight)
        """The tensors that an update of the weights replaces."""

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input)

    def product(self, states: Tensor) -> Tensor:
        """The product without what adapters add to `forward`. states [..., in] -> [..., out]."""
        product = self.scheme.product(states.reshape(-1, self.in_features).contiguous(), self.held)
        product = product if self.bias is None else product.add_(self.bias)
        return product.view(*states.shape[:-1], self.out_features)


@torch.no_grad()
def quantize(model: PreTrainedModel, kind: str) -> None:
    """Replace the linear layers in the blocks of a decoder, one after the other.

    ConfigError for other models, and for a weight with numbers that are not finite: some kinds would store finite ones.
    """
    what = "experts" if routers_of(model) else "layers with a state" if state_layers(model) else ""
    if what:
        raise ConfigError(quantization_refusal(kind, what), code="model.unsupported")
    scheme, decoder = SCHEMES[kind], model.get_decoder()
    names = [
        name
        for name, module in decoder.named_modules()
        if type(module) is nn.Linear and _IN_BLOCK.search(name) and scheme.fits(module.out_features, module.in_features)
    ]
    if not names:
        raise ConfigError(quantization_refusal(kind, "no linear layers of a fitting size"), code="model.unsupported")
    for name in names:  # a weight is freed before the next one is quantized
        path, _, last = name.rpartition(".")
        parent = decoder.get_submodule(path)
        linear_layer = getattr(parent, last)
        if not is_finite(linear_layer.weight):
            message = f"native.quantization={kind}: weight {name} of the checkpoint has numbers that are not finite"
            raise ConfigError(f"{message}: use another checkpoint", code="weights.not_finite")
        setattr(parent, last, QuantizedLinear(linear_layer, scheme))
    layers = quantized_layers(model)
    before = sum(layer.weight.nbytes for layer in layers)
    after = sum(tensor.nbytes for layer in layers for tensor in layer.held)
    sizes = f"{after / 2**20:.1f} MiB in place of {before / 2**20:.1f}"
    _LOG.info("native.quantization=%s: %d linear layers, %s", kind, len(layers), sizes)


def quantized_layers(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]
