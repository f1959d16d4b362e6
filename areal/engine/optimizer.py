"""One optimiser with its learning-rate schedule, gradient clipping and state."""

import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from areal.api.config import OptimizerConfig
from areal.api.errors import ConfigError, TrainingDiverged
from areal.api.metrics import Metric, Metrics
from areal.engine.region import local_part, num_copies, sharded_as
from areal.engine.rounded_adam import MOMENTS, RoundedAdam, moments

MAX_WEIGHT_NORM = 2.0**32
"""Euclidean norm of all weights. An attention score multiplies four of them: above it float32 overflows."""


class ScheduledOptimizer:
    """AdamW or plain gradient descent over the (possibly sharded) parameters of one model."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: OptimizerConfig,
        total_steps: int,
        *,
        world_size: int = 1,
        offloads_state: bool = False,
    ) -> None:
        """`offloads_state`: the state is in CPU memory, and on the device for one parameter at a time."""
        self._parameters = parameters
        self._copies = {name: num_copies(parameter, world_size) for name, parameter in parameters.items()}
        self._config = config
        self._total_steps = total_steps
        self._optimizer = _make_optimizer(parameters, config)
        self._on_cpu: dict[Tensor, dict[str, Tensor]] | None = {} if offloads_state else None
        """With `offloads_state`: the state of each parameter, sharded as the parameter is."""
        self.num_steps = 0
        """Calls of `step` so far: the position in the schedule."""

    def step(self, reduce_sum: Callable[[Tensor], Tensor], loss: Tensor) -> Metrics:
        """Clip, update the weights, clear gradients, advance the schedule; a collective.

        `reduce_sum`: sum of a CPU float64 tensor over all ranks. `loss` []: of this rank, on any device. Raises
        TrainingDiverged on every rank when a loss or gradient of any rank, or an updated weight, is not finite.
        """
        rate = learning_rate(self._config, self.num_steps, self._total_steps)
        gradients = {name: local_part(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        squared, total_loss = reduce_sum(torch.stack([self._squared_norm(gradients), loss.cpu().double()])).tolist()
        if not math.isfinite(squared + total_loss):
            kind = "gradient" if math.isfinite(total_loss) else "loss"
            raise TrainingDiverged(kind, self._worst(gradients, reduce_sum), rate)
        norm = math.sqrt(squared)
        if norm > self._config.gradient_clipping:
            for gradient in gradients.values():
                gradient.mul_(self._config.gradient_clipping / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
        self._update()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        # Checked here, not while weights are published: a collective publication has sent its first buckets before the
        # last weight is read, and only policies are published. One fused pass over this rank's shards, one number read.
        weights = {name: local_part(parameter) for name, parameter in self._parameters.items()}
        if not reduce_sum(self._squared_norm(weights).reshape(1)).item() < MAX_WEIGHT_NORM**2:
            raise TrainingDiverged("weight", self._worst(weights, reduce_sum), rate)
        return {"lr": Metric(rate), "grad_norm": Metric(norm)}

    def _update(self) -> None:
        if self._on_cpu is None:
            self._optimizer.step()
            return
        groups = self._optimizer.param_groups
        each = [(group, parameter) for group in groups for parameter in group["params"]]
        for number, (group, parameter) in enumerate(each):
            self._optimizer.param_groups = [{**group, "params": [parameter], "number": number}]
            own, device = self._on_cpu.setdefault(parameter, {}), local_part(parameter).device
            if own:
                on_device = {kind: sharded_as(parameter, local_part(value).to(device)) for kind, value in own.items()}
                self._optimizer.state[parameter] = on_device
            self._optimizer.step()
            for kind, value in self._optimizer.state.pop(parameter, {}).items():
                own[kind] = sharded_as(parameter, local_part(value).cpu())
        self._optimizer.param_groups = groups

    def state(self) -> dict[str, Tensor]:
        """The optimiser state: `<parameter>/<kind>` -> a number, or a tensor sharded as the parameter is."""
        found = self._optimizer.state if self._on_cpu is None else self._on_cpu
        return {
            f"{name}/{kind}": value
            for name, parameter in self._parameters.items()
            for kind, value in found.get(parameter, {}).items()
        }

    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Continue from the result of `state`, whose tensors become those of the optimiser. Moments of another type of
        Adam are converted."""
        self.clear_state()
        found: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, kind = key.rpartition("/")
            found.setdefault(name, {})[kind] = value
        for name, given in found.items():
            parameter = self._parameters[name]
            own = _in_form_of(self._optimizer, parameter, given)
            if self._on_cpu is None:
                self._optimizer.state[parameter] = own
            else:
                self._on_cpu[parameter] = {
                    kind: sharded_as(parameter, local_part(value).cpu()) for kind, value in own.items()
                }
        self.num_steps = num_steps

    def clear_state(self) -> None:
        """Reset to the state after construction; the schedule continues."""
        self._optimizer.state.clear()
        if self._on_cpu is not None:
            self._on_cpu.clear()

    def _squared_norm(self, tensors: dict[str, Tensor]) -> Tensor:
        """The part of these tensors on this rank in the sum of squares over all ranks: [] float64 on the CPU.

        A part that several ranks hold counts as a fraction on each of them.
        """
        by_copies: dict[int, list[Tensor]] = {}
        for name, tensor in tensors.items():
            by_copies.setdefault(self._copies[name], []).append(tensor)
        total = torch.zeros((), dtype=torch.float64)
        for copies, parts in by_copies.items():
            total += get_total_norm([_row_norms(part) for part in parts]).cpu().double().square() / copies
        return total

    def _worst(self, tensors: dict[str, Tensor], reduce_sum: Callable[[Tensor], Tensor]) -> str:
        """The first tensor that is not finite on any rank, else the one with the largest norm; a collective."""
        squares = torch.stack([self._squared_norm({name: tensor}) for name, tensor in tensors.items()])
        found = dict(zip(tensors, reduce_sum(squares).tolist(), strict=True))
        return next(
            (name for name, value in found.items() if not math.isfinite(value)), max(found, key=found.__getitem__)
        )


