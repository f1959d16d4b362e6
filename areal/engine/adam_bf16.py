"""AdamW whose two moments are bfloat16: half the optimiser state of AdamW."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from areal.engine.region import local_part


class AdamBf16(torch.optim.Optimizer):
    """AdamW computed in float32; the moments are stored in bfloat16, rounded up or down at random.

    The mean of the rounded values is exact: rounded to nearest, a second moment near its limit would never change,
    because its changes are smaller than the steps of bfloat16. The random numbers depend on the number of the step and
    of the weight only, so that ranks with copies of a weight agree and a recovered run continues equally.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

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
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["step"] += 1
                _update(parameter, state, group, seed=int(state["step"]) * 1_000_003 + number)


def _update(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], *, seed: int) -> None:
    weight, gradient = local_part(parameter), local_part(parameter.grad).float()  # pyright: ignore[reportArgumentType]
    mean, square = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
    (beta1, beta2), step = group["betas"], int(state["step"])
    first = mean.float().lerp_(gradient, 1 - beta1)
    second = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    generator = torch.Generator(device=weight.device).manual_seed(seed)
    mean.copy_(_rounded(first, generator))
    square.copy_(_rounded(second, generator))
    denominator = second.div_(1 - beta2**step).sqrt_().add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))


def _rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16 towards one of its neighbours, with the probability that makes the mean exact."""
    noise = torch.randint(0, 2**16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    bits = (values.contiguous().view(torch.int32) + noise) & -(2**16)
    return bits.view(torch.float32).bfloat16()
