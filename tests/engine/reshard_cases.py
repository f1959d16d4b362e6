"""What each rank of `test_reshard.py` does: a chain of meshes, of which each loads what the one before saved."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal.engine.mesh import whole_tensor
from areal.weights import weight_files
from tests.engine import engine_cases as cases
from tests.engine import mesh_cases
from tests.engine.mesh_cases import MESHES, share_indices, take
from tests.rank_processes import open_mesh

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
        found = {name: value for file in files for name, value in load_file(file).items()}
        assert mesh_cases.is_equal(found, expected)
        if "score.weight" not in found:
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
