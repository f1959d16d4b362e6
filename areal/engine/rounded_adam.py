"""AdamW whose two moments are stored in bfloat16 or in 8 bits: half or a quarter of the optimiser state of AdamW."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from areal.api.errors import ConfigError
from areal.engine.region import local_part, sharded_as

BLOCK = 32
"""Neighbouring values of a row that share a scale in 8 bits. Tensor ranks may split rows, data ranks never do, so
the scales of a weight are a tensor that is sharded as the weight is."""
SCALE = "_scale"
"""Ends the name of the scales of a moment: `exp_avg_scale` [..., columns / BLOCK] float32."""
MOMENTS: tuple[str, str] = ("exp_avg", "exp_avg_sq")


class RoundedAdam(torch.optim.Optimizer):
    """AdamW computed in float32; the stored moments are rounded up or down at random.

    The mean of the rounded values is exact: rounded to nearest, a second moment near its limit would never change,
    because its changes are smaller than the steps of bfloat16. The random numbers depend on the number of the step and
    of the weight only, so that ranks with copies of a weight agree and a recovered run continues equally.

    8 bits: codes of block-wise dynamic quantisation (Dettmers et al., arXiv:2110.02861), in blocks of `BLOCK`. Vectors,
    and weights whose rows are not a multiple of `BLOCK`, have moments in float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        bits: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """`bits`: 16 or 8. Raises ConfigError for 8 bits when tensor ranks split a row inside of a block."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._bits = bits
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if self.moment_dtype(parameter) == torch.uint8 and (own := local_part(parameter).shape[-1]) % BLOCK:
                message = f"adam_8bit: a tensor rank has {own} columns of a weight, not a multiple of {BLOCK}"
                raise ConfigError(f"{message}: use adam_bf16, or a smaller t", code="model.cannot_split")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every weight that has a gradient."""
        number = 0
        for group in self.param_groups:
            number = group.get("number", number)  # of the weights before this group, where the caller passes few
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    zeros = dict.fromkeys(MOMENTS, torch.zeros_like(local_part(parameter), dtype=torch.float32))
                    state |= {"step": torch.zeros((), dtype=torch.float32)} | self.stored(parameter, zeros)
                state["step"] += 1
                self._update(parameter, state, group, seed=int(state["step"]) * 1_000_003 + number)

    def _update(self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], *, seed: int) -> None:
        """Some rows at a time, because the computation takes much more memory than the state."""
        weight, gradient = local_part(parameter), local_part(parameter.grad)  # pyright: ignore[reportArgumentType]
        own = {name: local_part(value) for name, value in state.items() if name != "step"}
        (beta1, beta2), step, dtype = group["betas"], int(state["step"]), self.moment_dtype(parameter)
        generator = torch.Generator(device=weight.device).manual_seed(seed)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        for rows in _cuts(weight):
            part, change = {name: value[rows] for name, value in own.items()}, gradient[rows].float()
            mean, square = moments(part).values()
            mean.lerp_(change, 1 - beta1)
            square.mul_(beta2).addcmul_(change, change, value=1 - beta2)
            for name, value in zip(MOMENTS, (mean, square), strict=True):
                for key, values in _stored(name, value, dtype, generator).items():
                    part[key].copy_(values)
            denominator = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
            weight[rows].addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))

    def stored(self, parameter: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state of these moments, this rank's parts in float32, rounded to nearest."""
        dtype = self.moment_dtype(parameter)
        found = [_stored(name, value, dtype) for name, value in values.items()]
        return {name: sharded_as(parameter, value) for each in found for name, value in each.items()}

    def moment_dtype(self, parameter: Tensor) -> torch.dtype:
        if self._bits == 16:
            return torch.bfloat16
        return torch.uint8 if parameter.ndim > 1 and parameter.shape[-1] % BLOCK == 0 else torch.float32


def _cuts(weight: Tensor) -> list[slice]:
    """Slices of the rows. On a CPU they are small enough for its cache."""
    step = max((2**16 if weight.device.type == "cpu" else 2**24) // max(weight[:1].numel(), 1), 1)
    return [slice(start, start + step) for start in range(0, len(weight), step)]


def _stored(
    name: str, value: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """The tensors that hold a moment. With a generator it is rounded up or down at random."""
    if dtype == torch.bfloat16:
        return {name: _rounded(value, generator)}
    if dtype == torch.float32:
        return {name: value.clone()}
    codes, scales = _quantised(value, generator, is_signed=name == MOMENTS[0])
    return {name: codes, name + SCALE: scales}


def moments(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of the moments of a weight, float32 in new memory, from the state of any AdamW."""
    found: dict[str, Tensor] = {}
    for name in MOMENTS:
        value = local_part(state[name])
        if (scales := state.get(name + SCALE)) is None:
            found[name] = value.to(torch.float32, copy=True)
        else:
            book = _code_book(is_signed=name == MOMENTS[0], device=value.device)
            blocks = book[value.int()].unflatten(-1, (-1, BLOCK))
            found[name] = blocks.mul_(local_part(scales).unsqueeze(-1)).flatten(-2)
    return found


def _rounded(values: Tensor, generator: torch.Generator | None) -> Tensor:
    """float32 -> bfloat16 towards one of its neighbours, with the probability that makes the mean exact."""
    if generator is None:
        return values.bfloat16()
    noise = torch.randint(0, 2**16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    bits = (values.contiguous().view(torch.int32) + noise) & -(2**16)
    return bits.view(torch.float32).bfloat16()


def _quantised(values: Tensor, generator: torch.Generator | None, *, is_signed: bool) -> tuple[Tensor, Tensor]:
    """float32 -> codes, and the scales of blocks. A positive second moment never becomes 0: its weight would jump."""
    blocks = values.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    book = _code_book(is_signed=is_signed, device=values.device)
    lower = torch.bucketize(shares, book, out_int32=True, right=True).sub_(1).clamp_(0, len(book) - 2)
    place = (shares - book[lower]) / (book[lower + 1] - book[lower])
    noise = 0.5 if generator is None else torch.rand(place.shape, generator=generator, device=place.device)
    codes = lower + (place > noise)
    if not is_signed:
        codes = torch.where(shares > 0, codes.clamp_min(1), codes)
    return codes.to(torch.uint8).flatten(-2), scales


@functools.cache
def _code_book(*, is_signed: bool, device: torch.device) -> Tensor:
    """The 256 values of the codes, in order: 0, 1 and the middles of equal parts of each of seven powers of ten. A
    power has twice the parts of the one below."""
    values = [0.0, 1.0]
    for place in range(7):
        count = 2 ** (place + (not is_signed))
        middles = [10.0 ** (place - 6) * (0.1 + 0.9 * (part + 0.5) / count) for part in range(count)]
        values += [*middles, *(-value for value in middles)] if is_signed else middles
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)
