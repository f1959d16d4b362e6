"""Meshes of several ranks against one process: outputs, losses, gradient norms and weights after three uneven steps.

Processes start once for a mesh, which runs all its cases.
"""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine import mesh_cases
from tests.rank_processes import run_ranks

FAMILIES = [f"{family}-plain" for family in ("qwen3", "qwen2", "llama", "mistral", "gemma")]
OPTIONS = [f"qwen3-{name}" for name in ("checkpointed", "selective", "kept_on_cpu", "rich", "critic", "every", "bf16")]
CAPPED = ["gemma2-plain", "granite_swa-plain"]
EXPERTS = [f"{family}-plain" for family in ("qwen3_moe", "mixtral", "deepseek_v3")]
SPARSE = [f"qwen3_moe-{name}" for name in ("checkpointed", "selective", "every", "replayed_bf16")]
CASES = {
    "d1": [
        "qwen3-plain",
        "qwen3-selective",
        "qwen3-kept_on_cpu",
        "qwen3-offload",
        "qwen3-bf16",
        "qwen3-compiled",
        *EXPERTS,
    ],
    "d2": [
        "qwen3-plain",
        "qwen2-rich",
        "qwen3-every",
        "qwen3-lora",
        "qwen3-offload_optimizer",
        "qwen3-compiled",
        *CAPPED,
        *EXPERTS,
        "gpt_oss-plain",
        "qwen3_moe-checkpointed",
        "qwen3_moe-balanced",
    ],
    "d4": ["qwen3-plain", "qwen3-micro", "qwen3_moe-plain"],
    "t2": [
        *FAMILIES,
        *OPTIONS,
        "qwen2-rich",
        "qwen3-offload",
        "qwen3-lora",
        "qwen3-lora_dropout",
        "qwen3-offload_optimizer",
        "qwen3-compiled",
        *CAPPED,
        "granite_swa-selective",
    ],
    "c2": [*FAMILIES, *OPTIONS, "qwen2-rich", "qwen3-lora", *CAPPED, "gpt_oss-plain"],
    "c4": ["qwen3-plain", "qwen2-checkpointed"],
    "d2t2": [
        "qwen3-plain",
        "qwen2-rich",
        "qwen3-every",
        "qwen3-bf16",
        "qwen3-adam_bf16",
        "qwen3_wide-adam_8bit",
        "qwen3-muon",
        "qwen3-lora",
    ],
    "d2c2": ["qwen3-plain", "qwen2-rich"],
    "c2t2": ["qwen3-plain", "qwen2-rich", *CAPPED],
    "hsdp2x2": ["qwen3-plain", "qwen2-micro", "qwen3-every", "qwen3-adam_bf16", "qwen3-adam_8bit", "qwen3-muon"],
    "hsdp2t2": ["qwen3-plain", "qwen3-lora"],
    "d4t2c2": ["qwen3-plain", "qwen3-lora"],
    "d2e2": [*EXPERTS, *SPARSE, "deepseek_v3-balanced", "gpt_oss-plain", "qwen3_moe-muon"],
    "d4e2": [*EXPERTS, "qwen3_moe-micro"],
    "d2c2e4": ["qwen3_moe-plain", "deepseek_v3-plain"],
    "hsdp2x2e2": ["qwen3_moe-plain"],
}
"""Mesh -> models and options."""
CHANGING = (
    "rich",
    "critic",
    "reward",
    "bf16",
    "adam_bf16",
    "adam_8bit",
    "muon",
    "lora",
    "lora_dropout",
    "balanced",
    "balanced_again",
)
CHANGING += ("replayed", "replayed_bf16", "grpo", "ppo", "sft")
"""Options with other outputs or numbers than plain."""
ROUNDED = ("bf16", "8bit", "muon")
"""Ends of the names of cases that round to bfloat16 or 8 bits."""
PAGE = Path(__file__).parents[2] / "docs" / "train_engines.md"
LIMIT_S = 900.0
"""For the ranks of a mesh, which compile blocks: on a busy machine minutes."""
MARK, END = "make test-parallel writes it", "<!-- end -->"


def run_mesh(folder: Path, mesh: str, cases: list[str]) -> list[dict]:
    """What each rank found. One process trains first, and its state is what the ranks load."""
    write_expected(folder, cases)
    scenario = partial(mesh_cases.run_cases, mesh, cases)
    return run_ranks(scenario, folder, mesh_cases.MESHES[mesh].dims, limit_s=LIMIT_S)


