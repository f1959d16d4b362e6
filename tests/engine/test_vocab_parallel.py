"""The output head with the vocabulary in two parts against the whole one: outputs and gradients."""

import pytest
import torch

from areal.api.allocation import ParallelDims
from tests.engine import vocab_cases
from tests.rank_processes import run_ranks


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocab")
    run_ranks(vocab_cases.on_two_ranks, folder, ParallelDims(tp=vocab_cases.NUM_RANKS))
    return [torch.load(folder / f"found-{rank}") for rank in range(vocab_cases.NUM_RANKS)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", vocab_cases.SPECS)
def test_two_parts_equal_the_whole_vocabulary(outputs, dtype, name):
    expected = vocab_cases.run(name, vocab_cases.inputs(dtype, tied=name == "whole"))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for max_logits in (None, 7, 50):
        ranks = [rank[str(dtype), name, max_logits] for rank in outputs]
        for key, value in expected.items():
            if key in ("grad_weight", "grad_bias"):
                parts = torch.cat([rank[key] for rank in ranks])
                torch.testing.assert_close(parts, value, rtol=0, atol=tolerance, msg=key)
                continue
            for rank in ranks:
                torch.testing.assert_close(rank[key], value, rtol=0, atol=tolerance, msg=key)


def test_no_logits_are_exchanged(monkeypatch):
    """With one rank of a group of one: what the head sends has a few numbers per token."""
    sent: list[int] = []
    ranks = vocab_cases.TrainerMesh(0, 1, torch.device("cpu")).tensor
    monkeypatch.setattr("torch.distributed.all_reduce", lambda values, op=None, group=None: sent.append(values.numel()))

    def all_gather(parts, values, group=None):
        sent.append(values.numel())
        parts[0].copy_(values)

    monkeypatch.setattr("torch.distributed.all_gather", all_gather)
    passed, vocabulary = vocab_cases.inputs(torch.float64), 4000
    passed["weight"] = passed["weight"].repeat(vocabulary // vocab_cases.V + 1, 1)[:vocabulary]
    monkeypatch.setattr(vocab_cases, "V", vocabulary * 2)  # the part of rank 0 of two is the whole weight
    passed["bias"] = passed["weight"][:, 0].clone()
    vocab_cases.run("top", passed, ranks)
    assert max(sent) <= 5 * vocab_cases.T  # scalars, candidates or the gradient of the hidden states
