"""One optimiser with its learning-rate schedule, gradient clipping and state."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from areal.api.config import OptimizerConfig
from areal.api.errors import InputError
from areal.api.metrics import Metric, Metrics


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, sharing its memory; any other tensor itself."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


class ScheduledOptimizer:
    """AdamW or plain gradient descent over the (possibly sharded) parameters of one model."""

    def __init__(self, parameters: dict[str, nn.Parameter], config: OptimizerConfig, total_steps: int) -> None:
        self._parameters = parameters
        self._config = config
        self._total_steps = total_steps
        self._optimizer = _make_optimizer(list(parameters.values()), config)
        self.num_steps = 0
        """Calls of `step` so far, skipped ones included: the position in the schedule."""

    def step(self, reduce_sum: Callable[[Tensor], Tensor]) -> Metrics:
        """Clip, update the weights, clear gradients, advance the schedule; a collective.

        `reduce_sum`: sum of a CPU float64 tensor over all ranks.
        """
        rate = learning_rate(self._config, self.num_steps, self._total_steps)
        gradients = [local_part(p.grad) for p in self._parameters.values() if p.grad is not None]
        squared = get_total_norm(gradients).double().square() if gradients else torch.zeros((), dtype=torch.float64)
        norm = math.sqrt(reduce_sum(squared.reshape(1).cpu()).item())  # every shard is on exactly one rank
        finite = math.isfinite(norm)
        if finite:
            if norm > self._config.gradient_clipping:
                for gradient in gradients:
                    gradient.mul_(self._config.gradient_clipping / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return {
            "lr": Metric(rate),
            "grad_norm": Metric(norm) if finite else Metric(0.0, 0.0),
            "update_successful": Metric(float(finite)),
        }

    def state(self) -> dict[str, Tensor]:
        """Return this rank's part of the optimiser state: `<parameter>/<kind>` -> tensor."""
        return {
            f"{name}/{kind}": local_part(value)
            for name, parameter in self._parameters.items()
            for kind, value in self._optimizer.state.get(parameter, {}).items()
        }

    def load_state(self, state: dict[str, Tensor], num_steps: int) -> None:
        """Continue from the result of `state` at the same sharding. Raises InputError for another model."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, kind = key.rpartition("/")
            by_parameter.setdefault(name, {})[kind] = value
        unknown = set(by_parameter) - set(self._parameters)
        if unknown:
            message = f"the optimiser state belongs to another model: it has the parameter {min(unknown)}"
            raise InputError(message, code="checkpoint.other_run")
        fresh: dict[Tensor, dict[str, Tensor]] = {}
        for name, kinds in by_parameter.items():
            parameter = self._parameters[name]
            fresh[parameter] = {kind: _like(parameter, kind, value) for kind, value in kinds.items()}
        self._optimizer.state.clear()
        self._optimizer.state.update(fresh)
        self.num_steps = num_steps

    def clear_state(self) -> None:
        """Reset to the state after construction; the schedule continues."""
        self._optimizer.state.clear()


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimiser step `step` (from 0) of `total_steps`. A pure function, so recovery needs no state.

    The rate rises linearly over w = int(warmup_steps_proportion * total_steps) steps; the w-th is the first at the full
    rate. Then it falls in the chosen shape to min_lr_ratio * lr, reached at the last step and constant after it.
    """
    num_warmup = int(config.warmup_steps_proportion * total_steps)
    if step < num_warmup:
        return config.lr * (step + 1) / num_warmup
    first_full = max(num_warmup - 1, 0)
    progress = min((step - first_full) / max(total_steps - 1 - first_full, 1), 1.0)
    shapes = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shapes[config.lr_scheduler_type])


def _make_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    if config.type == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _like(parameter: nn.Parameter, kind: str, value: Tensor) -> Tensor:
    """Convert saved state to the optimiser's own layout."""
    if kind == "step":
        return value.clone().to(parameter.device)
    state = torch.zeros_like(parameter.detach())
    own = local_part(state)
    if own.shape != value.shape:
        message = f"optimiser state of shape {list(value.shape)} does not fit a parameter of {list(own.shape)}"
        raise InputError(message, code="checkpoint.other_run")
    own.copy_(value)
    return state