def write_expected(folder: Path, cases: list[str], num_layers: int = 2) -> None:
    """The models, and what one process computes; what is there is kept."""
    torch.set_num_threads(1)  # as the ranks, so that sums have the same order
    if not (folder / "models").exists():
        (folder / "models").mkdir(parents=True)
        mesh_cases.write_models(folder / "models", num_layers)
    for case in cases:
        if (folder / f"expected-{case}").exists():
            continue
        expected = mesh_cases.make_engine(folder / "models", reference_of(case))
        outputs = mesh_cases.outputs_of(expected, case)
        steps = mesh_cases.steps_of(expected, case)
        actual = {"outputs": outputs, "weights": mesh_cases.cases.weights_of(expected)}
        if case.endswith(mesh_cases.BF16):
            actual["gradient"] = gradient_of_one_process(folder, case)
            exact = mesh_cases.make_engine(folder / "models", case, dtype="float32")
            actual["exact"] = {"outputs": mesh_cases.outputs_of(exact, case)}
            mesh_cases.steps_of(exact, case)
            actual["exact"] |= {"weights": mesh_cases.cases.weights_of(exact)}
            actual["exact"] |= {"gradient": gradient_of_one_process(folder, case, dtype="float32")}
        if case.endswith(mesh_cases.SAVED):
            expected.save(folder / f"one-{case}", with_optimizer=True)
            mesh_cases.save_file(mesh_cases.exact_of(expected), folder / f"one-weights-{case}")
            mesh_cases.steps_of(expected, case, batches=mesh_cases.all_batches()[:1])
            mesh_cases.save_file(mesh_cases.cases.weights_of(expected), folder / f"one-after-{case}")
        torch.save({"steps": steps, **actual}, folder / f"expected-{case}")


def gradient_of_one_process(folder: Path, case: str, **changes) -> dict[str, torch.Tensor]:
    engine = mesh_cases.make_engine(folder / "models", case, optimizer=mesh_cases.DESCENT, **changes)
    return mesh_cases.gradient_of(engine, case)


def reference_of(case: str) -> str:
    """What one process trains with: without an option that must not change the numbers."""
    model, option = case.split("-")
    return f"{model}-{option if option in CHANGING else 'plain'}"


