"""What a policy's engine gives besides log-probabilities: against transformers and autograd, in any cut."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from areal.api.batch import CANDIDATE_IDS, OutputSpec, TokenOutputs
from areal.api.config import FSDPEngineConfig, FSDPWrapPolicy, MicroBatchSpec
from areal.data.pack import take
from areal.engine.micro_batch import make_micro_batch
from tests.expect import raises_code


def by_transformers(cases, path, batch, ids=None, temperature=1.0):
    """Everything RICH gives, each sequence in a call of its own; and the model. Without ids: the most likely."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    rows = {name: [] for name in cases.RICH_NAMES}
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.input_ids[start:end]
        every = F.log_softmax(model(tokens[None], use_cache=False).logits[0][:-1].float() / temperature, -1)
        stay = every.topk(cases.VOCAB - int(0.3 * cases.VOCAB), -1).values.log_softmax(-1)
        chosen = every.topk(4, -1).indices if ids is None else ids[start : end - 1]
        result = {
            "logprobs": every.gather(1, tokens[1:, None])[:, 0],
            "entropy": -(every.exp() * every).sum(-1),
            "clamped_entropy": -(stay.exp() * stay).sum(-1),
            "squared_sums": every.exp().square().sum(-1).detach(),
            "candidate_logprobs": every.gather(1, chosen),
            "candidate_ids": chosen,
        }
        for name, values in result.items():
            rows[name].append(F.pad(values, (0, 0) * (values.ndim - 1) + (0, 1)))
    return TokenOutputs(**{name: torch.cat(parts) for name, parts in rows.items()}), model


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
@pytest.mark.parametrize("spec", [MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=14), MicroBatchSpec(n_mbs=12)])
def test_every_output_and_its_gradient_equal_transformers(cases, models, model, spec):
    batch = cases.make_batch()
    engine = cases.make_engine(models / model, outputs=cases.RICH, mb_spec=spec, temperature=0.8)
    expected, _ = by_transformers(cases, models / model, batch, temperature=0.8)
    outputs = engine.forward(batch)
    for name in cases.RICH_NAMES:
        actual, wanted = getattr(outputs, name), getattr(expected, name).detach()
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual, wanted, rtol=0, atol=5e-6, msg=name)
    ids = torch.randint(0, cases.VOCAB, (batch.num_tokens, 3), generator=torch.Generator().manual_seed(4))
    ids[(batch.cu_seqlens[1:] - 1).long()] = 0
    batch = batch.with_column(CANDIDATE_IDS, ids)
    inputs = engine.forward(batch)
    assert torch.equal(inputs.candidate_ids, ids)
    expected, reference = by_transformers(cases, models / model, batch, ids, temperature=0.8)
    torch.testing.assert_close(inputs.candidate_logprobs, expected.candidate_logprobs.detach(), rtol=0, atol=5e-6)

    micro, _ = make_micro_batch(batch, cases.ALL, torch.device("cpu"))  # sorted by length
    (cases.rich_loss(expected, replace(micro, batch=batch)).loss / batch.loss_mask.sum()).backward()
    actual = cases.gradients(engine, batch, cases.rich_loss)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, rtol=0, atol=3e-6, msg=name)


def test_the_whole_vocabulary_is_in_the_order_of_ids(cases, models):
    batch = cases.make_batch()
    engine = cases.make_engine(models / "qwen3", outputs=OutputSpec(candidates=0))
    outputs = engine.forward(batch)
    assert outputs.candidate_logprobs.shape == (batch.num_tokens, cases.VOCAB)
    assert outputs.candidate_ids.tolist() == [list(range(cases.VOCAB))] * batch.num_tokens
    assert outputs.candidate_ids.stride(0) == 0  # no memory
    inside = torch.ones(batch.num_tokens, dtype=torch.bool)
    inside[(batch.cu_seqlens[1:] - 1).long()] = False
    torch.testing.assert_close(outputs.candidate_logprobs[inside].exp().sum(1), torch.ones(int(inside.sum())))
    assert outputs.candidate_logprobs[~inside].count_nonzero() == 0

    def loss(outputs, micro):
        every = outputs.candidate_logprobs[micro.batch.loss_mask]
        return cases.LossOutput(loss=(every.exp() * every).sum(), metrics={"loss": cases.Metric(1.0)})

    def same_by_entropy(outputs, micro):
        return cases.LossOutput(loss=-outputs.entropy[micro.batch.loss_mask].sum(), metrics={"loss": cases.Metric(1.0)})

    actual = cases.gradients(engine, batch, loss)
    other = cases.make_engine(models / "qwen3", outputs=OutputSpec(entropy_grad=True))
    for name, expected in cases.gradients(other, batch, same_by_entropy).items():
        torch.testing.assert_close(actual[name], expected, rtol=0, atol=2e-6, msg=name)


