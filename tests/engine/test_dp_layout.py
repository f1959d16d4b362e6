"""Four ranks, of which two and two hold the same share: reductions count each share once; training equals one rank."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal.api.allocation import ParallelDims
from areal.api.config import RecoverConfig
from areal.api.metrics import Metric
from areal.data.balance import balanced_parts
from areal.data.pack import take
from areal.engine.mesh import TrainerMesh
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.recover import RecoverPoint, RecoverStore
from tests.engine.engine_cases import ADAM, SGD, make_batch, make_engine, policy_loss, train, weights_of
from tests.rank_processes import run_ranks

DP_SIZE = 2
DIMS = ParallelDims(dp=DP_SIZE, cp=2)


def on_four_ranks(mesh: TrainerMesh, folder: Path) -> dict[str, object]:
    batch = make_batch()
    share = take(batch, balanced_parts(batch.sequence_lengths, DP_SIZE)[mesh.dp_rank])
    engine = make_engine(folder / "models" / "qwen3", mesh, optimizer=SGD)
    subject = torch.ones(1, dtype=torch.float64)
    facts = {
        "ranks": [mesh.rank, mesh.world_size, engine.dp_rank, engine.dp_size],
        "sums": [mesh.all_reduce(subject).item(), engine.all_reduce(subject).item()],
        "max": engine.all_reduce(subject * mesh.rank, "max").item(),
        "gathered": [
            [content.tolist() for content in ranks.gather(np.full(mesh.rank + 1, mesh.rank, np.uint8))]
            for ranks in (mesh, mesh.for_thread())
        ],
    }
    metrics = train(engine, share, loss_fn=policy_loss)
    facts["grad_norm"] = metrics["grad_norm"].value
    merged = reduce_metrics(metrics | {"tokens": Metric(float(share.num_tokens), 1.0, "sum")}, engine)
    facts["loss"] = [merged["loss"].total, merged["loss"].count]
    facts["tokens"] = merged["tokens"].value
    save_file(weights_of(engine), folder / f"weights-{mesh.rank}")
    recovered(folder, mesh, share)
    return facts


def recovered(folder: Path, mesh: TrainerMesh, share) -> None:
    """A checkpoint of all four ranks, loaded again."""
    engine = make_engine(folder / "models" / "qwen2", mesh, optimizer=ADAM)
    train(engine, share)
    point = RecoverPoint(step=1, cadence_s={}, elapsed_s=1.0, goal_reached={})
    RecoverStore(folder / "recover", RecoverConfig(mode="auto"), {"actor": engine}, mesh).save(point)
    before = weights_of(engine)
    train(engine, share)
    store = RecoverStore(folder / "recover", RecoverConfig(mode="auto"), {"actor": engine}, mesh)
    source = store.start_from(after_failure=False)
    assert source is not None
    assert store.load(source).step == 1
    assert all(torch.equal(value, before[name]) for name, value in engine.named_weights())


@pytest.fixture(scope="module")
def folder(cases, tmp_path_factory) -> Path:
    """The folder that four ranks have filled."""
    folder = tmp_path_factory.mktemp("dp_ranks")
    cases.write_models(folder / "models")
    run_ranks(on_four_ranks, folder, DIMS)
    return folder


def facts_of(folder: Path, rank: int) -> dict:
    return json.loads((folder / f"facts-{rank}.json").read_text())


@pytest.mark.parametrize("rank", range(DIMS.world_size))
def test_reductions_are_over_data_parallel_ranks(folder, rank):
    facts = facts_of(folder, rank)
    assert facts["ranks"] == [rank, 4, rank // 2, 2]
    assert facts["sums"] == [4.0, 2.0]
    assert facts["max"] == 2.0 + rank % 2  # ranks 0 and 2, or 1 and 3
    assert facts["gathered"] == [[[1] * 2, [2] * 3, [3] * 4] if rank == 0 else []] * 2


@pytest.mark.parametrize("rank", range(DIMS.world_size))
def test_losses_metrics_and_weights_are_those_of_one_rank(cases, folder, rank):
    engine, batch = cases.make_engine(folder / "models" / "qwen3"), cases.make_batch()
    metrics, facts = cases.train(engine, batch), facts_of(folder, rank)
    assert facts["loss"] == pytest.approx([metrics["loss"].total, metrics["loss"].count], abs=1e-5)
    assert facts["tokens"] == batch.num_tokens
    assert facts["grad_norm"] == pytest.approx(metrics["grad_norm"].value, rel=1e-5)
    result = load_file(folder / f"weights-{rank}")
    for name, value in cases.weights_of(engine).items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=1e-6, msg=name)


def test_data_parallel_ranks_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match=r"4.*3"):
        TrainerMesh(0, 4, torch.device("cpu"), dims=ParallelDims(dp=3))
