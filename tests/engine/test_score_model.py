"""The reward model's engine: scores of whole sequences, against transformers on each sequence alone."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areal.api.config import MicroBatchSpec
from areal.data.pack import take
from tests.expect import raises_code

LENGTHS = [5, 9, 2, 9, 1, 14]


def theirs(path, batch) -> torch.Tensor:
    """[S]: transformers' score of every sequence, one by one and without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    model.config.pad_token_id = None
    bounds = batch.cu_seqlens.tolist()
    with torch.no_grad():
        rows = [batch.input_ids[a:b].unsqueeze(0) for a, b in pairwise(bounds)]
        return torch.cat([model(input_ids=row).logits[:, 0] for row in rows])


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("mb_spec", [MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=15)])
def test_the_score_at_the_last_token_is_the_one_of_transformers(cases, models, tmp_path, name, mb_spec):
    engine = cases.make_engine(models / name, role="reward", mb_spec=mb_spec)
    batch = cases.make_batch(LENGTHS)
    outputs = engine.forward(batch)
    assert (outputs.values, outputs.logprobs, outputs.entropy) == (None, None, None)
    engine.save(tmp_path / "export", with_optimizer=False)
    result = outputs.scores[batch.cu_seqlens[1:].long() - 1]
    torch.testing.assert_close(result, theirs(tmp_path / "export", batch), rtol=0, atol=1e-5)
    assert result.unique().numel() == len(LENGTHS)


def test_every_prefix_of_a_text_has_its_score(cases, models, tmp_path):
    engine = cases.make_engine(models / "qwen3", role="reward")
    engine.save(tmp_path / "export", with_optimizer=False)
    batch = cases.make_batch([6])
    prefixes = [take(cases.make_batch([6]), [0]) for _ in range(6)]
    for end, prefix in enumerate(prefixes, start=1):
        part = replace(prefix, cu_seqlens=torch.tensor([0, end], dtype=torch.int32), input_ids=prefix.input_ids[:end])
        assert float(engine.forward(batch).scores[end - 1]) == pytest.approx(
            float(theirs(tmp_path / "export", part)), abs=1e-5
        )


def test_the_head_is_new_without_one_and_kept_with_one(cases, models, tmp_path):
    first = cases.make_engine(models / "qwen2", role="reward", seed=1)
    other = cases.make_engine(models / "qwen2", role="reward", seed=2)
    head = cases.weights_of(first)["score.weight"]
    assert head.shape == (1, 16)
    assert not torch.equal(head, cases.weights_of(other)["score.weight"])
    first.save(tmp_path / "export", with_optimizer=False)
    again = cases.make_engine(tmp_path / "export", role="reward", seed=3)
    batch = cases.make_batch(LENGTHS)
    assert torch.equal(again.forward(batch).scores, first.forward(batch).scores)


def test_a_frozen_model_without_a_head_is_refused(cases, models):
    with raises_code("model.weights_do_not_fit", 1, "score.weight"):
        cases.make_engine(models / "qwen2", role="reward", optimizer=None)


def test_a_frozen_reward_model_in_bfloat16_has_an_exact_head(cases, models, tmp_path):
    cases.make_engine(models / "qwen3", role="reward").save(tmp_path / "export", with_optimizer=False)
    batch = cases.make_batch(LENGTHS)
    exact = cases.make_engine(tmp_path / "export", role="reward", optimizer=None).forward(batch).scores
    frozen = cases.make_engine(tmp_path / "export", role="reward", dtype="bfloat16", optimizer=None)
    assert cases.weights_of(frozen)["score.weight"].dtype == torch.float32
    torch.testing.assert_close(frozen.forward(batch).scores, exact, rtol=0.05, atol=0.1)


def test_the_last_token_carries_gradient(cases, models):
    """A critic's output is 0 there, a reward model's is what counts."""
    batch = cases.make_batch([4, 1])

    def last_scores(outputs, micro):
        picked = outputs.scores[micro.batch.cu_seqlens[1:].long() - 1]
        return cases.LossOutput(loss=picked.sum(), metrics={})

    moved = cases.gradients(cases.make_engine(models / "llama", role="reward"), batch, loss_fn=last_scores)
    assert float(moved["score.weight"].abs().max()) > 0.01
