"""Meshes of Megatron-Core ranks against one process of the FSDP engine: outputs, losses, gradient norms and weights
after three uneven steps, checkpoints and published weights.

Processes start once for a mesh, which runs all its cases.
"""

from functools import partial

import pytest
from safetensors.torch import load_file

from areal.weights.weight_files import checksum_of
from tests.engine import mesh_cases
from tests.engine.test_meshes import Differences, check, largest, reference_of, write_expected, write_table
from tests.fake_ranks import FakeRanks
from tests.megatron import equality_cases
from tests.rank_processes import run_ranks

MODELS = ["qwen3-plain", "qwen2-rich"]
FAMILIES = [f"{family}-plain" for family in ("qwen3", "qwen2", "llama", "mistral")]
SPARSE = [f"{family}-plain" for family in ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")]
SHARED = ["qwen2_moe-plain", "glm4_moe-plain"]
"""More families whose tokens all go to an expert too."""
TRAINER = ["qwen3-grpo", "qwen3-ppo", "qwen3-sft"]
"""The losses of the trainer."""
TRAINED_EXPERTS = ["qwen3_moe-grpo", "qwen3_moe-ppo", "qwen3_moe-sft"]
BALANCED = ["qwen3_moe-balanced_again", "qwen3_moe-replayed"]
CASES = {
    "d1": [*FAMILIES, "qwen2-rich", "qwen3-critic", "qwen3-checkpointed", "qwen3-bf16", *SPARSE, *SHARED, *TRAINER],
    "t2": [*FAMILIES, "qwen2-rich", "qwen3-critic", "qwen3-checkpointed", "qwen3-bf16", "qwen3_moe-plain", *TRAINER],
    "p2": [*FAMILIES, "qwen2-rich", "qwen3-critic", "qwen3-checkpointed", "qwen3-micro", "qwen3-bf16", *TRAINER],
    "p2v2": [*MODELS, "qwen3-critic", "qwen3-checkpointed", "qwen3-micro", "qwen3-bf16", *TRAINER],
    "c2": [*FAMILIES, "qwen2-rich", "qwen3-critic", "qwen3-checkpointed", *TRAINER],
    "d2": [*MODELS, "qwen3-critic", "qwen3-micro", "qwen3-bf16", *TRAINER],
    "t2p2": [*MODELS, "qwen3-critic", *TRAINER],
    "t2p2v2": [*MODELS],
    "d2t2": [*MODELS, "qwen3-critic", "qwen3-reward", "qwen3-bf16", *TRAINER],
    "d2p2": [*MODELS, "qwen3-critic", "qwen3-reward", "qwen3-micro", *TRAINER],
    "c2t2": [*MODELS, "qwen3-critic", "qwen3-reward", *TRAINER],
    "d2e2": [
        *SPARSE,
        *BALANCED,
        "deepseek_v3-balanced",
        "qwen3_moe-critic",
        *TRAINED_EXPERTS,
        "qwen3_moe-replayed_bf16",
    ],
    "c2e2": ["qwen3_moe-plain", "qwen3_moe-balanced_again", "deepseek_v3-plain"],
    "t2e2": [*SPARSE, *SHARED, *BALANCED],
    "t2ffn_t2": [*SPARSE, *BALANCED],
    "d2e2p2": [*SPARSE, *SHARED, "qwen3_moe-replayed"],
    "d2t2ffn_e2t2": [*SPARSE, *BALANCED],
    "d2e2p2v2": ["qwen3_moe-plain", "deepseek_v3-plain", "qwen3_moe-replayed"],
    "d2e2_allgather": ["qwen3_moe-plain", "qwen3_moe-micro"],
    "d2e2_selective": BALANCED,
    "d2e2_parts": ["deepseek_v3-checkpointed", "qwen2_moe-checkpointed"],
    "d2_overlap": ["qwen3-plain", "qwen2-rich", "qwen3-bf16"],
    "d2p2v2_overlap": ["qwen3-plain"],
    "d2e2_overlap": ["deepseek_v3-plain", "qwen2_moe-plain"],
    "d2_offloaded": ["qwen3-plain"],
    "d2_average": ["qwen3-plain", "qwen2-rich"],
    "t2_distributed": ["qwen3-checkpointed"],
}
"""Mesh -> models and options."""
MARK = "make test-megatron writes it"
LIMIT_S = 900.0
"""Of the ranks of a mesh, which run up to twenty cases."""

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def run_mesh(folder, mesh: str, cases: list[str], expected) -> list[dict]:
    """What each rank found. One process of the FSDP engine trains first, and its state is what the ranks load.

    `expected`: the folder with what one process computed for all meshes.
    """
    write_expected(expected, cases, num_layers=4)
    for path in expected.iterdir():
        (folder / path.name).symlink_to(path)
    scenario, dims = partial(equality_cases.run_cases, mesh, cases), equality_cases.MESHES[mesh].dims
    return run_ranks(scenario, folder, dims, imported=["tests.megatron.cpu_modules"], limit_s=LIMIT_S)


def check_that_fsdp_continues(folder, case: str) -> None:
    """One process of the FSDP engine loads the state of the mesh bit for bit and takes the next step."""
    engine = mesh_cases.make_engine(folder / "models", reference_of(case))
    engine.load(folder / f"recover-{case}")
    assert mesh_cases.is_equal(mesh_cases.exact_of(engine), load_file(folder / f"weights-{case}-0"))
    mesh_cases.steps_of(engine, case, batches=mesh_cases.all_batches()[:1])
    assert largest(mesh_cases.exact_of(engine), load_file(folder / f"one-after-{case}")) < 1e-5


def check_publications(folder, case: str, result: dict[str, str]) -> None:
    """By disk and by collective a replica gets the bits that one process of the FSDP engine publishes."""
    engine = mesh_cases.make_engine(folder / "models", reference_of(case))
    engine.load(folder / f"one-{case}")
    assert result == dict.fromkeys(("disk", "collective"), checksum_of(engine, FakeRanks()))


@pytest.fixture(scope="module")
def by_mesh():
    """Filled by the tests."""
    measured: Differences = {mesh: {} for mesh in CASES}
    yield measured
    write_table(measured, CASES, MARK)


@pytest.fixture(scope="module")
def facts_of(request, tmp_path_factory):
    """Mesh -> its folder and what its ranks found; each mesh runs once, with the cases that are tested."""
    done, expected = {}, tmp_path_factory.mktemp("expected")
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]

    def run(mesh: str):
        if mesh not in done:
            folder = tmp_path_factory.mktemp(mesh)
            done[mesh] = (
                folder,
                run_mesh(folder, mesh, [each["case"] for each in chosen if each["mesh"] == mesh], expected),
            )
        return done[mesh]

    return run


@pytest.mark.parametrize(("mesh", "case"), [(mesh, case) for mesh, cases in CASES.items() for case in cases])
def test_a_megatron_mesh_equals_one_process(facts_of, by_mesh, mesh, case):
    folder, facts = facts_of(mesh)
    result = check(folder, case, facts)
    assert all(fact[case].get("weighs_once", True) for fact in facts)
    assert all(fact[case].get("starts_exact", True) for fact in facts)
    assert all(fact[case].get("held", 0.0) <= 3 for fact in facts)  # queries, keys and values are one weight
    if case.endswith(mesh_cases.SAVED):
        check_that_fsdp_continues(folder, case)
    if case in equality_cases.PUBLISHED:
        check_publications(folder, case, facts[0][case]["publications"])
    by_mesh[mesh][case] = result
