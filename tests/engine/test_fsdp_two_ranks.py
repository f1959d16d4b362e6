"""One rank against two: outputs, losses, gradients, checkpoints. Both ranks run `two_rank_scenarios` once."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal.api.batch import CANDIDATE_IDS
from areal.data.balance import balanced_parts
from areal.system.durable import is_complete
from tests.engine import engine_cases
from tests.rank_processes import run_ranks


@pytest.fixture(scope="module")
def folder(cases, tmp_path_factory) -> Path:
    """The folder that two ranks have filled."""
    folder = tmp_path_factory.mktemp("two_ranks")
    cases.write_models(folder / "models")
    (folder / "names" / "trainer" / "store").mkdir(parents=True)
    # an older attempt's store must not be taken for this one's
    (folder / "names" / "trainer" / "store" / "0.json").write_text(json.dumps({"host": "127.0.0.1", "port": 1}))
    run_ranks(engine_cases.two_rank_scenarios, folder)
    return folder


@pytest.fixture(scope="module")
def facts(folder) -> list[dict]:
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(2)]


def assert_same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name].float(), value.float(), rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(("model", "variant"), engine_cases.ON_TWO_RANKS)
def test_one_rank_equals_two(cases, folder, facts, model, variant):
    options = cases.VARIANTS[variant]
    engine, batch = cases.make_engine(folder / "models" / model, **options), cases.make_batch()
    tolerance = 0.02 if "bf16" in variant else 1e-6
    before = engine.forward(batch).logprobs
    metrics = cases.train(engine, batch)
    after = engine.forward(batch).logprobs
    losses = [facts[rank][f"{model}-{variant}"][0] for rank in range(2)]
    assert sum(losses) == pytest.approx(metrics["loss"].total, abs=1e-5 if "bf16" not in variant else 0.1)
    for rank, part in enumerate(balanced_parts(batch.sequence_lengths, 2)):
        assert facts[rank][f"{model}-{variant}"][1] == pytest.approx(metrics["grad_norm"].value, rel=10 * tolerance)
        assert_same(load_file(folder / f"weights-{model}-{variant}-{rank}"), cases.weights_of(engine), tolerance)
        positions = [t for i in part for t in range(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))]
        for name, expected in (("forward", before), ("after", after)):
            actual = load_file(folder / f"{name}-{model}-{variant}-{rank}")["logprobs"]
            torch.testing.assert_close(actual, expected[positions], rtol=0, atol=3 * tolerance)


def test_a_rank_without_sequences_takes_part(cases, folder):
    engine = cases.make_engine(folder / "models" / "qwen3")
    cases.train(engine, cases.make_batch())
    for rank in range(2):
        assert_same(load_file(folder / f"uneven-{rank}"), cases.weights_of(engine), 1e-6)


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["shared", "uneven"])
def test_every_output_is_the_same_on_two_ranks(cases, folder, model, name):
    batch = cases.make_batch()
    engine = cases.make_engine(folder / "models" / model, outputs=cases.RICH)
    outputs = engine.forward(batch)
    cases.train(engine, batch.with_column(CANDIDATE_IDS, outputs.candidate_ids), loss_fn=cases.rich_loss)
    parts = balanced_parts(batch.sequence_lengths, 2) if name == "shared" else [[], cases.ALL]
    for rank, part in enumerate(parts):
        assert_same(load_file(folder / f"rich-weights-{model}-{name}-{rank}"), cases.weights_of(engine), 2e-6)
        positions = [t for i in part for t in range(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))]
        actual = load_file(folder / f"rich-forward-{model}-{name}-{rank}")
        for key in cases.RICH_NAMES:
            expected = getattr(outputs, key)[positions]
            assert actual[key].dtype == expected.dtype
            torch.testing.assert_close(actual[key], expected, rtol=0, atol=5e-6, msg=key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_critic_on_two_ranks(cases, folder, dtype):
    engine = cases.make_engine(folder / "models" / "qwen3", role="critic", dtype=dtype)
    cases.train(engine, cases.make_batch(), loss_fn=cases.value_loss)
    for rank in range(2):
        result = load_file(folder / f"critic-{dtype}-{rank}")
        assert result["score.weight"].dtype == torch.float32
        assert_same(result, cases.weights_of(engine), 1e-6 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("kind", ["", "-lora"])
def test_recovery_is_bitwise(folder, kind):
    for rank in range(2):
        unbroken, recovered = (load_file(folder / f"{name}{kind}-{rank}") for name in ("unbroken", "recovered"))
        assert unbroken.keys() == recovered.keys()
        assert all(torch.equal(unbroken[name], recovered[name]) for name in unbroken)


def test_one_rank_continues_the_training_of_two(cases, folder):
    engine = cases.make_engine(folder / "models" / "qwen2", optimizer=cases.ADAM)
    engine.load(folder / "recover")
    assert_same(cases.weights_of(engine), load_file(folder / "saved-0"), 0.0)
    cases.train(engine, cases.make_batch(), steps=2)
    assert_same(cases.weights_of(engine), load_file(folder / "unbroken-0"), 1e-4)


def test_export_of_two_ranks_is_a_checkpoint(folder):
    assert is_complete(folder / "export")
    exported = AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
    gathered = load_file(folder / "unbroken-0")
    assert all(torch.equal(exported[name], value) for name, value in gathered.items())
    for rank in range(2):
        imported = load_file(folder / f"imported-{rank}")
        assert all(torch.equal(imported[name], value) for name, value in gathered.items())


def test_the_recovery_checkpoint_of_two_ranks_exports_whole_weights(cases, folder, tmp_path):
    """As `areal export --recover` does it, in one process."""
    subject = cases.make_engine(folder / "models" / "qwen2", optimizer=None)
    subject.load(folder / "recover")
    subject.save(tmp_path / "whole", with_optimizer=False)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    saved = load_file(folder / "saved-0")
    assert all(torch.equal(exported[name], value) for name, value in saved.items())


def test_random_weights_are_the_same_on_both_ranks(cases, folder):
    alone = cases.make_engine(folder / "models" / "qwen2", init_from_scratch=True, seed=7)
    for rank in range(2):
        assert_same(load_file(folder / f"scratch-{rank}"), cases.weights_of(alone), 0.0)


def test_an_error_on_one_rank_ends_the_call_on_both(facts):
    for rank in range(2):
        assert facts[rank]["errors"] == ["data.too_long", "checkpoint.not_written", "checkpoint.missing"]


def test_a_nan_of_one_rank_is_in_every_reduction_of_all(facts):
    assert (
        facts[0]["reduced"]
        == facts[1]["reduced"]
        == {
            "sum": ["3.0", "nan", "nan", "nan", "nan"],
            "max": ["2.0", "nan", "nan", "nan", "inf"],
            "min": ["1.0", "nan", "nan", "nan", "-inf"],
            "mean_metric": ["1.5", "nan", "nan", "nan"],
            "max_metric": ["2.0", "nan", "nan", "nan"],
            "min_metric": ["1.0", "nan", "nan", "nan"],
        }
    )


def test_both_ranks_end_with_the_same_error_when_one_diverges(facts):
    assert [kind for kind, _ in facts[0]["diverged"]] == ["loss", "gradient", "weight"]
    assert facts[0]["diverged"] == facts[1]["diverged"]
    assert all(parameter.startswith(("model.", "lm_head.")) for _, parameter in facts[0]["diverged"])
