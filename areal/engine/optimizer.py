"""One optimiser with its learning-rate schedule, gradient clipping and state."""

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from areal.api.config import OptimizerConfig
from areal.api.errors import ConfigError, TrainingDiverged
from areal.api.metrics import Metric, Metrics
from areal.api.registry import registered
from areal.engine.mesh import local_part, num_copies, region_of, sharded_as, whole_tensor

# ----------------------------------------------------------------------------------------------------------------------
# AdamW whose two moments are stored in bfloat16 or in 8 bits: half or a quarter of the optimiser state of AdamW.

BLOCK = 32
"""Neighbouring values of a row that share a scale in 8 bits. Tensor ranks may split rows, data ranks never do, so
the scales of a weight are a tensor that is sharded as the weight is."""
SCALE = "_scale"
"""Ends the name of the scales of a moment: `exp_avg_scale` [..., columns / BLOCK] float32."""
MOMENTS: tuple[str, str] = ("exp_avg", "exp_avg_sq")


class RoundedAdam(torch.optim.Optimizer):
    """AdamW computed in float32; the stored moments, and weights in bfloat16, are rounded up or down at random.

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
            if self.moment_dtype(parameter) == torch.uint8 and (columns := local_part(parameter).shape[-1]) % BLOCK:
                message = f"adam_8bit: a tensor rank has {columns} columns of a weight, not a multiple of {BLOCK}"
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
        local = {name: local_part(value) for name, value in state.items() if name != "step"}
        (beta1, beta2), step, dtype = group["betas"], int(state["step"]), self.moment_dtype(parameter)
        generator = torch.Generator(device=weight.device).manual_seed(seed)
        for rows in _cuts(weight):
            part, change = {name: value[rows] for name, value in local.items()}, gradient[rows].float()
            mean, square = moments(part).values()
            mean.lerp_(change, 1 - beta1)
            square.mul_(beta2).addcmul_(change, change, value=1 - beta2)
            for name, value in zip(MOMENTS, (mean, square), strict=True):
                for key, values in _stored(name, value, dtype, generator).items():
                    part[key].copy_(values)
            denominator = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
            exact = weight[rows].float()  # the weights themselves, if they are float32
            exact.mul_(1 - group["lr"] * group["weight_decay"])
            exact.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
            if weight.dtype == torch.bfloat16:
                weight[rows].copy_(_rounded(exact, generator))

    def stored(self, parameter: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state of these moments, this rank's parts in float32, rounded to nearest."""
        dtype = self.moment_dtype(parameter)
        forms = [_stored(name, value, dtype) for name, value in values.items()]
        return {name: sharded_as(parameter, value) for each in forms for name, value in each.items()}

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
    result: dict[str, Tensor] = {}
    for name in MOMENTS:
        value = local_part(state[name])
        if (scales := state.get(name + SCALE)) is None:
            result[name] = value.to(torch.float32, copy=True)
        else:
            book = _code_book(is_signed=name == MOMENTS[0], device=value.device)
            blocks = book[value.int()].unflatten(-1, (-1, BLOCK))
            result[name] = blocks.mul_(local_part(scales).unsqueeze(-1)).flatten(-2)
    return result


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


# ----------------------------------------------------------------------------------------------------------------------
# Muon: the momentum of a matrix is orthogonalised before it is subtracted (Jordan et al., 2024).

