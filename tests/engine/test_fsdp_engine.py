"""One rank: packed against one by one, any cut against the whole, against plain transformers, and every option."""

import math
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal.api.batch import LossOutput
from areal.api.config import FSDPEngineConfig, FSDPWrapPolicy, MicroBatchSpec, OptimizerConfig
from areal.api.errors import TrainingDiverged
from areal.data.pack import rows_to_train_batch, take
from areal.engine.mesh import whole_tensor
from areal.models.stored_form import StoredForm
from tests.expect import raises_code


def one_by_one(path: Path, batch, temperature: float = 1.0):
    """Log-probabilities and entropies by transformers alone, each sequence in a call of its own; and the model."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    logprobs, entropies = [], []
    bounds = batch.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        ids = batch.input_ids[start:end]
        distribution = F.log_softmax(model(ids[None], use_cache=False).logits[0].float() / temperature, -1)
        ours = distribution[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        logprobs.append(F.pad(ours, (0, 1)))
        entropies.append(F.pad(-(distribution.exp() * distribution).sum(-1)[:-1], (0, 1)))
    return torch.cat(logprobs), torch.cat(entropies), model


def assert_same(result, expected, tolerance=1e-6):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("model", "temperature"),
    [
        *product(["qwen2", "qwen3", "llama"], [1.0, 0.7]),
        *((name, 1.0) for name in ("qwen3_moe", "mixtral", "deepseek_v3")),
    ],
)
def test_packed_equals_one_by_one(cases, models, model, temperature):
    batch = cases.make_batch()
    engine = cases.make_engine(models / model, temperature=temperature)
    logprobs, entropy, reference = one_by_one(models / model, batch, temperature)
    outputs = engine.forward(batch)
    torch.testing.assert_close(outputs.logprobs, logprobs.detach(), rtol=0, atol=2e-6)
    torch.testing.assert_close(outputs.entropy, entropy.detach(), rtol=0, atol=5e-6)
    assert outputs.values is None
    assert outputs.logprobs.dtype == torch.float32
    assert outputs.logprobs[(batch.cu_seqlens[1:] - 1).long()].tolist() == [0.0] * batch.num_sequences

    terms = (batch.advantages * logprobs.mul(0.3).exp())[batch.loss_mask]
    (terms.sum() / batch.loss_mask.sum()).backward()
    form, actual = StoredForm(reference), cases.gradients(engine, batch)
    expected = dict(pair for name, value in reference.named_parameters() for pair in form.views(name, value.grad))
    assert_same({name: actual.pop(name) for name in expected}, expected, 2e-6)
    assert not any(change.any() for change in actual.values())  # buffers


@pytest.mark.parametrize(
    "spec",
    [
        MicroBatchSpec(n_mbs=3),
        MicroBatchSpec(max_tokens_per_mb=14),
        MicroBatchSpec(n_mbs=2, max_tokens_per_mb=30, n_mbs_divisor=4),
        MicroBatchSpec(n_mbs=12),  # more than there are sequences: some are empty
        MicroBatchSpec(n_mbs=None, granularity=3),
    ],
)
def test_any_division_into_micro_batches_gives_the_same_result(cases, models, spec):
    batch = cases.make_batch()
    whole, cut = cases.make_engine(models / "qwen3"), cases.make_engine(models / "qwen3", mb_spec=spec)
    torch.testing.assert_close(cut.forward(batch).logprobs, whole.forward(batch).logprobs, rtol=0, atol=2e-6)
    count = float(batch.loss_mask.sum())
    metrics = [engine.forward_backward(batch, cases.policy_loss, denominator=count) for engine in (whole, cut)]
    assert metrics[0]["loss"].total == pytest.approx(metrics[1]["loss"].total, abs=1e-5)
    assert metrics[0]["loss"].count == metrics[1]["loss"].count == count
    before = cases.weights_of(whole)
    whole.optimizer_step()
    cut.optimizer_step()
    assert_same(cases.weights_of(cut), cases.weights_of(whole))
    assert any(not torch.equal(before[name], value) for name, value in cases.weights_of(whole).items())


def test_several_backward_passes_add_up(cases, models):
    batch = cases.make_batch()
    whole = cases.gradients(cases.make_engine(models / "qwen3"), batch)
    engine = cases.make_engine(models / "qwen3")
    before, count = cases.weights_of(engine), float(batch.loss_mask.sum())
    for part in ([0, 4, 5], [1, 2, 3, 6, 7, 8]):
        engine.forward_backward(take(batch, part), cases.policy_loss, denominator=count)
    engine.optimizer_step()
    assert_same({name: before[name] - value for name, value in cases.weights_of(engine).items()}, whole)


def test_logits_in_blocks_equal_logits_at_once(cases, models, monkeypatch):
    batch = cases.make_batch()
    engine = cases.make_engine(models / "qwen2")
    whole, expected = engine.forward(batch), cases.gradients(engine, batch)
    monkeypatch.setattr("areal.engine.linear_logprobs.MAX_LOGITS_CPU", 4 * cases.VOCAB)
    monkeypatch.setattr("areal.engine.linear_logprobs.MAX_BLOCK_TOKENS", 10)
    engine = cases.make_engine(models / "qwen2")
    cut = engine.forward(batch)
    torch.testing.assert_close(cut.logprobs, whole.logprobs, rtol=0, atol=2e-6)
    torch.testing.assert_close(cut.entropy, whole.entropy, rtol=0, atol=2e-6)
    assert_same(cases.gradients(engine, batch), expected)


def test_gradient_checkpointing_changes_nothing(cases, models):
    batch = cases.make_batch()
    plain = cases.gradients(cases.make_engine(models / "qwen3"), batch)
    engine = cases.make_engine(models / "qwen3", gradient_checkpointing=True)
    result = cases.gradients(engine, batch)
    assert all(torch.equal(result[name], value) for name, value in plain.items())


def test_fsdp_on_one_rank_equals_the_plain_model(cases, models):
    batch = cases.make_batch()
    plain = cases.make_engine(models / "qwen2")
    sharded = cases.make_engine(models / "qwen2", fsdp=FSDPEngineConfig(offload_params=True))
    assert torch.equal(plain.forward(batch).logprobs, sharded.forward(batch).logprobs)
    assert_same(cases.gradients(sharded, batch), cases.gradients(plain, batch), 1e-7)


def test_bfloat16_computes_like_a_bfloat16_model(cases, models):
    batch = cases.make_batch()
    engine = cases.make_engine(models / "qwen3", dtype="bfloat16", optimizer=cases.ADAM)
    frozen = cases.make_engine(models / "qwen3", role="ref", dtype="bfloat16", optimizer=None)
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.bfloat16, attn_implementation="sdpa")
    ids = batch.input_ids[5:14]  # the second sequence
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0].float()
    expected = F.log_softmax(logits, -1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    for candidate in (engine, frozen):
        torch.testing.assert_close(candidate.forward(batch).logprobs[5:13], expected, rtol=0, atol=1e-6)
    exact = cases.make_engine(models / "qwen3").forward(batch).logprobs
    difference = (engine.forward(batch).logprobs - exact).abs().max()
    assert 1e-4 < difference < 0.1
    cases.train(engine, batch)
    gathered: list[torch.dtype] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "areal.engine.fsdp.whole_tensor", lambda value: gathered.append(value.dtype) or whole_tensor(value)
        )
        sent = cases.weights_of(engine)
    assert set(gathered) == {torch.bfloat16}, "the ranks exchange no float32"
    stored = dict(engine.named_weights(stored=True))
    for name, value in sent.items():
        assert torch.equal(value, stored[name].to(torch.bfloat16)), "the bits are those of a cast after the exchange"
    assert all(p.dtype == torch.float32 for p in engine._model.parameters())


def test_critic_gets_a_head_and_keeps_it(cases, models, tmp_path):
    batch = cases.make_batch()
    engine = cases.make_engine(models / "qwen3", role="critic", optimizer=cases.ADAM)
    values = engine.forward(batch).values
    assert engine.forward(batch).logprobs is None
    assert values.abs().max() > 0
    assert values[(batch.cu_seqlens[1:] - 1).long()].tolist() == [0.0] * batch.num_sequences
    losses = [cases.train(engine, batch, loss_fn=cases.value_loss)["loss"].value for _ in range(5)]
    assert losses[-1] < losses[0]
    engine.save(tmp_path / "critic", with_optimizer=False)
    loaded = cases.make_engine(tmp_path / "critic", role="critic")
    torch.testing.assert_close(loaded.forward(batch).values, engine.forward(batch).values, rtol=0, atol=0)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    single = batch.input_ids[5:13]  # the score of a sequence is the value at its last token
    expected = engine.forward(rows_to_train_batch([[*single.tolist(), 1]], [[1] * 9])).values[7]
    torch.testing.assert_close(model(single[None]).logits[0, 0], expected, rtol=0, atol=1e-6)


def test_export_is_what_transformers_loads(cases, models, tmp_path):
    batch = cases.make_batch()
    engine = cases.make_engine(models / "qwen2")
    cases.train(engine, batch)
    engine.save(tmp_path / "out", with_optimizer=False)
    logprobs, _, model = one_by_one(tmp_path / "out", batch)
    torch.testing.assert_close(engine.forward(batch).logprobs, logprobs.detach(), rtol=0, atol=2e-6)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")  # tied: one name is enough
    names = [name for name, _ in engine.named_weights()]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    assert not list(tmp_path.glob(".*"))


def test_recovery_continues_bitwise(cases, models, tmp_path):
    batch, options = cases.make_batch(), {"optimizer": cases.ADAM}
    engine = cases.make_engine(models / "qwen3", **options)
    cases.train(engine, batch, steps=2)
    engine.save(tmp_path / "state", with_optimizer=True)
    last = cases.train(engine, batch, steps=2)
    other = cases.make_engine(models / "qwen3", init_from_scratch=True, seed=3, **options)
    other.load(tmp_path / "state")
    assert cases.train(other, batch, steps=2) == last
    unbroken = cases.weights_of(engine)
    assert all(torch.equal(value, unbroken[name]) for name, value in cases.weights_of(other).items())


def test_recovery_state_of_another_model_is_refused(cases, models, tmp_path):
    engine = cases.make_engine(models / "qwen3", optimizer=cases.ADAM)
    cases.train(engine, cases.make_batch())
    engine.save(tmp_path / "state", with_optimizer=True)
    with raises_code("model.weights_do_not_fit"):
        cases.make_engine(models / "qwen2", optimizer=cases.ADAM).load(tmp_path / "state")


@pytest.mark.parametrize(
    ("kind", "factor", "optimizer"),
    [
        ("loss", float("nan"), {"lr": 1e-2}),
        ("loss", float("inf"), {"lr": 1e-2}),
        ("gradient", 1e30, {"lr": 1e-2}),
        ("weight", 1.0, {"lr": 1e36}),
        ("weight", 1.0, {"lr": 1e36, "type": "sgd"}),
    ],
)
def test_non_finite_values_end_the_training(cases, models, kind, factor, optimizer):
    def loss(outputs, micro) -> LossOutput:
        return LossOutput(loss=outputs.logprobs.sum() * factor, metrics={})

    engine = cases.make_engine(
        models / "qwen3", optimizer=replace(cases.ADAM, warmup_steps_proportion=0.0, **optimizer)
    )
    before = cases.weights_of(engine)
    with raises_code("training.not_finite") as error:
        cases.train(engine, cases.make_batch(), loss_fn=loss)
    assert isinstance(error.value, TrainingDiverged)
    assert error.value.kind == kind
    assert error.value.parameter in before
    assert error.value.learning_rate == optimizer["lr"]
    unchanged = all(torch.equal(before[name], value) for name, value in cases.weights_of(engine).items())
    assert unchanged == (kind != "weight")


def test_a_loss_that_is_not_finite_is_found_even_if_no_gradient_shows_it(cases, models):
    def loss(outputs, micro) -> LossOutput:
        return LossOutput(loss=outputs.logprobs.sum() + torch.tensor(float("inf")), metrics={})

    engine = cases.make_engine(models / "qwen3", optimizer=cases.ADAM)
    with raises_code("training.not_finite") as error:
        cases.train(engine, cases.make_batch(), loss_fn=loss)
    assert isinstance(error.value, TrainingDiverged)
    assert error.value.kind == "loss"


def test_gradients_are_clipped_to_the_global_norm(cases, models):
    batch = cases.make_batch()
    free = cases.gradients(cases.make_engine(models / "qwen3"), batch)
    norm = math.sqrt(sum(float(value.square().sum()) for value in free.values()))
    clip = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, gradient_clipping=norm / 4)
    engine = cases.make_engine(models / "qwen3", optimizer=clip)
    before = cases.weights_of(engine)
    assert cases.train(engine, batch)["grad_norm"].value == pytest.approx(norm, rel=1e-5)
    result = {name: before[name] - value for name, value in cases.weights_of(engine).items()}
    assert_same(result, {name: value / 4 for name, value in free.items()})


def test_adamw_equals_that_of_torch(cases, models):
    """Three steps against AdamW on the plain model, with the rates that the engine reports."""
    batch = cases.make_batch()
    config = OptimizerConfig(
        lr=3e-3, weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6, gradient_clipping=1e9, lr_scheduler_type="linear"
    )
    engine = cases.make_engine(models / "llama", optimizer=config, total_steps=4)
    _, _, model = one_by_one(models / "llama", batch)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    bounds = batch.cu_seqlens.tolist()
    for _ in range(3):
        rate = cases.train(engine, batch)["lr"].value
        loss = torch.zeros(())
        for start, end in pairwise(bounds):
            ids = batch.input_ids[start:end]
            logprobs = F.log_softmax(model(ids[None], use_cache=False).logits[0], -1)[:-1]
            logprobs = logprobs.gather(-1, ids[1:, None]).squeeze(-1)
            loss = loss + (batch.advantages[start : end - 1] * logprobs.mul(0.3).exp()).sum()
        (loss / batch.loss_mask.sum()).backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    assert_same(cases.weights_of(engine), {n: p.detach() for n, p in model.named_parameters()}, 2e-5)


def test_scratch_weights_follow_the_seed(cases, models):
    first, again, other = (
        cases.weights_of(cases.make_engine(models / "qwen3", init_from_scratch=True, seed=seed)) for seed in (5, 5, 6)
    )
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_building_leaves_the_random_state_alone(cases, models):
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    cases.make_engine(models / "qwen3", init_from_scratch=True, seed=5)
    assert torch.equal(torch.get_rng_state(), expected)


def test_an_empty_batch_gives_empty_outputs(cases, models):
    nothing = take(cases.make_batch(), [])
    engine = cases.make_engine(models / "qwen3")
    assert engine.forward(nothing).logprobs.shape == (0,)
    assert engine.forward_backward(nothing, cases.policy_loss, denominator=1.0).keys() == {"tree_ratio"}
    assert engine.optimizer_step()["grad_norm"].value == 0.0


def test_impossible_micro_batches_are_refused(cases, models):
    engine = cases.make_engine(models / "qwen3", mb_spec=MicroBatchSpec(max_tokens_per_mb=13))
    with raises_code("data.too_long", "14 tokens", "mb_spec.max_tokens_per_mb=13"):
        engine.forward(cases.make_batch())
    engine = cases.make_engine(models / "qwen3", mb_spec=MicroBatchSpec(granularity=2))
    with raises_code("data.uneven_units", "mb_spec.granularity=2"):
        engine.forward(cases.make_batch())
    with pytest.raises(ValueError, match="denominator"):
        engine.forward_backward(cases.make_batch(), cases.policy_loss, denominator=0.0)


def test_wrap_policy_is_checked(cases, models):
    unknown = FSDPWrapPolicy(transformer_layer_cls_to_wrap=["Qwen3Layer"])
    for is_sharded in (True, False):
        fsdp = FSDPEngineConfig(wrap_policy=unknown, offload_params=is_sharded)
        with raises_code("model.unknown_layer_class", "Qwen3Layer", "Qwen3DecoderLayer"):
            cases.make_engine(models / "qwen3", fsdp=fsdp)
    fsdp = FSDPEngineConfig(wrap_policy=FSDPWrapPolicy(transformer_layer_cls_to_wrap=["Qwen3MLP"]), offload_params=True)
    batch = cases.make_batch()
    result = cases.gradients(cases.make_engine(models / "qwen3", fsdp=fsdp), batch)
    assert_same(result, cases.gradients(cases.make_engine(models / "qwen3"), batch), 1e-7)


@pytest.mark.parametrize("bad", [-1, 23, 99999])
def test_a_token_outside_the_vocabulary_is_refused(cases, models, bad):
    engine = cases.make_engine(models / "qwen2")
    batch = rows_to_train_batch([[1, 2, bad]], [[0, 1, 1]])
    with raises_code("data.token_id", f"token id {bad},", 23):
        engine.forward(batch)
