"""The logged gradient norm is that of the whole gradient in float64: on 1, 2 and 4 ranks, of DTensors and plain weights
together, with gradients of several passes, and in each minibatch of an update."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from areal.api.allocation import ParallelDims
from areal.api.config import MicroBatchSpec, OptimizerConfig, PPOActorConfig
from areal.data.balance import balanced_parts
from areal.data.pack import take
from areal.engine.mesh import TrainerMesh
from areal.engine.optimizer import ScheduledOptimizer
from areal.trainer.actor import PPOActor
from tests.engine import engine_cases as cases
from tests.rank_processes import run_ranks

SMALL = MicroBatchSpec(max_tokens_per_mb=14)


def exact_norm(parameters) -> float:
    """In float64, from whole gradients; a collective."""
    total = 0.0
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            total += whole.double().square().sum().item()
    return math.sqrt(total)


def of_engine(mesh: TrainerMesh | None, path: Path, **options) -> list[tuple[float, float]]:
    """Logged and exact norm of each optimiser step: after two passes of several micro-batches, and in an update with
    two minibatches."""
    engine = cases.make_engine(path, mesh, mb_spec=SMALL, **options)
    batch = cases.make_batch()
    batch = take(batch, balanced_parts(batch.sequence_lengths, engine.dp_size)[engine.dp_rank])
    result: list[tuple[float, float]] = []
    parameters, step = list(engine._model.model.parameters()), engine.optimizer_step

    def recorded():
        exact = exact_norm(parameters)
        metrics = step()
        result.append((metrics["grad_norm"].value, exact))
        return metrics

    engine.optimizer_step = recorded
    for _ in range(2):
        engine.forward_backward(batch, cases.policy_loss, denominator=8.0)
    engine.optimizer_step()
    actor = PPOActor(engine, PPOActorConfig(path="", ppo_n_minibatches=2))
    metrics = actor.update(actor.with_prox_logprobs(batch))
    logged = [norm for norm, _ in result[1:]]
    assert len(logged) == 2
    assert metrics["actor/grad_norm"].value == pytest.approx(sum(logged) / 2)
    return result


def of_both_kinds(mesh: TrainerMesh) -> tuple[float, float]:
    """A weight that the ranks split unevenly beside one that each holds."""
    draw = torch.Generator().manual_seed(0)
    values = {name: torch.randn(7, 5, generator=draw) for name in ("split", "whole", "split_grad", "whole_grad")}
    ranks = mesh.device_mesh()
    places = [Shard(0) if name == "shard" else Replicate() for name in ranks.mesh_dim_names]

    def split(value: torch.Tensor) -> DTensor:
        return distribute_tensor(value, ranks, places)

    parameters = {"split": nn.Parameter(split(values["split"])), "whole": nn.Parameter(values["whole"])}
    for _ in range(2):  # gradients add up
        for name, parameter in parameters.items():
            grad = split(values["split_grad"]) if name == "split" else values["whole_grad"].clone()
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    optimizer = ScheduledOptimizer(
        parameters, OptimizerConfig(type="sgd", gradient_clipping=0.5), 1, world_size=mesh.world_size
    )
    before = {name: values[name] for name in parameters}
    exact = 2 * math.sqrt(sum(values[f"{name}_grad"].double().square().sum().item() for name in parameters))
    metrics = optimizer.step(partial(mesh.all_reduce, op="sum"), torch.zeros(()))
    moved = {
        name: (weight.full_tensor() if isinstance(weight, DTensor) else weight) - before[name]
        for name, weight in parameters.items()
    }
    assert all(torch.isfinite(value).all() for value in moved.values())
    return metrics["grad_norm"].value, exact


def on_ranks(mesh: TrainerMesh, folder: Path) -> list[list[float]]:
    path = folder / "qwen2"
    result = [of_both_kinds(mesh), *of_engine(mesh, path), *of_engine(mesh, path, lora=cases.LORA)]
    return [list(pair) for pair in result]


def assert_equal(pairs) -> None:
    assert pairs
    for logged, exact in pairs:
        assert logged == pytest.approx(exact, rel=1e-6)


def test_one_process(tmp_path):
    cases.write_models(tmp_path)
    assert_equal([*of_engine(None, tmp_path / "qwen2"), *of_engine(None, tmp_path / "qwen2", lora=cases.LORA)])


def test_two_ranks(tmp_path):
    cases.write_models(tmp_path)
    norms = run_ranks(on_ranks, tmp_path)
    assert norms[0] == norms[1]
    assert_equal(norms[0])


@pytest.mark.parallel
@pytest.mark.parametrize("dims", [ParallelDims(dp=4), ParallelDims(dp=2, cp=2)], ids=str)
def test_four_ranks(tmp_path, dims):
    cases.write_models(tmp_path)
    norms = run_ranks(on_ranks, tmp_path, dims)
    assert all(each == norms[0] for each in norms)
    assert_equal(norms[0])
