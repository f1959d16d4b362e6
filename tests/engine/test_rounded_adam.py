"""AdamW with moments in bfloat16 and in 8 bits against AdamW."""

from functools import partial

import pytest
import torch

from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.api.config.train import MegatronEngineConfig
from areal.engine.mesh import local_part
from areal.engine.optimizer import BLOCK, MOMENTS, SCALE, RoundedAdam, ScheduledOptimizer, _stored, moments
from tests.engine import engine_cases
from tests.expect import raises_code
from tests.rank_processes import run_ranks

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BITS = pytest.mark.parametrize("bits", [16, 8])


def descend(kind, steps: int, seed: int = 0) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """Noisy gradients of a quadratic with curvatures from 0.1 to 10."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.ones(2, BLOCK))
    curvature = torch.logspace(-1, 1, 2 * BLOCK).view(2, BLOCK)
    optimizer = kind([weight], **OPTIONS)
    for _ in range(steps):
        weight.grad = weight.detach() * curvature + 0.1 * torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weight.detach(), optimizer


@BITS
def test_it_ends_where_adamw_ends(bits):
    exact, _ = descend(torch.optim.AdamW, 400)
    result, optimizer = descend(partial(RoundedAdam, bits=bits), 400)
    assert (result - exact).abs().mean() < 0.02
    state = next(iter(optimizer.state.values()))
    assert {state[name].dtype for name in MOMENTS} == {torch.bfloat16 if bits == 16 else torch.uint8}


@BITS
def test_the_second_moment_follows_gradients_that_become_smaller(bits):
    """Rounded to nearest, it would stay where it is: one step changes it by less than half of a step of bfloat16."""
    weight = torch.nn.Parameter(torch.ones(1000, BLOCK))
    sizes = torch.linspace(0.3, 1, BLOCK)
    optimizer = RoundedAdam([weight], bits=bits, **OPTIONS)
    for size, steps in ((1.0, 10), (0.1, 200)):
        for _ in range(steps):
            weight.grad = (size * sizes).expand(1000, BLOCK).clone()
            optimizer.step()
    exact = 1 - 0.999**10
    for _ in range(200):
        exact = exact * 0.999 + 0.001 * 0.01
    result = moments(optimizer.state[weight])["exp_avg_sq"].mean(0) / sizes.square()
    assert (result / exact - 1).abs().max() < 0.03


@BITS
def test_equal_steps_are_equal(bits):
    first, second = (descend(partial(RoundedAdam, bits=bits), 20)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_codes_are_within_the_error_of_their_type():
    """The distance between two codes of the highest power of ten is 0.9 / 64 of the largest value of a block, of second
    moments half of it."""
    values = torch.randn(6, 3 * BLOCK, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(6)[:, None]
    for name, exact, step in zip(MOMENTS, (values, values.square()), (0.9 / 64, 0.9 / 128), strict=True):
        for generator, share in ((None, 0.5), (torch.Generator(), 1.0)):
            state = _stored(name, exact, torch.uint8, generator)
            assert state[name + SCALE].shape == (6, 3)
            gaps = (moments(dict.fromkeys(MOMENTS, exact) | state)[name] - exact).unflatten(-1, (-1, BLOCK)).abs()
            assert (gaps <= share * 1.001 * step * exact.unflatten(-1, (-1, BLOCK)).abs().amax(-1, True)).all()
    tiny = torch.tensor([1e-30, 1.0] * (BLOCK // 2)).view(1, BLOCK)
    state = _stored("exp_avg_sq", tiny, torch.uint8)
    assert (moments({"exp_avg": tiny} | state)["exp_avg_sq"] > 0).all()


def test_vectors_and_rows_without_blocks_have_exact_moments():
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((BLOCK,), (2, BLOCK + 1))]
    optimizer = RoundedAdam(weights, bits=8, **OPTIONS)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for weight in weights:
        assert optimizer.state[weight].keys() == {"step", *MOMENTS}
        assert optimizer.state[weight]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("before", ["adam", "adam_bf16", "adam_8bit"])
@pytest.mark.parametrize("after", ["adam", "adam_bf16", "adam_8bit"])
def test_a_run_continues_with_another_type_of_adam(before, after):
    def make(kind: str) -> tuple[torch.nn.Parameter, ScheduledOptimizer]:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 2 * BLOCK).view(2, BLOCK))
        return weight, ScheduledOptimizer({"w": weight}, OptimizerConfig(type=kind, lr=1e-2), 10)

    def step(weight: torch.nn.Parameter, optimizer: ScheduledOptimizer) -> torch.Tensor:
        weight.grad = weight.detach().sin()
        optimizer.step(lambda values: values, torch.zeros(()))
        return weight.detach()

    first, saved = make(before)
    step(first, saved)
    second, continued = make(after)
    with torch.no_grad():
        second.copy_(first)
    continued.load_state({name: value.clone() for name, value in saved.state().items()}, saved.num_steps)
    assert (step(second, continued) - step(first, saved)).abs().max() < (1e-6 if before == after else 1e-3)
    assert continued.state().keys() == state_names(after)


def state_names(kind: str) -> set[str]:
    scales = {f"w/{name}{SCALE}" for name in MOMENTS} if kind == "adam_8bit" else set()
    return {"w/step", *(f"w/{name}" for name in MOMENTS), *scales}


def test_rows_that_tensor_ranks_split_inside_a_block_are_refused(monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(2, BLOCK))
    monkeypatch.setattr("areal.engine.optimizer.local_part", lambda tensor: tensor.detach()[:, : BLOCK // 2])
    with raises_code("model.cannot_split", BLOCK // 2):
        RoundedAdam([weight], bits=8, **OPTIONS)


@pytest.mark.parametrize(
    ("moments_in", "betas", "refused"),
    [
        ({"exp_avg_sq_dtype": "bfloat16"}, {}, ["optimizer.beta2"]),
        ({"exp_avg_sq_dtype": "bfloat16"}, {"beta2": 0.99}, []),
        ({"exp_avg_dtype": "bfloat16"}, {"beta1": 0.995}, ["optimizer.beta1"]),
        ({"exp_avg_dtype": "bfloat16"}, {}, []),
    ],
)
def test_moments_of_bfloat16_that_would_never_decay_are_refused(moments_in, betas, refused):
    """Those of Megatron-Core are rounded to nearest; `adam_bf16` rounds at random and takes every beta2."""
    megatron = MegatronEngineConfig(use_precision_aware_optimizer=True, **moments_in)
    config = TrainEngineConfig(path="m", megatron=megatron, optimizer=OptimizerConfig(**betas))
    assert [path for path, *_ in config.megatron_problems(1)] == refused
    assert list(TrainEngineConfig(path="m", optimizer=OptimizerConfig(type="adam_bf16", **betas)).problems()) == []


class TestWeightsWithoutMasters:
    """Weights in bfloat16 that no optimiser keeps in float32 too."""

    def walk(self, kind, steps=400, size=256):
        """Weights of 1 whose every step is a 64th of the distance to the next number of bfloat16, down to 0.976."""
        weight = torch.nn.Parameter(torch.ones(4, size, dtype=torch.bfloat16))
        optimizer = kind([weight], **OPTIONS | {"lr": 2**-8 / 64, "weight_decay": 0.0})
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach()

    def test_they_go_where_rounding_to_nearest_leaves_them(self):
        assert self.walk(torch.optim.AdamW).eq(1).all()
        actual = self.walk(partial(RoundedAdam, bits=16))
        expected = 1 - 400 * 2**-8 / 64
        error = 2**-8 * (400 / 64) ** 0.5 / len(actual.flatten()) ** 0.5  # of a mean of independent roundings
        assert actual.float().mean().item() == pytest.approx(expected, abs=4 * error)
        assert torch.equal(actual, self.walk(partial(RoundedAdam, bits=16)))  # a replay, or another rank with a copy

    def test_decay_moves_them_too(self):
        weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = RoundedAdam([weight], bits=16, **OPTIONS | {"lr": 1e-2, "weight_decay": 0.01})
        for _ in range(100):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        assert weight.detach().float().mean().item() == pytest.approx((1 - 1e-4) ** 100, abs=1e-3)

    def test_an_engine_holds_no_float32_weights_and_continues_with_equal_bits(self, tmp_path):
        engine_cases.write_models(tmp_path)
        options = {"dtype": "bfloat16", "optimizer": OptimizerConfig(type="adam_bf16_weights", lr=1e-4)}
        batch = engine_cases.make_batch()
        engine = engine_cases.make_engine(tmp_path / "qwen2", **options)
        assert {weight.dtype for weight in engine._model.model.parameters()} == {torch.bfloat16}
        engine_cases.train(engine, batch, steps=2)
        engine.save(tmp_path / "saved", with_optimizer=True)
        engine_cases.train(engine, batch, steps=2)
        again = engine_cases.make_engine(tmp_path / "qwen2", **options, seed=5)
        again.load(tmp_path / "saved")
        engine_cases.train(again, batch, steps=2)
        actual, expected = engine_cases.weights_of(again), engine_cases.weights_of(engine)
        assert all(torch.equal(actual[name], value) for name, value in expected.items())
        exact = engine_cases.make_engine(tmp_path / "qwen2", **options | {"optimizer": OptimizerConfig(lr=1e-4)})
        assert {weight.dtype for weight in exact._model.model.parameters()} == {torch.float32}


def on_two_ranks(mesh, folder) -> list[float]:
    options = {"dtype": "bfloat16", "optimizer": OptimizerConfig(type="adam_bf16_weights", lr=1e-3)}
    engine = engine_cases.make_engine(folder / "qwen2", mesh, **options)
    assert {local_part(weight).dtype for weight in engine._model.model.parameters()} == {torch.bfloat16}
    engine_cases.train(engine, engine_cases.share_of(engine_cases.make_batch(), mesh), steps=2)
    return [value for weight in engine_cases.weights_of(engine).values() for value in weight.flatten().tolist()]


def test_two_ranks_have_one_policy_of_rounded_weights(tmp_path):
    engine_cases.write_models(tmp_path)
    first, other = run_ranks(on_two_ranks, tmp_path)
    assert first == other
    alone = engine_cases.make_engine(
        tmp_path / "qwen2", dtype="bfloat16", optimizer=OptimizerConfig(type="adam_bf16_weights", lr=1e-3)
    )
    before = torch.cat([value.flatten() for value in engine_cases.weights_of(alone).values()]).float()
    moved = torch.tensor(first) - before
    assert moved.abs().mean().item() == pytest.approx(2e-3, rel=0.3)  # two steps of Adam