def _row_norms(tensor: Tensor) -> Tensor:
    """The norms of the rows of a large tensor on a CPU, where the error of a float32 norm grows with the number of
    values: 0.3% for 4 million equal ones. Any other tensor itself."""
    is_inexact = tensor.device.type == "cpu" and tensor.numel() > 2**16
    return torch.linalg.vector_norm(tensor, dim=-1) if is_inexact else tensor


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


def _make_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """One group for each layout: fused and foreach kernels accept no DTensors of different meshes in one call.

    Parts of the model with another learning rate (optimizer.lr_of) are other groups: `lr_factor` times the rate.
    """
    factors = {name: _lr_factor(name, config) for name in parameters}
    for pattern in config.lr_of:
        if not any(re.search(pattern, name) for name in parameters):
            text = f"optimizer.lr_of: no trained weight matches {pattern!r}; the first one is {next(iter(parameters))}"
            raise ConfigError(text, code="model.no_such_weight")
    groups: dict[tuple[float, object], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        groups.setdefault((factors[name], layout), []).append(parameter)
    grouped = [{"params": group, "lr_factor": factor} for (factor, _), group in groups.items()]
    if config.type == "sgd":
        return torch.optim.SGD(grouped, lr=config.lr, weight_decay=config.weight_decay)
    if (bits := {"adam_bf16": 16, "adam_8bit": 8}.get(config.type)) is not None:
        betas, decay = (config.beta1, config.beta2), config.weight_decay
        return RoundedAdam(grouped, bits=bits, lr=config.lr, betas=betas, eps=config.eps, weight_decay=decay)
    return torch.optim.AdamW(
        grouped,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _lr_factor(name: str, config: OptimizerConfig) -> float:
    """The learning rate of a weight, that of the first pattern that matches, as a multiple of optimizer.lr."""
    return next((rate for pattern, rate in config.lr_of.items() if re.search(pattern, name)), config.lr) / config.lr


def _in_form_of(optimizer: torch.optim.Optimizer, parameter: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of one weight as this optimiser stores it."""
    rounded = optimizer if isinstance(optimizer, RoundedAdam) else None
    dtype = torch.float32 if rounded is None else rounded.moment_dtype(parameter)
    if MOMENTS[0] not in state or state[MOMENTS[0]].dtype == dtype:
        return state
    values = moments(state)
    if rounded is not None:
        return {"step": state["step"]} | rounded.stored(parameter, values)
    return {"step": state["step"]} | {name: sharded_as(parameter, value) for name, value in values.items()}