def test_outputs_that_were_not_requested_are_absent(cases, models):
    batch = cases.make_batch().with_column(CANDIDATE_IDS, torch.full((len(cases.make_batch().input_ids), 2), 99999))
    outputs = cases.make_engine(models / "qwen3").forward(batch)  # no output depends on these ids
    assert [outputs.clamped_entropy, outputs.candidate_ids, outputs.candidate_logprobs] == [None] * 3

    def loss(outputs, micro):
        assert not outputs.entropy.requires_grad
        return cases.policy_loss(outputs, micro)

    cases.train(cases.make_engine(models / "qwen3"), batch, loss_fn=loss)


def test_an_empty_batch_gives_empty_outputs_of_the_right_shape(cases, models):
    engine = cases.make_engine(models / "qwen3", outputs=cases.RICH)
    nothing = take(cases.make_batch(), [])
    outputs = engine.forward(nothing)
    assert [tuple(getattr(outputs, name).shape) for name in cases.RICH_NAMES] == [(0,)] * 4 + [(0, 4)] * 2
    nothing = nothing.with_column(CANDIDATE_IDS, torch.zeros(0, 2, dtype=torch.int64))
    assert engine.forward(nothing).candidate_logprobs.shape == (0, 2)
    assert engine.forward_backward(nothing, cases.rich_loss, denominator=1.0).keys() == {"tree_ratio"}


def test_candidates_are_cut_with_the_batch(cases):
    batch = cases.make_batch()
    ids = torch.arange(2 * batch.num_tokens).reshape(-1, 2)
    part = take(batch.with_column(CANDIDATE_IDS, ids), [3, 0])
    rows = [*range(16, 25), *range(5)]
    assert part.columns[CANDIDATE_IDS].tolist() == ids[rows].tolist()


def test_what_the_engine_cannot_do_is_refused(cases, models):
    engine = cases.make_engine(models / "qwen3", outputs=OutputSpec(candidates=4))
    with raises_code("training.stage_missing", "candidate_ids"):
        engine.forward_backward(cases.make_batch(), cases.policy_loss, denominator=1.0)
    batch = cases.make_batch()
    ids = torch.zeros(batch.num_tokens, 2, dtype=torch.int64)
    ids[3, 1] = cases.VOCAB
    with raises_code("data.token_id", f"token id {cases.VOCAB},"):
        engine.forward(batch.with_column(CANDIDATE_IDS, ids))
    for role in ("critic", "reward"):
        with pytest.raises(ValueError, match=role):
            cases.make_engine(models / "qwen3", role=role, outputs=OutputSpec(entropy_grad=True))


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
@pytest.mark.parametrize("wrapped", ["Linear", "Embedding"])
def test_the_head_stays_whole_whatever_the_wrap_policy_names(cases, models, model, wrapped):
    wrap = FSDPWrapPolicy(transformer_layer_cls_to_wrap=[wrapped])
    engine = cases.make_engine(models / model, fsdp=FSDPEngineConfig(wrap_policy=wrap, offload_params=True))
    batch, plain = cases.make_batch(), cases.make_engine(models / model)
    assert torch.equal(engine.forward(batch).logprobs, plain.forward(batch).logprobs)
    expected = cases.gradients(plain, batch)
    for name, value in cases.gradients(engine, batch).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)
