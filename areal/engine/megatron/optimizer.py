"""Megatron-Core's optimiser with the schedule, the clipping and the checks of the train engines."""
# pyright: reportMissingImports=false

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from areal.api.config import TrainEngineConfig
from areal.api.errors import TrainingDiverged
from areal.api.metrics import Metric, Metrics
from areal.engine.megatron.model_config import optimizer_config, shares_state
from areal.engine.megatron.weight_map import MappedWeight
from areal.engine.megatron.weights import RankWeights, key_of
from areal.engine.mesh import TrainerMesh
from areal.engine.optimizer import MAX_WEIGHT_NORM, learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The optimiser state of a weight besides its float32 value."""


class MegatronOptimizer:
    """AdamW or plain gradient descent, whose state data ranks may share."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: TrainEngineConfig,
        weights: RankWeights,
        *,
        total_steps: int,
        mesh: TrainerMesh,
        groups: ProcessGroupCollection,
        dtype: torch.dtype,
    ) -> None:
        assert config.optimizer is not None
        self._config, self._total_steps = config.optimizer, total_steps
        self._chunks, self._weights, self._mesh, self._groups = chunks, weights, mesh, groups
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # an empty table of overrides: weight decay for all weights, as with FSDP
            self._inner = get_megatron_optimizer(
                optimizer_config(config, dtype), list(chunks), config_overrides={}, use_gloo_process_groups=False
            )
        if config.megatron.offload_optimizer:
            for part in self._parts():
                part.optimizer.step = partial(step_one_by_one, part.optimizer, part.optimizer.step)
        self._state_device = torch.device("cpu") if config.megatron.offload_optimizer else None
        self._is_shared = shares_state(config)
        self._is_late = self._is_shared and config.megatron.ddp.overlap_param_gather
        self.num_steps = 0
        """Calls of `step` so far: the position in the schedule."""

    def step(self, loss: Tensor) -> Metrics:
        """Step as `areal.engine.optimizer.ScheduledOptimizer.step`. `loss`: of this rank, 0 where it computes none."""
        rate = learning_rate(self._config, self.num_steps, self._total_steps)
        self._inner.prepare_grads()
        norm = float(self._inner.get_grad_norm())
        facts = torch.tensor([0.0 if math.isfinite(norm) else 1.0], dtype=torch.float64)
        broken, total_loss = self._mesh.all_reduce(torch.cat([facts, loss.cpu().double().reshape(1)])).tolist()
        if broken or not math.isfinite(total_loss):
            kind = "gradient" if math.isfinite(total_loss) else "loss"
            gradients = {
                name: grad
                for name, p in self._weights.parameters.items()
                if (grad := getattr(p, "main_grad", None)) is not None
            }
            raise TrainingDiverged(kind, self._worst(gradients), rate)
        if norm > self._config.gradient_clipping:
            for gradient in self._gradients():
                gradient.mul_(self._config.gradient_clipping / norm)
        for group in self._inner.param_groups:
            group["lr"] = rate
        self._inner.step_with_ready_grads()
        self.clear_gradients()
        self.num_steps += 1
        if not self._weight_norm_squared() < MAX_WEIGHT_NORM**2:
            raise TrainingDiverged("weight", self._worst(self._weights.parameters), rate)
        return {"lr": Metric(rate), "grad_norm": Metric(norm)}

    def gather_weights(self) -> None:
        """Complete the weights of the model, which else are gathered in the next forward pass; a collective."""
        for chunk in self._chunks if self._is_late else ():
            chunk.start_param_sync(force_sync=True)

    def clear_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._inner.zero_grad()

    def clear_state(self) -> None:
        """Reset to the state after construction; the schedule continues."""
        for part in self._parts():
            for group in part.optimizer.param_groups:
                group.pop("step", None)
                for weight in group["params"]:
                    state = part.optimizer.state.pop(weight, {})
                    if _MASTER in state:  # the moments are new, the weight is not
                        main = _Main(part.optimizer, group, weight, 0, weight.numel())
                        part.optimizer.state[weight] = state
                        main.put({kind: torch.zeros_like(weight, dtype=torch.float32) for kind in MOMENTS}, 0.0)

    def _parts(self) -> list[Any]:
        return [
            chained_optimizer
            for chained_optimizer in self._inner.chained_optimizers
            if getattr(chained_optimizer, "optimizer", None) is not None
        ]

    def _gradients(self) -> list[Tensor]:
        parameters = [p for part in self._parts() for p in part.get_parameters()]
        grads = [getattr(p, "decoupled_grad", None) if p.grad is None else p.grad for p in parameters]
        return [grad for grad in grads if grad is not None]

    def _weight_norm_squared(self) -> float:
        """Sum of squares over all weights, each once; a collective."""
        total = torch.zeros((), dtype=torch.float64)
        for weight, value in self._weights.of_rank(with_copies=False):
            copies = self._weights.data_group(weight).size()
            if weight.split is None:
                copies *= self._weights.tensor_group(weight).size()
            total += value.detach().float().square().sum().cpu().double() / copies
        return float(self._mesh.all_reduce(total.reshape(1)).item())

    def _worst(self, tensors: Mapping[str, Tensor]) -> str:
        """The Hugging Face name of the first weight whose tensor is not finite on any rank, else of the largest.

        `tensors`: by `key_of`, of this rank; a collective.
        """
        order = {part.name: 0.0 for weight in self._weights.weights for part in weight.parts[:1]}
        for weight, _ in self._weights.of_rank():
            if (value := tensors.get(key_of(weight))) is not None:
                order[weight.parts[0].name] += float(value.detach().float().square().sum())
        squares = torch.tensor(list(order.values()), dtype=torch.float64)
        totals = dict(zip(order, self._mesh.all_reduce(squares).tolist(), strict=True))
        bad = (name for name, value in totals.items() if not math.isfinite(value))
        return next(bad, max(totals, key=totals.__getitem__))

    def state_of(self, weight: MappedWeight, parameter: Tensor, kinds: Sequence[str]) -> dict[str, Tensor]:
        """The float32 `value` and the optimiser state `kinds` of a weight of this rank.

        A collective over the ranks that hold the same part of the weight.
        """
        main = self._main_of(parameter)
        if not isinstance(parameter, nn.Parameter):  # a buffer, which all ranks have
            return {"value": parameter.detach().float()}
        group = self._weights.data_group(weight)
        whole: dict[str, Tensor] = {}
        for kind in ("value", *kinds):
            joined = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if main is not None:
                joined[main.first : main.end] = main.get(kind).float().flatten()
            if self._is_shared and group.size() > 1:
                dist.all_reduce(joined, group=group)
            whole[kind] = joined.view(parameter.shape)
        return whole

    def set_state(self, parameter: Tensor, state: Mapping[str, Tensor], step: float | None) -> None:
        """Continue with the result of `state_of`; local. The value also becomes the model's weight.

        `step`: updates that the moments contain; None = the moments stay.
        """
        with torch.no_grad():
            parameter.copy_(state["value"])
            main = self._main_of(parameter)
            if main is None:
                return
            cut = {kind: value.flatten()[main.first : main.end] for kind, value in state.items()}
            main.put_value(cut.pop("value"))
            if step is not None:
                main.put(cut, step, self._state_device)

    def set_value(self, parameter: Tensor, value: Tensor) -> None:
        """Continue with other weights and the same moments; local."""
        self.set_state(parameter, {"value": value}, None)

    def num_updates(self) -> float:
        """Updates that the moments contain; a collective."""
        steps = [float(state.get("step", 0.0)) for part in self._parts() for state in part.optimizer.state.values()]
        steps += [float(group.get("step", 0.0)) for part in self._parts() for group in part.optimizer.param_groups]
        return float(self._mesh.all_reduce(torch.tensor([max(steps, default=0.0)], dtype=torch.float64), "max").item())

    def kinds(self) -> tuple[str, ...]:
        """The moments that exist; none before the first step. A collective."""
        here = any(
            state.get("exp_avg") is not None for part in self._parts() for state in part.optimizer.state.values()
        )
        flag = torch.tensor([float(here)], dtype=torch.float64)
        return MOMENTS if self._mesh.all_reduce(flag, "max").item() else ()

    def _main_of(self, parameter: Tensor) -> "_Main | None":
        for optimizer in self._parts():
            if isinstance(optimizer, DistributedOptimizer):
                place = optimizer.model_param_group_index_map.get(parameter)
                if place is not None:
                    group = optimizer.optimizer.param_groups[place[0]]
                    part = optimizer._get_model_param_range_map(parameter)["param"]
                    return _Main(optimizer.optimizer, group, group["params"][place[1]], part.start, part.end)
            else:
                main = getattr(parameter, "main_param", parameter)
                for group in optimizer.optimizer.param_groups:
                    if any(main is each for each in group["params"]):
                        return _Main(optimizer.optimizer, group, main, 0, parameter.numel())
        return None


