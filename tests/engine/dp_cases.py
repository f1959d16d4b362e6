"""What each of four ranks does in `test_dp_layout.py`: two data-parallel ranks of two ranks each."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from areal.api.allocation import ParallelDims
from areal.api.config import RecoverConfig
from areal.api.metrics import Metric
from areal.data.balance import balanced_parts
from areal.data.split import take
from areal.engine.mesh import TrainerMesh
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.recover import RecoverPoint, RecoverStore
from tests.engine.engine_cases import ADAM, SGD, make_batch, make_engine, policy_loss, train, weights_of

DP_SIZE = 2
DIMS = ParallelDims(dp=DP_SIZE, cp=2)


def on_four_ranks(mesh: TrainerMesh, folder: Path) -> dict[str, object]:
    batch = make_batch()
    share = take(batch, balanced_parts(batch.sequence_lengths, DP_SIZE)[mesh.dp_rank])
    engine = make_engine(folder / "models" / "qwen3", mesh, optimizer=SGD)
    one = torch.ones(1, dtype=torch.float64)
    facts = {
        "ranks": [mesh.rank, mesh.world_size, engine.dp_rank, engine.dp_size],
        "sums": [mesh.all_reduce(one).item(), engine.all_reduce(one).item()],
        "max": engine.all_reduce(one * mesh.rank, "max").item(),
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