def largest(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert result.keys() == expected.keys()
    return max((result[name].double() - value.double()).abs().max().item() for name, value in expected.items())


def differences(folder: Path, case: str, facts: list[dict]) -> dict[str, float]:
    """The largest differences from one process over all ranks: per token for losses, relative for norms."""
    expected = torch.load(folder / f"expected-{case}")
    batch = mesh_cases.all_batches()[0]
    actual = dict.fromkeys(("outputs", "loss", "grad_norm", "weights"), 0.0)
    for rank, fact in enumerate(fact[case] for fact in facts):
        for ours, theirs, lengths in zip(fact["steps"], expected["steps"], mesh_cases.STEPS, strict=True):
            actual["loss"] = max(actual["loss"], abs(ours[0] - theirs[0]) / (sum(lengths) - len(lengths)))
            actual["grad_norm"] = max(actual["grad_norm"], abs(ours[1] / theirs[1] - 1))
        actual["weights"] = max(
            actual["weights"], largest(load_file(folder / f"weights-{case}-{rank}"), expected["weights"])
        )
        bounds = batch.cu_seqlens.tolist()
        mine = mesh_cases.share_indices(batch, fact["dp_size"], fact["dp_rank"])
        positions = [t for i in mine for t in range(bounds[i], bounds[i + 1])]
        outputs = {name: value[positions] for name, value in expected["outputs"].items()}
        actual["outputs"] = max(actual["outputs"], largest(load_file(folder / f"outputs-{case}-{rank}"), outputs))
    return actual


def error_ratios(folder: Path, case: str, facts: list[dict]) -> dict[str, float]:
    """Root mean squares of the distances from float32 as multiples of those of one bfloat16 process: of the
    log-probabilities and the gradient of the first batch, and of the weights after three steps.

    The relative error of a gradient norm is at most the distance of the gradients.
    """
    expected, batch = torch.load(folder / f"expected-{case}"), mesh_cases.all_batches()[0]
    bounds = batch.cu_seqlens.tolist()
    actual: dict[str, float] = {}
    for kind in ("outputs", "gradient", "weights"):
        squares = torch.zeros(2, dtype=torch.float64)
        for rank, fact in enumerate(fact[case] for fact in facts):
            exact, first, places = expected["exact"][kind], expected[kind], slice(None)
            if kind == "outputs":
                exact, first = ({"logprobs": each["logprobs"]} for each in (exact, first))
                mine = mesh_cases.share_indices(batch, fact["dp_size"], fact["dp_rank"])
                places = [t for i in mine for t in range(bounds[i], bounds[i + 1])]
            ours = load_file(folder / f"{kind}-{case}-{rank}")
            for name, value in exact.items():
                each = (ours[name], first[name][places])
                squares += torch.stack([(item - value[places]).double().square().sum() for item in each])
        actual[kind] = math.sqrt(squares[0] / squares[1])
    return actual


def check(folder: Path, case: str, facts: list[dict]) -> dict[str, float]:
    result = differences(folder, case, facts)
    limit = 0.05 if case.endswith(ROUNDED) else 5e-6  # two roundings of a bfloat16 number differ by 0.4%
    limited = dict(result)
    if case.endswith(mesh_cases.BF16):
        ratios, _ = error_ratios(folder, case, facts), limited.pop("grad_norm")  # of steps from other weights
        # a sum over two tensor ranks is rounded twice as often: 2 ** 0.5 times the error
        assert max(ratios.values()) < 1.5, ratios
    assert max(limited.values()) < limit, result
    assert result["loss"] < 1e-6 or case.endswith(ROUNDED), result
    assert all(fact[case].get("adapter", True) for fact in facts)
    if case.endswith(mesh_cases.SAVED):
        for rank, fact in enumerate(fact[case] for fact in facts):
            assert (fact["published"], fact["resumed"], fact["resharded"]) == (True, True, True)
            after = load_file(folder / f"resharded-{case}-{rank}")
            assert largest(after, load_file(folder / f"one-after-{case}")) < limit
    return result


Differences = dict[str, dict[str, dict[str, float]]]
"""Mesh -> case -> quantity -> largest difference."""


def table_rows(mesh: str, differences: dict[str, dict[str, float]]) -> list[str]:
    """A row for all cases of float32 and one for each other case, with the differences rounded up to powers of ten."""
    by_precision: dict[str, list[str]] = {}
    for case in differences:
        by_precision.setdefault(case if case.endswith(ROUNDED) else "float32", []).append(case)
    lines = []
    for cases in by_precision.values():
        models: dict[str, list[str]] = {}
        for case in cases:
            model, option = case.split("-")
            models.setdefault(f"{option}*" if case.endswith(mesh_cases.SAVED) else option, []).append(model)
        largest_of = [max(values) for values in zip(*(differences[case].values() for case in cases), strict=True)]
        figures = [f"1e{math.ceil(math.log10(value)):03d}" if value else "0" for value in largest_of]
        options = "; ".join(f"{option}: {', '.join(names)}" for option, names in models.items())
        lines.append(f"| {' | '.join([mesh, options, *figures])} |")
    return lines


def write_table(differences: Differences, cases: dict[str, list[str]], mark: str) -> None:
    """Write the table of all cases, if all have passed, below the comment in docs/train_engines.md that has `mark`."""
    if any(differences[mesh].keys() != set(names) for mesh, names in cases.items()):
        return
    text, start = PAGE.read_text(), f"<!-- equality table: {mark} -->"
    before, rest = text.split(start)
    head = "| mesh | cases | log-probabilities | loss | gradient norm | weights |\n" + "|---" * 6 + "|"
    in_order = {mesh: {case: differences[mesh][case] for case in names} for mesh, names in cases.items()}
    lines = [line for mesh, of_cases in in_order.items() for line in table_rows(mesh, of_cases)]
    PAGE.write_text("\n".join([before + start, head, *lines, END]) + rest.partition(END)[2])


@pytest.fixture(scope="module")
def by_mesh():
    """Filled by the tests."""
    measured: Differences = {mesh: {} for mesh in CASES}
    yield measured
    write_table(measured, CASES, MARK)


@pytest.fixture(scope="module")
def facts_of(tmp_path_factory):
    """Mesh -> its folder and what its ranks found; each mesh runs once."""
    done: dict[str, tuple[Path, list[dict]]] = {}

    def run(mesh: str) -> tuple[Path, list[dict]]:
        if mesh not in done:
            folder = tmp_path_factory.mktemp(mesh)
            done[mesh] = folder, run_mesh(folder, mesh, CASES[mesh])
        return done[mesh]

    return run


@pytest.mark.parallel
@pytest.mark.parametrize(("mesh", "case"), [(mesh, case) for mesh, cases in CASES.items() for case in cases])
def test_a_mesh_equals_one_process(facts_of, by_mesh, mesh, case):
    folder, facts = facts_of(mesh)
    result = check(folder, case, facts)
    assert mesh != "d1" or case.endswith("-compiled") or not any(result.values()), result
    by_mesh[mesh][case] = result


def test_tensor_and_context_ranks_equal_one_process(tmp_path):
    check(tmp_path, "qwen3-plain", run_mesh(tmp_path, "c2t2", ["qwen3-plain"]))
