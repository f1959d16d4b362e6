"""Four ranks, of which two and two hold the same share: reductions count each share once; training equals one rank."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal.api.allocation import ParallelDims
from areal.engine.mesh import TrainerMesh
from tests.engine import dp_cases
from tests.rank_processes import run_ranks


@pytest.fixture(scope="module")
def folder(cases, tmp_path_factory) -> Path:
    """The folder that four ranks have filled."""
    folder = tmp_path_factory.mktemp("dp_ranks")
    cases.write_models(folder / "models")
    run_ranks(dp_cases.on_four_ranks, folder, dp_cases.DIMS)
    return folder


def facts_of(folder: Path, rank: int) -> dict:
    return json.loads((folder / f"facts-{rank}.json").read_text())


@pytest.mark.parametrize("rank", range(dp_cases.DIMS.world_size))
def test_reductions_are_over_data_parallel_ranks(folder, rank):
    facts = facts_of(folder, rank)
    assert facts["ranks"] == [rank, 4, rank // 2, 2]
    assert facts["sums"] == [4.0, 2.0]
    assert facts["max"] == 2.0 + rank % 2  # ranks 0 and 2, or 1 and 3


@pytest.mark.parametrize("rank", range(dp_cases.DIMS.world_size))
def test_losses_metrics_and_weights_are_those_of_one_rank(cases, folder, rank):
    engine, batch = cases.make_engine(folder / "models" / "qwen3"), cases.make_batch()
    metrics, facts = cases.train(engine, batch), facts_of(folder, rank)
    assert facts["loss"] == pytest.approx([metrics["loss"].total, metrics["loss"].count], abs=1e-5)
    assert facts["tokens"] == batch.num_tokens
    assert facts["grad_norm"] == pytest.approx(metrics["grad_norm"].value, rel=1e-5)
    found = load_file(folder / f"weights-{rank}")
    for name, value in cases.weights_of(engine).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)


def test_data_parallel_ranks_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match=r"4.*3"):
        TrainerMesh(0, 4, torch.device("cpu"), dims=ParallelDims(dp=3))
