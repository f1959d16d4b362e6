"""Recovery state moves between meshes bit by bit: weights and optimiser state, of models, adapters and critics."""

import pytest

from tests.engine import mesh_cases, reshard_cases
from tests.rank_processes import run_processes


def run_chains(folder, options: list[str], *chains: list[tuple[str, str | None]]) -> None:
    """Each chain is a start of processes; all its meshes have the same number of ranks."""
    mesh_cases.write_models(folder / "models")
    number = 0
    for links in chains:
        numbered = [(number + index, *link) for index, link in enumerate(links)]
        number += len(links)
        world_size = mesh_cases.MESHES[links[0][0]].dims.world_size
        run_processes(reshard_cases.run_chain, world_size, folder, options, numbered)


@pytest.mark.parallel
def test_adapters_move_from_two_ranks_to_four_and_to_copies(tmp_path):
    run_chains(tmp_path, ["lora"], [("d2", None)], [("d4", "d2"), ("hsdp2x2", "d4"), ("d4", "hsdp2x2")])


@pytest.mark.parallel
def test_experts_move_to_expert_ranks_and_back(tmp_path):
    four = [("d4e2", "d2e2"), ("hsdp2x2e2", "d4e2"), ("d4", "hsdp2x2e2"), ("d2c2e4", "d4")]
    run_chains(tmp_path, ["experts"], [("d2", None), ("d2e2", "d2")], four)


@pytest.mark.parallel
def test_models_and_critics_move_from_two_ranks_to_four_to_tensor_ranks_to_copies_and_to_one(tmp_path):
    four = [("d4", "d2"), ("d2t2", "d4"), ("hsdp2x2", "d2t2"), ("d4", "hsdp2x2"), ("hsdp2t2", "d4")]
    two: list[tuple[str, str | None]] = [("d2", None), ("t2", "d2"), ("d2", "t2")]
    run_chains(tmp_path, ["plain", "critic"], two, four, [("d1", "hsdp2t2")])
    parts = sorted((tmp_path / "hsdp2x2-plain").glob("rank-*"))
    sizes = [path.stat().st_size for path in parts]
    whole = (tmp_path / "d1-plain" / "rank-00000-of-00001.safetensors").stat().st_size
    assert len(sizes) == 4
    assert sum(sizes) < 1.2 * whole, "a part of which two ranks have copies is written once"
    assert max(sizes) < 0.35 * whole
