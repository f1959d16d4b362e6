"""Weights from engine to engine without a disk, and an optimiser that begins anew in the middle of its schedule."""

import pytest
import torch

from tests.expect import raises_code


def test_a_copy_holds_exactly_those_weights_and_goes_its_own_way(cases, models):
    batch = cases.make_batch()
    engine = cases.make_engine(models / "qwen2")
    frozen = cases.make_engine(models / "qwen2", role="ref", optimizer=None)
    cases.train(engine, batch)
    assert not torch.equal(frozen.forward(batch).logprobs, engine.forward(batch).logprobs)
    frozen.load_weights(engine.named_weights())
    copied = cases.weights_of(frozen)
    assert all(torch.equal(copied[name], value) for name, value in cases.weights_of(engine).items())
    assert torch.equal(frozen.forward(batch).logprobs, engine.forward(batch).logprobs)
    cases.train(engine, batch)
    assert all(torch.equal(copied[name], value) for name, value in cases.weights_of(frozen).items())


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_a_copy_in_the_compute_type_speaks_as_the_engine_with_float32_masters(cases, models, model):
    """Both are sharded: one casts, the other is held in the compute type."""
    batch = cases.make_batch()
    engine = cases.make_engine(models / model, dtype="bfloat16")
    frozen = cases.make_engine(models / model, role="ref", optimizer=None, dtype="bfloat16")
    cases.train(engine, batch)
    frozen.load_weights(engine.named_weights())
    copied = cases.weights_of(frozen)
    assert all(torch.equal(copied[name], value) for name, value in cases.weights_of(engine).items())
    torch.testing.assert_close(frozen.forward(batch).logprobs, engine.forward(batch).logprobs, rtol=0, atol=0)


def test_a_float32_copy_of_stored_weights_equals_the_masters_that_the_optimiser_updates(cases, models):
    engine = cases.make_engine(models / "qwen3", dtype="bfloat16")
    frozen = cases.make_engine(models / "qwen3", role="ref", optimizer=None, dtype="float32")
    cases.train(engine, cases.make_batch())
    masters = {name: value.clone() for name, value in engine.named_weights(stored=True)}
    assert all(value.dtype == torch.float32 for value in masters.values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
    frozen.load_weights(engine.named_weights(stored=True))
    copied = cases.weights_of(frozen)
    assert all(torch.equal(copied[name], value) for name, value in masters.items())


def test_weights_of_another_model_are_refused(cases, models):
    engine = cases.make_engine(models / "qwen2")
    with raises_code("model.weights_do_not_fit"):
        engine.load_weights(cases.make_engine(models / "qwen3").named_weights())


def test_recovery_state_of_a_model_without_an_optimiser_is_its_weights(cases, models, tmp_path):
    engine = cases.make_engine(models / "qwen3", role="ref", optimizer=None, dtype="bfloat16")
    engine.save(tmp_path / "state", with_optimizer=True)
    other = cases.make_engine(models / "qwen3", role="ref", optimizer=None, dtype="bfloat16", init_from_scratch=True)
    other.load(tmp_path / "state")
    saved = cases.weights_of(engine)
    assert all(torch.equal(saved[name], value) for name, value in cases.weights_of(other).items())


def test_a_reset_optimiser_takes_the_step_of_a_new_one_at_the_place_in_the_schedule(cases, models):
    batch = cases.make_batch()
    engine = cases.make_engine(models / "qwen3", optimizer=cases.ADAM)
    cases.train(engine, batch, steps=4)
    fresh = cases.make_engine(models / "qwen3", optimizer=cases.ADAM)
    idle = cases.make_batch([1])  # no token is trained on: the schedule goes on and nothing else
    for _ in range(4):
        fresh.forward_backward(idle, cases.policy_loss, denominator=1.0)
        fresh.optimizer_step()
    fresh.reset_optimizer()
    fresh.load_weights(engine.named_weights())
    engine.reset_optimizer()
    metrics, expected = cases.train(engine, batch, steps=2), cases.train(fresh, batch, steps=2)
    assert metrics == expected
    weights = cases.weights_of(engine)
    assert all(torch.equal(weights[name], value) for name, value in cases.weights_of(fresh).items())
    unbroken = cases.make_engine(models / "qwen3", optimizer=cases.ADAM)
    assert metrics["lr"] == cases.train(unbroken, batch, steps=6)["lr"]


def test_only_what_is_trained_has_an_optimiser_to_reset(cases, models):
    with raises_code("training.stage_missing", "optimizer"):
        cases.make_engine(models / "qwen2", role="ref", optimizer=None).reset_optimizer()
