"""The trainable state of tenants in one engine: adapters that take turns, or the whole model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from areal.api.errors import ArealError
from areal.api.metrics import Metrics
from areal.engine.adapter_format import PeftAdapter
from areal.engine.fsdp import FSDPEngine
from areal.engine.lora import DOWN
from areal.engine.mesh import copy_part, local_part, whole_tensor
from areal.engine.optimizer import StepSettings
from areal.serve.service import ADAPTER, STATE
from areal.serve.tenants import ALPHA
from areal.serve.wire import AdapterSettings, invalid
from areal.system.durable import is_complete


@dataclass(slots=True, kw_only=True)
class _Slot:
    """An adapter that is not in the engine: this rank's parts."""

    settings: AdapterSettings
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    moments: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    num_steps: int = 0


class _Slots(ABC):
    """The operations on what is in the engine."""

    def __init__(self, engine: FSDPEngine) -> None:
        self.engine = engine
        self._active = ""

    def forget_moments(self) -> None:
        """The optimiser of the active tenant begins again."""
        self.engine.optimizer.clear_state()
        self.engine.optimizer.num_steps = 0

    def clear_gradients(self) -> None:
        """Clear those of the active tenant."""
        self.engine.discard_gradients()

    def save(self, folder: Path, *, with_gradients: bool = False) -> None:
        """Write the weights of the active tenant with the optimiser state."""
        self.engine.save(folder, with_optimizer=True, with_gradients=with_gradients)

    def step(self, settings: StepSettings) -> Metrics:
        """An optimiser step of the active tenant, which an error drops: some weights may have changed."""
        try:
            return self.engine.optimizer_step(settings)
        except ArealError:
            self.drop(self._active)
            raise

    @abstractmethod
    def drop(self, name: str) -> None:
        """Forget the state of a tenant."""


class WholeModel(_Slots):
    """All weights of the model, of one tenant at a time: the schedule drops it before another one enters."""

    def __init__(self, engine: FSDPEngine, base: Path) -> None:
        """`base`: see `base_folder`; what it lacks is written; a collective."""
        super().__init__(engine)
        self._base = base / STATE
        for part in (STATE, ADAPTER):
            lacks_it = torch.tensor([float(not is_complete(base / part))])
            if engine.all_reduce(lacks_it, "max").item():  # on any rank: all of them write
                engine.save(base / part, with_optimizer=part == STATE)

    def __contains__(self, name: str) -> bool:
        return name == self._active

    def create(self, name: str, settings: AdapterSettings) -> None:
        """The weights before any training."""
        self.restore(name, settings, self._base)

    def restore(self, name: str, settings: AdapterSettings, folder: Path) -> None:
        """The state that `save` wrote. RequestError for `settings` of weights that are not trained."""
        if not (settings.train_attn and settings.train_mlp and settings.train_unembed):
            names = "train_attn, train_mlp and train_unembed"
            raise invalid(f"{names} must be true: this service trains all weights (--full)")
        self.clear()
        self.engine.load(folder)
        self._active = name

    def activate(self, name: str) -> None:
        """Nothing to do: the only state is in the engine."""

    def export(self, folder: Path) -> None:
        """Write a checkpoint that transformers loads."""
        self.engine.save(folder, with_optimizer=False)

    def drop(self, name: str) -> None:
        if name == self._active:
            self.clear()

    def clear(self) -> None:
        """Forget the state of any tenant."""
        self._active = ""
        self.forget_moments()
        self.clear_gradients()


class AdapterSlots(_Slots):
    """The adapters of all tenants, by name. Every trainer rank makes the same calls.

    An adapter of a rank below that of the engine has rows and columns of zeros, whose gradients are 0.
    """

    def __init__(self, engine: FSDPEngine, adapter: PeftAdapter) -> None:
        """`engine`: with `adapter`, which was not trained yet."""
        super().__init__(engine)
        self._adapter = adapter
        self._trained = adapter.adapters.trained()
        self._slots: dict[str, _Slot] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def create(self, name: str, settings: AdapterSettings) -> None:
        """A new adapter, whose product is 0, in the engine; it replaces one of that name."""
        self._reset(name, settings)
        self._adapter.adapters.draw(settings.seed or 0, torch.float32)
        for weight_name, weight in self._trained.items():
            if weight_name.endswith(f".{DOWN}"):
                whole = whole_tensor(weight.detach()).clone()
                whole[settings.rank :] = 0
                copy_part(weight, whole)

    def restore(self, name: str, settings: AdapterSettings, folder: Path) -> None:
        """The adapter that `save` wrote, in the engine, with all of its state. After an error there is none."""
        self._reset(name, settings)
        try:
            self.engine.load(folder)
        except ArealError:
            self.drop(name)
            raise

    def _reset(self, name: str, settings: AdapterSettings) -> None:
        """An empty slot for the values that the engine gets next."""
        self._set_aside()
        self._slots[name] = _Slot(settings=settings)
        self._enter(name)
        self.forget_moments()

    def activate(self, name: str) -> None:
        """Bring an adapter into the engine."""
        if name == self._active:
            return
        self._set_aside()
        slot = self._slots[name]
        with torch.no_grad():
            for weight_name, weight in self._trained.items():
                local_part(weight).copy_(slot.weights[weight_name])
                weight.grad = slot.gradients.get(weight_name)
        self.engine.optimizer.load_state(slot.moments, slot.num_steps)
        self._enter(name)
        slot.weights, slot.gradients, slot.moments = {}, {}, {}

    def _enter(self, name: str) -> None:
        self._active = name
        rank = self._slots[name].settings.rank
        self._adapter.cut_to(rank, ALPHA)

    def _set_aside(self) -> None:
        if not self._active:
            return
        slot = self._slots[self._active]
        slot.weights = {name: local_part(weight.detach()).clone() for name, weight in self._trained.items()}
        slot.gradients = {name: weight.grad for name, weight in self._trained.items() if weight.grad is not None}
        slot.moments, slot.num_steps = self.engine.optimizer.state(), self.engine.optimizer.num_steps
        self.engine.optimizer.clear_state()
        self.clear_gradients()
        self._active = ""

    def clear(self) -> None:
        """Forget all adapters."""
        self._set_aside()
        self._slots.clear()

    def step(self, settings: StepSettings) -> Metrics:
        """An optimiser step of the layers that the active adapter trains."""
        chosen = self._slots[self._active].settings
        for name, weight in self._trained.items():
            if not chosen.trains(name.rpartition(".")[0]):
                weight.grad = None
        return super().step(settings)

    def export(self, folder: Path) -> None:
        """Write the active adapter in the format of peft."""
        self.engine.save_adapter(folder)

    def drop(self, name: str) -> None:
        if name == self._active:
            self.engine.optimizer.clear_state()
            self.clear_gradients()
            self._active = ""
        self._slots.pop(name, None)


Slots = AdapterSlots | WholeModel
"""The trainable state of the tenants of a service."""
