"""Muon against torch.optim.Muon, its state, and changes of the optimiser of a run."""

import math

import pytest
import torch
from torch import nn

from areal.api.allocation import AllocationMode
from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.engine.optimizer import MOMENTUM, ScheduledOptimizer, orthogonal

SHAPES = {"tall": (16, 8), "wide": (8, 24), "experts": (3, 12, 8), "norm": (7,), "table": (20, 8), "conv": (8, 1, 4)}
MATRICES = ("tall", "wide", "experts")
LOSS = torch.zeros(())


def optimizer_of(kind, weights):
    config = OptimizerConfig(type=kind, lr=0.1, weight_decay=0.05, gradient_clipping=1e9, warmup_steps_proportion=0.0)
    return ScheduledOptimizer(weights, config, 10, matrices=MATRICES)


def weights_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def with_gradients(weights, step):
    for name, value in weights_of(100 + step).items():
        weights[name].grad = value.detach().clone()


@pytest.mark.parametrize(("kind", "scaling"), [("muon", "match_rms_adamw"), ("muon_original", "original")])
def test_matrices_change_as_in_torch_and_the_rest_by_adamw(kind, scaling):
    weights, expected = weights_of(), weights_of()
    optimizer = optimizer_of(kind, weights)
    experts = [nn.Parameter(matrix.detach().clone()) for matrix in expected["experts"]]
    muon = torch.optim.Muon(
        [expected["tall"], expected["wide"], *experts], lr=0.1, weight_decay=0.05, adjust_lr_fn=scaling
    )
    adam = torch.optim.AdamW([expected[name] for name in ("norm", "table", "conv")], lr=0.1, weight_decay=0.05)
    for step in range(4):
        with_gradients(weights, step)
        with_gradients(expected, step)
        for number, matrix in enumerate(experts):
            matrix.grad = expected["experts"].grad[number].clone()
        optimizer.step(lambda values: values, LOSS)
        muon.step()
        adam.step()
    expected["experts"] = torch.stack([matrix.detach() for matrix in experts])
    for name, weight in weights.items():
        torch.testing.assert_close(weight.detach(), expected[name].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (2, 24, 48)])
def test_the_singular_values_of_an_update_are_near_one(shape):
    """Those of a random matrix differ by a factor of ten and more; the singular vectors remain."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonal(matrices).float()
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.5
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    inner = left.mT @ result @ right.mT
    assert (inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max() < 0.05


@pytest.mark.parametrize(("before", "after"), [("adam", "muon"), ("muon", "adam"), ("muon", "muon_original")])
def test_a_run_continues_with_another_optimiser(before, after):
    """A matrix begins without momentum where its state does not fit; the moments of other weights remain."""
    weights = weights_of()
    first = optimizer_of(before, weights)
    with_gradients(weights, 0)
    first.step(lambda values: values, LOSS)
    second = optimizer_of(after, weights)
    second.load_state(first.state(), first.num_steps)
    has_momentum = "muon" in before and "muon" in after
    kept = {f"{name}/{MOMENTUM}" for name in MATRICES if has_momentum}
    kept |= {f"{name}/{kind}" for name in ("norm", "table", "conv") for kind in ("step", "exp_avg", "exp_avg_sq")}
    assert set(second.state()) == kept
    with_gradients(weights, 1)
    second.step(lambda values: values, LOSS)
    assert {name.partition("/")[0] for name in second.state()} == set(SHAPES)


def test_one_update_has_the_size_of_that_of_adamw():
    """The root mean square of an orthogonal m x n matrix is 1 / sqrt(max(m, n)), that of AdamW's updates 0.2 to 0.4."""
    weight = nn.Parameter(torch.zeros(64, 256))
    optimizer = ScheduledOptimizer(
        {"w": weight}, OptimizerConfig(type="muon", lr=1.0, weight_decay=0.0), 10, matrices="w"
    )
    weight.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    optimizer.step(lambda values: values, LOSS)
    assert weight.detach().square().mean().sqrt() == pytest.approx(0.2, rel=0.15)
    assert math.isfinite(weight.detach().sum())


def test_megatron_refuses_it():
    config = TrainEngineConfig(path="m", optimizer=OptimizerConfig(type="muon"))
    assert AllocationMode.parse("megatron:d2").train[0].backend == "megatron"
    (problem,) = config.megatron_problems(1)
    assert (problem.path, problem.code) == ("optimizer.type", "config.unsupported")
