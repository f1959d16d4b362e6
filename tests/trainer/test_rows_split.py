"""Training on rows through the real engine: values and gradients by the papers' formulas, however the rows are cut."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal.engine.mesh import TrainerMesh
from tests.expect import raises_code
from tests.rank_processes import run_ranks
from tests.trainer import row_cases as cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    cases.write_models(folder / "models")
    return folder


@pytest.fixture(scope="module")
def whole(folder) -> dict:
    """One rank, one micro-batch: what every cut must give."""
    return {kind: cases.step_of(kind, folder / "models", TrainerMesh.open(None), cases.CUTS[0]) for kind in cases.KINDS}


def assert_same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """`tolerance` is of the largest number where that is above 1: the gradients are differences of float32 weights."""
    assert result.keys() == expected.keys()
    largest = max(1.0, *(float(value.abs().max()) for value in expected.values()))
    for name, value in expected.items():
        torch.testing.assert_close(result[name].float(), value.float(), rtol=0, atol=tolerance * largest, msg=name)


@pytest.mark.parametrize("kind", cases.KINDS)
def test_loss_and_gradient_are_those_of_the_formula_on_each_sequence_alone(folder, whole, kind):
    loss, model = cases.slow_loss(kind, folder / "models")
    loss.backward()
    metrics, held_out, gradient = whole[kind]
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert held_out["eval/loss"] == pytest.approx(loss.item(), abs=1e-5)
    expected = {name: value.grad for name, value in model.named_parameters()}
    assert max(float(value.abs().max()) for value in expected.values()) > 0.01
    assert_same(gradient, expected, 1e-5)


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("cut", cases.CUTS[1:], ids=str)
def test_micro_batches_do_not_matter(folder, whole, kind, cut):
    metrics, held_out, gradient = cases.step_of(kind, folder / "models", TrainerMesh.open(None), cut)
    assert metrics == pytest.approx(whole[kind][0], abs=1e-5)
    assert held_out == pytest.approx(whole[kind][1], abs=1e-5)
    assert_same(gradient, whole[kind][2], 1e-6)


@pytest.fixture(scope="module")
def two_ranks(folder) -> list[dict]:
    """What two processes found."""
    return run_ranks(cases.on_two_ranks, folder)


@pytest.mark.parametrize("kind", cases.KINDS)
def test_two_ranks_do_not_matter(folder, whole, two_ranks, kind):
    for rank in range(2):
        for index in range(2):
            metrics, held_out = two_ranks[rank][f"{kind}-{index}"]
            assert metrics == pytest.approx(whole[kind][0], abs=1e-5)
            assert held_out == pytest.approx(whole[kind][1], abs=1e-5)
            assert_same(load_file(folder / f"gradient-{kind}-{index}-{rank}"), whole[kind][2], 1e-6)


def test_odd_batches_are_refused(folder):
    """Somebody's own batch, not one that was made from pairs."""
    task = cases.make_task("reward", folder / "models", TrainerMesh.open(None), cases.CUTS[0])
    odd = cases.make_task("sft", folder / "models", TrainerMesh.open(None), cases.CUTS[0]).batch_of(
        [cases.make_pairs()[0].chosen]
    )
    with raises_code("data.uneven_units", "granularity=2"):
        task.update(odd)


def test_accuracy_margin_and_rewards_are_of_the_pairs(folder, whole):
    """Against the slow scores and log-probabilities."""
    metrics = whole["dpo"][0]
    assert metrics["rewards/margin"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"], abs=1e-5)
    model = cases.AutoModelForCausalLM.from_pretrained(folder / "models" / "policy", dtype=torch.float64)
    reference = cases.AutoModelForCausalLM.from_pretrained(folder / "models" / "reference", dtype=torch.float64)
    sums = {
        (name, side): [sum(cases.slow_logprobs(each, getattr(pair, side))).item() for pair in cases.make_pairs()]
        for name, each in (("own", model), ("ref", reference))
        for side in ("chosen", "rejected")
    }
    rewards = {
        s: [0.5 * (a - b) for a, b in zip(sums["own", s], sums["ref", s], strict=True)] for s in ("chosen", "rejected")
    }
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    assert metrics["logps/chosen"] == pytest.approx(mean(sums["own", "chosen"]), abs=1e-4)
    assert metrics["logps/rejected"] == pytest.approx(mean(sums["own", "rejected"]), abs=1e-4)
    assert metrics["rewards/chosen"] == pytest.approx(mean(rewards["chosen"]), abs=1e-4)
    assert metrics["rewards/rejected"] == pytest.approx(mean(rewards["rejected"]), abs=1e-4)
    right = [float(a > b) for a, b in zip(rewards["chosen"], rewards["rejected"], strict=True)]
    assert metrics["accuracy"] == pytest.approx(mean(right))
    assert 0 < mean(right) < 1


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_bfloat16_computes_the_same_up_to_rounding(folder, whole, kind):
    task = cases.make_task(kind, folder / "models", TrainerMesh.open(None), cases.CUTS[0], dtype="bfloat16")
    metrics = task.update(task.batch_of(cases.rows_of(kind)))
    assert metrics["loss"].value == pytest.approx(whole[kind][0]["loss"], rel=0.02)
    assert metrics["grad_norm"].value == pytest.approx(whole[kind][0]["grad_norm"], rel=0.05)
