"""Meshes of Megatron-Core ranks against one process of the FSDP engine: outputs, losses, gradient norms and weights
after three uneven steps, checkpoints and published weights.

Processes start once for a mesh, which runs all its cases.
"""

import json

import pytest

from tests.engine import mesh_cases
from tests.engine.test_meshes import check, reference_of, table_row, write_table
from tests.megatron import equality_cases
from tests.rank_processes import run_ranks

MODELS = ["qwen3-plain", "qwen2-rich"]
FAMILIES = [f"{family}-plain" for family in ("qwen3", "qwen2", "llama", "mistral")]
CASES = {
    "d1": [*FAMILIES, "qwen2-rich", "qwen3-critic", "qwen3-checkpointed", "qwen3-bf16"],
    "t2": [*FAMILIES, "qwen2-rich", "qwen3-critic", "qwen3-checkpointed", "qwen3-bf16"],
    "p2": [*FAMILIES, "qwen2-rich", "qwen3-critic", "qwen3-checkpointed", "qwen3-micro", "qwen3-bf16"],
    "c2": [*FAMILIES, "qwen2-rich", "qwen3-critic", "qwen3-checkpointed"],
    "d2": [*MODELS, "qwen3-critic", "qwen3-micro", "qwen3-bf16"],
    "t2p2": [*MODELS, "qwen3-critic"],
    "d2t2": [*MODELS, "qwen3-critic", "qwen3-bf16"],
    "d2p2": [*MODELS, "qwen3-critic", "qwen3-micro"],
    "c2t2": [*MODELS, "qwen3-critic"],
}
"""Mesh -> models and options."""
MARK = "make test-megatron writes it"


def run_mesh(folder, mesh: str, cases: list[str]) -> list[dict]:
    """What each rank found. One process trains first, and its state is what the ranks load."""
    models = folder / "models"
    models.mkdir(parents=True)
    mesh_cases.write_models(models, num_layers=4)
    for case in cases:
        expected = mesh_cases.make_engine(models, reference_of(case))
        outputs = mesh_cases.outputs_of(expected, mesh_cases.all_batches()[0])
        steps = mesh_cases.steps_of(expected, case)
        found = {"outputs": outputs, "weights": mesh_cases.cases.weights_of(expected)}
        mesh_cases.torch.save({"steps": steps, **found}, folder / f"expected-{case}")
        if case.endswith(mesh_cases.SAVED):
            one = mesh_cases.make_engine(models, reference_of(case), **equality_cases.changes_of("d1"))
            mesh_cases.steps_of(one, case)
            one.save(folder / f"megatron-{case}", with_optimizer=True)
            mesh_cases.save_file(mesh_cases.cases.weights_of(one), folder / f"one-weights-{case}")
            mesh_cases.steps_of(one, case, batches=mesh_cases.all_batches()[:1])
            mesh_cases.save_file(mesh_cases.cases.weights_of(one), folder / f"one-after-{case}")
    (folder / "mesh.json").write_text(json.dumps({"mesh": mesh, "cases": cases}))
    size = equality_cases.MESHES[mesh].dims.world_size
    imported = ["tests.megatron.cpu_modules"]
    run_ranks(equality_cases.__file__, "areal_megatron_ranks", folder, size, imported=imported)
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def rows():
    """Filled by the tests; the table is written when all have passed."""
    found: dict[tuple[str, str], str] = {}
    yield found
    if len(found) == sum(map(len, CASES.values())):
        write_table(found, CASES, MARK)


@pytest.fixture(scope="module")
def facts_of(tmp_path_factory):
    """Mesh -> its folder and what its ranks found; each mesh runs once."""
    done = {}

    def run(mesh: str):
        if mesh not in done:
            folder = tmp_path_factory.mktemp(mesh)
            done[mesh] = folder, run_mesh(folder, mesh, CASES[mesh])
        return done[mesh]

    return run


@pytest.mark.parametrize(("mesh", "case"), [(mesh, case) for mesh, cases in CASES.items() for case in cases])
def test_a_megatron_mesh_equals_one_process(facts_of, rows, mesh, case):
    folder, facts = facts_of(mesh)
    rows[mesh, case] = table_row(mesh, case, check(folder, case, facts))
