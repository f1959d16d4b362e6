"""Where the optimiser's state is and in which types, with a stand-in for the optimiser of Transformer Engine."""

import importlib
import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from areal.api.config import OptimizerConfig
from areal.api.config.train import MegatronEngineConfig
from areal.engine.build import build_megatron_engine
from areal.engine.mesh import TrainerMesh
from tests.engine import engine_cases as cases
from tests.gpu import bodies
from tests.gpu.conftest import models  # noqa: F401 - a fixture

CPU = torch.device("cpu")
EXACT = MegatronEngineConfig(use_precision_aware_optimizer=True)
SHORT = replace(EXACT, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
SCALED = replace(EXACT, exp_avg_dtype="float16", exp_avg_sq_dtype="float16", main_params_dtype="float16")


class FusedAdam(torch.optim.Optimizer):
    """AdamW as Transformer Engine implements it: steps by group, states of several types, gradients in an attribute."""

    def __init__(
        self,
        params,
        lr,
        betas,
        eps,
        weight_decay,
        *,
        adam_w_mode=True,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        assert adam_w_mode
        assert not store_param_remainders
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self._types = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self._scales: dict[tuple[Tensor, str], Tensor] = {}

    def get_unscaled_state(self, weight: Tensor, name: str) -> Tensor:
        return self.state[weight][name].float() * self._scales.get((weight, name), torch.ones(()))

    def set_scaled_state(self, weight: Tensor, name: str, value: Tensor) -> None:
        assert value.dtype == torch.float32
        if self._types[name] == torch.float16:
            self._scales[weight, name] = scale = value.abs().max().clamp(min=1e-30) / 3e4
            value = value / scale
        self.state[weight][name] = value.to(self._types[name])

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), count = group["betas"], group["step"]
            for weight in group["params"]:
                gradient = weight.decoupled_grad if self.use_decoupled_grad else weight.grad
                if gradient is None:
                    continue
                gradient = gradient.float()
                if not self.state[weight]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.set_scaled_state(weight, name, torch.zeros_like(gradient))
                    if self.master_weights:
                        self.set_scaled_state(weight, "master_param", weight.float())
                first = self.get_unscaled_state(weight, "exp_avg").lerp(gradient, 1 - beta1)
                second = self.get_unscaled_state(weight, "exp_avg_sq").lerp(gradient.square(), 1 - beta2)
                master = self.get_unscaled_state(weight, "master_param") if self.master_weights else weight.float()
                root = (second / (1 - beta2**count)).sqrt() + group["eps"]
                master = master * (1 - group["lr"] * group["weight_decay"]) - group["lr"] / (1 - beta1**count) * (
                    first / root
                )
                self.set_scaled_state(weight, "exp_avg", first)
                self.set_scaled_state(weight, "exp_avg_sq", second)
                if self.master_weights:
                    self.set_scaled_state(weight, "master_param", master)
                weight.copy_(master)


@pytest.fixture
def make(models):  # noqa: F811
    importlib.import_module("tests.megatron.cpu_modules")
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    options = {"optimizer": cases.ADAM, "build": build_megatron_engine}
    yield partial(cases.make_engine, models / "qwen3", TrainerMesh(0, 1, CPU), **options)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def fused(make, monkeypatch):
    """As `make`, with the fake in place of Transformer Engine."""
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__version__, module.FusedAdam = "2.4.0", FusedAdam
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.import_module("megatron.core.utils"), "_te_version", None)
    core = importlib.import_module("megatron.core.optimizer")
    monkeypatch.setattr(core, "Adam", FusedAdam)
    monkeypatch.setattr(core, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(importlib.import_module("megatron.core.optimizer.distrib_optimizer"), "Adam", FusedAdam)
    return make


def stored(engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.named_weights(stored=True)}


def is_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_in_cpu_memory_give_the_same_bits(make, dtype):
    result = []
    for offloads in (False, True):
        engine = make(dtype=dtype, megatron=MegatronEngineConfig(offload_optimizer=offloads))
        cases.train(engine, cases.make_batch(), steps=3)
        result.append(stored(engine))
    assert is_equal(*result)


def test_weights_move_to_the_device_one_by_one():
    """On `meta`, where a moment that is not on the device of its weight would fail."""
    from areal.engine.megatron.optimizer import step_one_by_one

    weights = [torch.nn.Parameter(torch.ones(3, device="meta")) for _ in range(3)]
    inner = torch.optim.AdamW(weights, foreach=False)
    seen = []

    def step() -> None:
        [group] = inner.param_groups
        [weight] = group["params"]
        others = [value for each, state in inner.state.items() if each is not weight for value in state.values()]
        seen.append((weight, {value.device.type for value in others}))
        state = inner.state[weight]
        assert all(state[name].device.type == "meta" for name in state)
        state |= {name: torch.zeros(3, device="meta") for name in ("exp_avg", "exp_avg_sq")}

    moved: list[tuple[str, str]] = []
    plain = torch.Tensor.to

    def to(value: Tensor, place: torch.device) -> Tensor:
        moved.append((value.device.type, place.type))
        return plain(torch.zeros(3), place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        for _ in range(2):
            step_one_by_one(inner, step)
    assert [weight is weights[place % 3] for place, (weight, _) in enumerate(seen)] == [True] * 6
    assert all(devices <= {"cpu"} for _, devices in seen)
    assert moved.count(("cpu", "meta")) == 6
    assert moved.count(("meta", "cpu")) == 12
    assert len(inner.param_groups[0]["params"]) == 3


@pytest.mark.parametrize("options", [{"offload_optimizer": True}, {}], ids=["offloaded", "plain"])
def test_steps_are_counted_by_group(fused, options, tmp_path):
    megatron = MegatronEngineConfig(**options)
    engine = fused(megatron=megatron)
    cases.train(engine, cases.make_batch(), steps=2)
    assert engine._optimizer.num_updates() == 2
    same = {"dtype": "float32", "build": build_megatron_engine, "megatron": megatron}
    assert bodies.recovered_equals_unbroken(CPU, engine._source, tmp_path / "state", **same)


@pytest.mark.parametrize("options", [EXACT, SHORT, SCALED], ids=["float32", "bfloat16", "float16"])
def test_short_states_continue_from_a_checkpoint(fused, options, tmp_path):
    """Bit for bit, except that the scales of float16 are computed again."""
    engine, plain = fused(dtype="bfloat16", megatron=options), fused(dtype="bfloat16")
    if options is not SCALED:
        assert is_equal(stored(engine), load_file(engine._source / "model.safetensors"))
    for each in (engine, plain):
        cases.train(each, cases.make_batch(), steps=3)
    assert engine._optimizer.num_updates() == 3
    assert distance(engine, plain) <= (0.0 if options is EXACT else 1e-2)
    engine.save(tmp_path / "state", with_optimizer=True)
    again = fused(dtype="bfloat16", megatron=options)
    again.load(tmp_path / "state")
    for each in (engine, again):
        cases.train(each, cases.make_batch())
    assert again._optimizer.num_updates() == 4
    assert distance(engine, again) <= (2e-3 if options is SCALED else 0.0)  # a rounding of float16


def distance(entry, other) -> float:
    theirs = stored(other)
    return max((value - theirs[name]).abs().max().item() for name, value in stored(entry).items())


def test_reset_moments_keep_the_weights(fused):
    engine = fused(dtype="bfloat16", megatron=EXACT, optimizer=OptimizerConfig(lr=1e-2))
    cases.train(engine, cases.make_batch(), steps=2)
    before = stored(engine)
    engine.reset_optimizer()
    assert engine._optimizer.num_updates() == 0
    assert is_equal(before, stored(engine))
