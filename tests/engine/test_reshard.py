"""Recovery state moves between meshes bit by bit: weights and optimiser state, of models, adapters and critics."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal.engine.mesh import whole_tensor
from areal.weights import weight_files
from tests.engine import engine_cases as cases
from tests.engine import mesh_cases
from tests.engine.mesh_cases import MESHES, share_indices, take
from tests.rank_processes import open_mesh, run_processes

CASES = {
    "plain": ("qwen3", {}),
    "lora": ("qwen3", {"lora": cases.LORA}),
    "critic": ("qwen3", {"role": "critic"}),
    "experts": ("qwen3_moe", {}),
}


def whole_state(engine) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of all ranks; a collective."""
    state = {f"weights/{name}": value for name, value in engine._changing().items()}
    state |= {f"optimizer/{name}": value for name, value in engine._optimizer.state().items()}
    return {name: whole_tensor(value.detach()).clone() for name, value in state.items()}


def check_export(engine, path: Path, mesh) -> None:
    """Each rank writes files of its own; together they have the gathered weights, and transformers reads them."""
    engine.save(path, with_optimizer=False)
    expected = cases.weights_of(engine)
    if mesh.rank == 0:
        files = sorted(path.glob("*.safetensors"))
        assert len(files) >= mesh.world_size
        actual = {name: value for file in files for name, value in load_file(file).items()}
        assert mesh_cases.is_equal(actual, expected)
        if "score.weight" not in actual:
            loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
            assert all(torch.equal(loaded[name], value) for name, value in expected.items() if name in loaded)


def run_link(rank: int, folder: Path, options: Sequence[str], number: int, name: str, source: str | None) -> None:
    """Load what another mesh saved, compare, train a step, save. `number`: of the link among all of the folder."""
    mesh = open_mesh(rank, folder, MESHES[name].dims, number)
    for option in options:
        settings = {"optimizer": mesh_cases.ADAM, "shard_size": MESHES[name].shard_size, "seed": number}
        model, changes = CASES[option]
        engine = mesh_cases.make_engine(folder / "models", f"{model}-plain", mesh, **(settings | changes))
        if source is not None:
            engine.load(folder / f"{source}-{option}")
            expected = torch.load(folder / f"state-{source}-{option}")
            assert mesh_cases.is_equal(whole_state(engine), expected), (source, name, option)
        batch = mesh_cases.all_batches()[number % 3]
        mine = take(batch, share_indices(batch, mesh.dp_size, mesh.dp_rank))
        cases.train(engine, mine, loss_fn=cases.value_loss if option == "critic" else cases.policy_loss)
        engine.save(folder / f"{name}-{option}", with_optimizer=True)
        check_export(engine, folder / f"export-{number}-{option}", mesh)
        state = whole_state(engine)
        if rank == 0:
            torch.save(state, folder / f"state-{name}-{option}")
    mesh.close()


def run_chain(rank: int, folder: Path, options: Sequence[str], links: Sequence[tuple[int, str, str | None]]) -> None:
    weight_files.MIN_PART_BYTES = 1
    for number, name, source in links:
        run_link(rank, folder, options, number, name, source)


def run_chains(folder, options: list[str], *chains: list[tuple[str, str | None]]) -> None:
    """Each chain is a start of processes; all its meshes have the same number of ranks."""
    mesh_cases.write_models(folder / "models")
    number = 0
    for links in chains:
        numbered = [(number + index, *link) for index, link in enumerate(links)]
        number += len(links)
        world_size = mesh_cases.MESHES[links[0][0]].dims.world_size
        run_processes(run_chain, world_size, folder, options, numbered)


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
