"""The loop in one's own Python: what `areal.Client` computes, and the scripts of docs/own_loop.md."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from areal.inference.model_runner import load_model
from areal.serve.client import Client, datum
from tests.expect import raises_code
from tests.serve.adapters import write_model


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with Client(write_model(tmp_path_factory.mktemp("model") / "tiny"), max_rank=8, max_policies=4) as made:
        yield made


def test_a_model_is_loaded_without_a_progress_bar(tmp_path, capfd):
    load_model(write_model(tmp_path / "tiny"), torch.float32, "cpu")
    assert capfd.readouterr().err == ""


def rows(seed, count=3):
    draw = np.random.default_rng(seed)
    return [draw.integers(3, 16, 8).tolist() for _ in range(count)]


def test_a_policy_learns_and_its_samples_are_those_of_its_weights(client):
    policy = client.policy(rank=8)
    data = [datum(rows(1)[0], num_prompt=3)]
    losses = []
    for _ in range(40):
        losses.append(policy.forward_backward(data, "cross_entropy").loss)
        assert policy.optim_step(lr=0.004, max_norm=1.0)["grad_norm"] > 0
    assert losses[-1] < losses[0] / 4
    (answer,), *_ = policy.sample([rows(1)[0][:3]], max_tokens=5, temperature=0, stop=[])
    assert answer.token_ids == rows(1)[0][3:]
    assert answer.is_cut
    scored = policy.forward([datum(rows(1)[0], num_prompt=3)]).logprobs[0][2:]
    np.testing.assert_allclose(answer.logprobs, scored, atol=1e-5)


def test_a_function_as_loss_has_its_own_gradients(client):
    first, second = client.policy(rank=4, seed=2), client.policy(rank=4, seed=2)
    data = [datum(row, logprobs=-1.0, advantages=0.5) for row in rows(2)]

    def loss(logprobs, inputs):
        return -sum((0.5 * (logprob + 1).exp()).sum() for logprob in logprobs)

    for _ in range(3):
        result = second.forward_backward(data, loss).loss
        assert first.forward_backward(data, "importance_sampling").loss == pytest.approx(result, rel=1e-5)
        first.optim_step(lr=0.01)
        second.optim_step(lr=0.01)
    pairs = zip(first.forward(data).logprobs, second.forward(data).logprobs, strict=True)
    assert max(np.abs(item - other).max() for item, other in pairs) < 1e-4

    def contrast(logprobs, passed):  # of pairs, as in DPO
        sums = torch.stack([each.sum() for each in logprobs])
        return -torch.nn.functional.logsigmoid(sums[0] - sums[1])

    before = second.forward_backward(data[:2], contrast).loss
    second.optim_step(lr=0.01)
    assert second.forward_backward(data[:2], contrast).loss < before


def test_policies_share_the_model_and_nothing_else(client):
    left, right = client.policy(rank=2), client.policy(rank=8, seed=9)
    data = [datum(row) for row in rows(3)]
    before = right.forward(data).logprobs[0].tolist()
    left.forward_backward(data, "cross_entropy")
    left.optim_step(lr=0.1)
    assert right.forward(data).logprobs[0].tolist() == before
    prompts = [row[:3] for row in rows(3)]

    async def both():
        return await asyncio.gather(
            left.sample_async(prompts, 2, max_tokens=4, seed=1), right.sample_async(prompts, 2, max_tokens=4, seed=1)
        )

    alone = [item.sample(prompts, 2, max_tokens=4, seed=1) for item in (left, right)]
    assert asyncio.run(both()) == alone
    assert alone[0] != alone[1]


async def test_samples_take_no_threads_and_a_cancelled_one_ends(client, monkeypatch):
    policy, started, ended = client.policy(), threading.Semaphore(0), threading.Semaphore(0)

    async def sampled(*_):
        started.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.release()

    monkeypatch.setattr(policy, "_sampled", sampled)
    before, count = threading.active_count(), 20
    tasks = [asyncio.create_task(policy.sample_async([[1]])) for _ in range(count)]
    for _ in tasks:
        await asyncio.to_thread(started.acquire, timeout=5.0)
    assert threading.active_count() < before + count
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all([await asyncio.to_thread(ended.acquire, timeout=5.0) for _ in tasks])


def test_a_saved_policy_continues(client, tmp_path):
    data = [datum(row) for row in rows(4)]
    policy = client.policy(rank=4)
    policy.forward_backward(data, "cross_entropy")
    policy.optim_step(lr=0.02)
    policy.save(tmp_path / "one")
    other = client.policy(rank=4)
    other.load(tmp_path / "one")
    for item in (policy, other):
        item.forward_backward(data, "cross_entropy")
        item.optim_step(lr=0.02)
    assert other.forward(data).logprobs[0].tolist() == policy.forward(data).logprobs[0].tolist()
    with raises_code("adapter.not_readable", "save()"):
        policy.load(tmp_path / "two")
    with raises_code("request.invalid_field", "lacks advantages"):
        policy.forward_backward([datum(rows(1)[0], logprobs=0.0)], "ppo")