_MASTER = "master_param"
"""Name of the weight in the state of Transformer Engine's optimiser (use_precision_aware_optimizer)."""


@dataclass(frozen=True, slots=True)
class _Main:
    """What the optimiser of this rank updates of a weight: elements `first` to `end`."""

    inner: Any
    group: dict[str, Any]
    main: Tensor
    first: int
    end: int

    @property
    def _is_fused(self) -> bool:
        """Transformer Engine's optimiser counts steps by group, and its state may have other types than float32."""
        return hasattr(self.inner, "set_scaled_state")

    def get(self, kind: str) -> Tensor:
        """The value or a moment."""
        state = self.inner.state.get(self.main, {})
        if kind == "value" and _MASTER not in state:
            return self.main.detach()
        name = _MASTER if kind == "value" else kind
        return self.inner.get_unscaled_state(self.main, name) if self._is_fused else state[name]

    def put_value(self, value: Tensor) -> None:
        self.main.copy_(value.view(self.main.shape))
        if self._is_fused and self.inner.master_weights:
            exact = value.to(self.main.device, torch.float32).view(self.main.shape).clone()
            self.inner.set_scaled_state(self.main, _MASTER, exact)
            if MOMENTS[0] not in self.inner.state[self.main]:
                self.put({kind: torch.zeros_like(exact) for kind in MOMENTS}, 0.0)

    def put(self, moments: Mapping[str, Tensor], step: float, device: torch.device | None = None) -> None:
        """Replace the moments; none: as before the first step. `device`: where they are, None = that of the weight."""
        local = {
            kind: value.to(device or self.main.device).view(self.main.shape).clone() for kind, value in moments.items()
        }
        if self._is_fused:
            self.group["step"] = int(step)
            for kind, value in local.items():
                self.inner.set_scaled_state(self.main, kind, value)
            return
        self.inner.state.pop(self.main, None)
        if local:  # each weight has its number of steps: Megatron-Core's own format shares one tensor among them
            self.inner.state[self.main] = {"step": torch.tensor(step), **local}


def step_one_by_one(inner: Any, step: Callable[[], object]) -> None:
    """A step of the optimiser `inner` whose moments are on the device for one weight at a time, else in CPU memory."""
    groups: list[dict[str, Any]] = inner.param_groups
    for group in groups:
        single = group
        for weight in group["params"]:
            single = {**group, "params": [weight]}
            inner.param_groups = [single]
            _move_moments(inner, weight, weight.device)
            step()
            _move_moments(inner, weight, torch.device("cpu"))
        if "step" in single:
            group["step"] = single["step"]
    inner.param_groups = groups


def _move_moments(inner: Any, weight: Tensor, device: torch.device) -> None:
    state = inner.state.get(weight, {})
    for kind in MOMENTS:
        if kind in state:
            state[kind] = state[kind].to(device)