MOMENTUM = "momentum_buffer"
_MUON_BETA = 0.95
_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration; singular values end between about 0.7 and 1.2."""


class Muon(torch.optim.Optimizer):
    """Muon for the groups that are marked `is_matrix`, AdamW for the others.

    Computes as torch.optim.Muon, also for the stacked matrices of experts and for weights that ranks share: each rank
    orthogonalises whole matrices in turn, and all get the result.
    """

    def __init__(self, params: Iterable[Any], *, is_original: bool, **options: Any) -> None:
        """`is_original`: the learning rate times sqrt(max(1, rows / columns)) (Jordan), instead of 0.2 sqrt(max(rows,
        columns)), which gives the updates the size of those of AdamW (Moonlight, arXiv:2502.16982)."""
        super().__init__(params, options)
        self._is_original = is_original
        rest = [group for group in self.param_groups if not group["is_matrix"]]
        self._adam = torch.optim.AdamW(rest, fused=True) if rest else None
        if self._adam is not None:
            self._adam.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every weight that has a gradient; a collective when ranks share the weights."""
        rest: list[dict[str, Any]] = []
        for group in self.param_groups:
            if group["is_matrix"]:
                self._update([weight for weight in group["params"] if weight.grad is not None], group)
            else:
                rest.append(group)
        if self._adam is not None:
            self._adam.param_groups = rest
            self._adam.step()

    def _update(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        ranks = dist.get_world_size() if weights and isinstance(weights[0], DTensor) else 1
        for first in range(0, len(weights), ranks):
            turn, mine = weights[first : first + ranks], torch.empty(0)
            for number, weight in enumerate(turn):
                whole = whole_tensor(self._direction(weight))
                if ranks == 1 or number == dist.get_rank():
                    mine = orthogonal(whole)
            for number, weight in enumerate(turn):
                change = mine
                if ranks > 1:
                    if number != dist.get_rank():
                        change = torch.empty(weight.shape, dtype=torch.bfloat16, device=mine.device)
                    dist.broadcast(change, src=number)
                part = local_part(weight)
                part.mul_(1 - group["lr"] * group["weight_decay"])
                part.add_(change[region_of(weight)], alpha=-group["lr"] * self._factor(*weight.shape[-2:]))

    def _factor(self, rows: int, columns: int) -> float:
        return math.sqrt(max(1.0, rows / columns)) if self._is_original else 0.2 * math.sqrt(max(rows, columns))

    def _direction(self, weight: Tensor) -> Tensor:
        """The gradient after Nesterov momentum, sharded as the weight is."""
        assert weight.grad is not None
        gradient, state = local_part(weight.grad), self.state[weight]
        if MOMENTUM not in state:
            state[MOMENTUM] = sharded_as(weight, torch.zeros_like(gradient))
        momentum = local_part(state[MOMENTUM])
        momentum.lerp_(gradient, 1 - _MUON_BETA)
        return sharded_as(weight, gradient.lerp(momentum, _MUON_BETA))


def orthogonal(matrices: Tensor) -> Tensor:
    """[..., m, n] float32 -> bfloat16 with about the same singular vectors and singular values near 1, by a
    Newton-Schulz iteration in bfloat16."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    iterate = matrices.bfloat16().view(-1, *matrices.shape[-2:])
    iterate = iterate.mT if is_tall else iterate
    iterate = iterate / iterate.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(_ITERATIONS):
        gram = iterate @ iterate.mT
        iterate = torch.baddbmm(iterate, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), iterate, beta=a)
    return (iterate.mT if is_tall else iterate).reshape(matrices.shape).contiguous()  # ranks exchange it


MAX_WEIGHT_NORM = 2.0**32
"""Euclidean norm of all weights. An attention score multiplies four of them: above it float32 overflows."""


class StepSettings(NamedTuple):
    """What one optimiser step uses instead of the configuration."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_norm: float
    """Gradients with a larger norm are scaled down to it."""


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
        matrices: Collection[str] = (),
    ) -> None:
        """`offloads_state`: the state is in CPU memory, and on the device for one parameter at a time.
        `matrices`: weights, [..., out, in], that Muon treats as matrices."""
        self._parameters = parameters
        self._copies = {name: num_copies(parameter, world_size) for name, parameter in parameters.items()}
        self._config = config
        self._total_steps = total_steps
        self._optimizer = _make_optimizer(parameters, config, matrices)
        self._on_cpu: dict[Tensor, dict[str, Tensor]] | None = {} if offloads_state else None
        """Parameter -> its state, sharded as the parameter is; None without `offloads_state`."""
        self.num_steps = 0
        """Calls of `step` so far: the position in the schedule."""

    def step(
        self, reduce_sum: Callable[[Tensor], Tensor], loss: Tensor, settings: StepSettings | None = None
    ) -> Metrics:
        """Clip, update the weights, clear gradients, advance the schedule; a collective.

        `reduce_sum`: sum of a CPU float64 tensor over all ranks. `loss` []: of this rank, on any device. `settings`:
        None = those of the configuration. Raises TrainingDiverged on every rank when a loss or gradient of any rank, or
        an updated weight, is not finite.
        """
        rate = learning_rate(self._config, self.num_steps, self._total_steps) if settings is None else settings.lr
        max_norm = self._config.gradient_clipping if settings is None else settings.max_norm
        gradients = {name: local_part(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        squared, total_loss = reduce_sum(torch.stack([self._squared_norm(gradients), loss.cpu().double()])).tolist()
        if not math.isfinite(squared + total_loss):
            kind = "gradient" if math.isfinite(total_loss) else "loss"
            raise TrainingDiverged(kind, self._worst(gradients, reduce_sum), rate)
        norm = math.sqrt(squared)
        if norm > max_norm:
            for gradient in gradients.values():
                gradient.mul_(max_norm / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
            if settings is not None:
                group["betas"], group["eps"] = (settings.beta1, settings.beta2), settings.eps
                group["weight_decay"] = settings.weight_decay
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
            kept, device = self._on_cpu.setdefault(parameter, {}), local_part(parameter).device
            if kept:
                on_device = {kind: sharded_as(parameter, local_part(value).to(device)) for kind, value in kept.items()}
                self._optimizer.state[parameter] = on_device
            self._optimizer.step()
            for kind, value in self._optimizer.state.pop(parameter, {}).items():
                kept[kind] = sharded_as(parameter, local_part(value).cpu())
        self._optimizer.param_groups = groups

    def state(self) -> dict[str, Tensor]:
        """The optimiser state: `<parameter>/<kind>` -> a number, or a tensor sharded as the parameter is."""
        states = self._optimizer.state if self._on_cpu is None else self._on_cpu
        return {
            f"{name}/{kind}": value
            for name, parameter in self._parameters.items()
            for kind, value in states.get(parameter, {}).items()
        }

    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Continue from the result of `state`, whose tensors become those of the optimiser. Moments of another type of
        Adam are converted."""
        self.clear_state()
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, kind = key.rpartition("/")
            by_name.setdefault(name, {})[kind] = value
        for name, values in by_name.items():
            parameter = self._parameters[name]
            loaded = _in_form_of(self._optimizer, parameter, values)
            if self._on_cpu is None:
                self._optimizer.state[parameter] = loaded
            else:
                self._on_cpu[parameter] = {
                    kind: sharded_as(parameter, local_part(value).cpu()) for kind, value in loaded.items()
                }
        self.num_steps = num_steps

    def clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

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
        totals = dict(zip(tensors, reduce_sum(squares).tolist(), strict=True))
        return next(
            (name for name, value in totals.items() if not math.isfinite(value)), max(totals, key=totals.__getitem__)
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


def _make_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, matrices: Collection[str]
) -> torch.optim.Optimizer:
    """One group for each layout: fused and foreach kernels accept no DTensors of different meshes in one call.

    Parts of the model with another learning rate (optimizer.lr_of) are other groups: `lr_factor` times the rate. So are
    matrices (`is_matrix`) of an optimiser that treats them in another way.
    """
    entry = registered("optimizers", config.type, key="optimizer.type")
    factors = {name: _lr_factor(name, config) for name in parameters}
    for pattern in config.lr_of:
        if not any(re.search(pattern, name) for name in parameters):
            text = f"optimizer.lr_of: no trained weight matches {pattern!r}; the first one is {next(iter(parameters))}"
            raise ConfigError(text, code="model.no_such_weight")
    groups: dict[tuple[float, object, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        is_matrix = entry.facts.has_matrices and name in matrices
        groups.setdefault((factors[name], layout, is_matrix), []).append(parameter)
    grouped = [
        {"params": group, "lr_factor": factor, "is_matrix": is_matrix}
        for (factor, _, is_matrix), group in groups.items()
    ]
    return entry.load()(grouped, config)


def sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Gradient descent without momentum."""
    return torch.optim.SGD(groups, lr=config.lr, weight_decay=config.weight_decay)


def adam(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with moments in float32."""
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, weight_decay=decay, fused=True)


def adam_bf16(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with moments in bfloat16, also of weights in bfloat16."""
    return _rounded_adam(groups, config, bits=16)


def adam_8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with moments in 8 bits."""
    return _rounded_adam(groups, config, bits=8)


def muon(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Muon with updates of the size of those of AdamW."""
    return _muon(groups, config, is_original=False)


def muon_original(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Muon with the learning rate of its authors."""
    return _muon(groups, config, is_original=True)


def _muon(groups: list[dict[str, Any]], config: OptimizerConfig, *, is_original: bool) -> torch.optim.Optimizer:
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    return Muon(groups, is_original=is_original, lr=config.lr, betas=betas, eps=config.eps, weight_decay=decay)


def _rounded_adam(groups: list[dict[str, Any]], config: OptimizerConfig, *, bits: int) -> RoundedAdam:
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    return RoundedAdam(groups, bits=bits, lr=config.lr, betas=betas, eps=config.eps, weight_decay=decay)


def _lr_factor(name: str, config: OptimizerConfig) -> float:
    """The learning rate of a weight, that of the first pattern that matches, as a multiple of optimizer.lr."""
    return next((rate for pattern, rate in config.lr_of.items() if re.search(pattern, name)), config.lr) / config.lr


def _in_form_of(optimizer: torch.optim.Optimizer, parameter: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of one weight as this optimiser stores it; empty when it cannot be made from that of another one."""
    groups = optimizer.param_groups if isinstance(optimizer, Muon) else []
    matrices = [matrix for group in groups if group["is_matrix"] for matrix in group["params"]]
    if any(parameter is matrix for matrix in matrices):
        return {name: value for name, value in state.items() if name == MOMENTUM}
    if MOMENTUM in state:
        return {}
    rounded = optimizer if isinstance(optimizer, RoundedAdam) else None
    dtype = torch.float32 if rounded is None else rounded.moment_dtype(parameter)
    if MOMENTS[0] not in state or state[MOMENTS[0]].dtype == dtype:
        return state
    values = moments(state)
    if rounded is not None:
        return {"step": state["step"]} | rounded.stored(parameter, values)
    return {"step": state["step"]} | {name: sharded_as(parameter, value) for name, value in values.items()}
