"""Adapters in turn in one engine: each computes as in an engine of its own; losses as worked from the formulas."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from areal.api.errors import ArealError, RequestError
from areal.engine.optimizer import StepSettings
from areal.serve.losses import checked_loss
from areal.serve.tenants import SAMPLER
from areal.serve.wire import AdapterSettings, Datum, LossRequest
from areal.serve.worker import Executor, ReceivedCommand
from tests.expect import raises_code
from tests.serve.adapters import MAX_RANK, make_slots, random_data, write_model
from tests.serve.messages import decode_loss_output, encode_loss_request

STEP = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.01, "max_norm": float("inf")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def slots(model):
    return make_slots(model)


@pytest.fixture
def executor(slots, tmp_path):
    slots.clear()
    return Executor(slots, tmp_path, max_rank=MAX_RANK, context_length=64)


class Tenant:
    """Sends commands for one adapter."""

    def __init__(self, executor, name, **settings):
        self.executor, self.name, self.seq = executor, name, 0
        self.run("create", {"settings": {"rank": 4} | settings})

    def run(self, kind, arguments=None, body=b""):
        command = ReceivedCommand(kind, self.name, self.seq, arguments or {}, body)
        self.seq += 1
        return self.executor.execute(command)

    def loss(self, data, loss_fn="importance_sampling", config=None, forward_only=False):
        request = LossRequest(data=data, loss_fn=loss_fn, config=config or {}, forward_only=forward_only)
        return decode_loss_output(
            self.run(
                "loss",
                {"forward_only": forward_only},
                body=encode_loss_request(request, self.name),
            )
        )

    def step(self):
        return json.loads(self.run("step", {"settings": STEP}))["metrics"]


def expected_logprobs(model, data):
    """By transformers, each datum alone."""
    result = []
    for datum in data:
        logits = model(torch.from_numpy(datum.tokens)[None]).logits[0].float()
        result.append(
            torch.log_softmax(logits, -1).gather(1, torch.from_numpy(datum.inputs["target_tokens"])[:, None])[:, 0]
        )
    return result


def formula(loss_fn, lp, inputs):
    ratio = None if "logprobs" not in inputs else (lp - inputs["logprobs"]).exp()
    match loss_fn:
        case "cross_entropy":
            return -(inputs["weights"] * lp)
        case "importance_sampling":
            return -ratio * inputs["advantages"]
        case "ppo":
            return -torch.minimum(ratio * inputs["advantages"], ratio.clamp(0.8, 1.2) * inputs["advantages"])
        case "cispo":
            return -ratio.clamp(0, 4).detach() * lp * inputs["advantages"]
        case "dro":
            return -(lp * inputs["advantages"] - 0.05 / 2 * (lp - inputs["logprobs"]) ** 2)
        case "gspo":
            mask = inputs["sequence_ratio_mask"]
            mean = ((lp.detach() - inputs["logprobs"]) * mask).sum() / mask.sum()
            token = (mean + lp - lp.detach()).exp()
            return -torch.minimum(token * inputs["advantages"], token.clamp(0.9, 1.1) * inputs["advantages"])


LOSSES = {
    "cross_entropy": (("weights",), {}),
    "importance_sampling": (("logprobs", "advantages"), {}),
    "ppo": (("logprobs", "advantages"), {}),
    "cispo": (("logprobs", "advantages"), {}),
    "dro": (("logprobs", "advantages"), {"beta": 0.05}),
    "gspo": (
        ("logprobs", "advantages", "sequence_ratio_mask"), {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_loss_and_its_gradients_are_those_of_the_formula_on_peft(executor, slots, model, tmp_path, loss_fn):
    names, config = LOSSES[loss_fn]
    data = random_data(3, [9, 1, 6], names)
    for datum in data:
        if "sequence_ratio_mask" in datum.inputs:
            datum.inputs["sequence_ratio_mask"][:] = np.arange(len(datum.tokens)) % 2 == 0
    tenant = Tenant(executor, "a")
    tenant.loss(random_data(1, [5, 7]))
    tenant.step()  # B is not 0 any more
    tenant.run("export", {"name": "one", "where": SAMPLER})
    other = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model),
        tmp_path / "sampler_weights" / "a" / "one" / f"{tenant.seq - 1:08d}" / "adapter",
        is_trainable=True,
    )
    logprobs = expected_logprobs(other, data)
    tensors = [{name: torch.from_numpy(value) for name, value in datum.inputs.items()} for datum in data]
    loss = sum(formula(loss_fn, lp, each).sum() for lp, each in zip(logprobs, tensors, strict=True))
    loss.backward()
    actual, metrics = tenant.loss(data, loss_fn, config)
    assert metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5, abs=2e-5)
    for entry, other_one in zip(actual, logprobs, strict=True):
        np.testing.assert_allclose(entry, other_one.detach().numpy(), atol=2e-6)
    gradients = {
        name.replace("base_model.model.", "").replace(".default.weight", ""): each.grad
        for name, each in other.named_parameters() if each.requires_grad
    }  # fmt: skip
    for name, weight in slots._trained.items():
        expected = gradients[name]
        ours = weight.grad[: expected.shape[0], : expected.shape[1]]
        np.testing.assert_allclose(ours, expected, atol=2e-5 * max(1.0, float(expected.abs().max())))
        assert weight.grad.abs().sum() == pytest.approx(ours.abs().sum().item())  # the padding has none


def test_adapters_in_turn_have_the_bits_of_adapters_alone(executor, slots):
    def work(tenant, number):
        tenant.loss(random_data(number, [4, 8, 3]))
        yield
        tenant.loss(random_data(10 + number, [11, 2]), "ppo")
        yield
        results.setdefault(tenant.name, []).append(tenant.step()["grad_norm:mean"])
        yield

    results, alone = {}, {}
    for number in range(3):
        tenant = Tenant(executor, f"t{number}", rank=2 + number, seed=number, train_mlp=number != 1)
        for _ in range(4):
            list(work(tenant, number))
        alone[tenant.name], _ = tenant.loss(random_data(99, [9]), forward_only=True)
    before, results = results, {}
    slots.clear()
    tenants = [Tenant(executor, f"t{n}", rank=2 + n, seed=n, train_mlp=n != 1) for n in range(3)]
    for _ in range(4):
        for steps in zip(*(work(tenant, number) for number, tenant in enumerate(tenants)), strict=True):
            assert steps == (None,) * 3
    assert results == before
    for tenant in tenants:
        result, _ = tenant.loss(random_data(99, [9]), forward_only=True)
        assert result[0].tolist() == alone[tenant.name][0].tolist()


def test_a_snapshot_continues_with_the_same_bits(executor, slots):
    tenant = Tenant(executor, "a", seed=3)
    for number in range(3):
        tenant.loss(random_data(number, [5, 6]))
        tenant.step()
    tenant.run("snapshot")
    seq = tenant.seq - 1
    tenant.loss(random_data(7, [8]))
    first = tenant.step(), tenant.loss(random_data(8, [9]), forward_only=True)[0][0].tolist()
    slots.clear()
    executor.execute(ReceivedCommand("restore", "a", seq, {"settings": {"rank": 4}}, b""))
    tenant.loss(random_data(7, [8]))
    assert (tenant.step(), tenant.loss(random_data(8, [9]), forward_only=True)[0][0].tolist()) == first


def test_an_evicted_adapter_keeps_its_gradients(executor, slots):
    def gradients():
        return {name: weight.grad.clone() for name, weight in slots._trained.items()}

    tenant = Tenant(executor, "a", seed=3)
    tenant.loss(random_data(1, [5, 6]))
    tenant.step()
    tenant.loss(random_data(2, [7]))
    tenant.run("snapshot")
    seq, before = tenant.seq - 1, gradients()
    tenant.loss(random_data(3, [4, 2]))
    expected = gradients(), tenant.step(), tenant.loss(random_data(8, [9]), forward_only=True)[0][0].tolist()
    tenant.run("drop")
    other = Tenant(executor, "b")
    other.loss(random_data(5, [5]))
    tenant.seq = seq
    tenant.run("restore", {"settings": {"rank": 4}})
    assert all(torch.equal(item, before[name]) for name, item in gradients().items())
    tenant.loss(random_data(3, [4, 2]))
    actual = gradients(), tenant.step(), tenant.loss(random_data(8, [9]), forward_only=True)[0][0].tolist()
    assert all(torch.equal(item, expected[0][name]) for name, item in actual[0].items())
    assert actual[1:] == expected[1:]
    assert any(item.abs().sum() > 0 for item in before.values())


def test_saved_weights_have_no_gradients(executor, slots, tmp_path):
    tenant = Tenant(executor, "a")
    tenant.loss(random_data(1, [5]))
    tenant.run("save", {"name": "one"})
    load = {"path": "tinker://a/weights/one", "saved_seq": tenant.seq - 1, "optimizer": True}
    tenant.run("load", load | {"settings": {"rank": 4}})
    assert all(weight.grad is None for weight in slots._trained.values())


def test_parts_that_are_not_trained_stay(executor, slots):
    tenant = Tenant(executor, "a", train_unembed=False, train_mlp=False)
    tenant.loss(random_data(1, [5]))
    tenant.step()
    changed = {name for name, weight in slots._trained.items() if name.endswith("lora_B") and weight.abs().sum() > 0}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss_fn": "stable_reinforce"}, "use loss_fn=cispo, ppo or importance_sampling"),
        ({"loss_fn": "mse"}, "is not known"),
        ({"data": []}, "no datum"),
        ({"data": [Datum(tokens=np.arange(3), inputs={})]}, "needs one target_tokens"),
        ({"data": random_data(1, [4], ("logprobs",))}, "datum 0 lacks advantages"),
        ({"data": random_data(1, [4], ("logprobs", "advantages", "mood"))}, "has no input mood"),
    ],
)
def test_a_request_without_a_loss_is_refused(change, text):
    request = {"data": random_data(1, [4]), "loss_fn": "ppo"} | change
    with raises_code("request.invalid_field", text):
        checked_loss(LossRequest(**request))


def test_a_failed_loss_leaves_no_gradients(executor, slots):
    tenant = Tenant(executor, "a")
    tenant.loss(random_data(1, [5]))
    data = random_data(1, [5])
    data[0].inputs["advantages"][2] = np.nan
    with raises_code("train.not_finite"):
        tenant.loss(data)
    assert all(weight.grad is None for weight in slots._trained.values())


def test_a_failed_loss_of_one_tenant_does_not_fail_the_step_of_another(executor, slots):
    first, second = Tenant(executor, "a"), Tenant(executor, "b")
    second.loss(random_data(1, [5]))
    data = random_data(1, [5])
    data[0].inputs["advantages"][2] = np.nan
    with raises_code("train.not_finite"):
        first.loss(data)
    assert second.step()["grad_norm:mean"] > 0


def test_a_state_that_cannot_be_loaded_leaves_nobody_elses(executor, slots, tmp_path):
    first, second = Tenant(executor, "a"), Tenant(executor, "b")
    first.loss(random_data(1, [5]))
    first.step()
    load = {"path": "tinker://x/weights/none", "saved_seq": 1, "optimizer": True, "settings": {"rank": 4}}
    with pytest.raises(ArealError):
        second.run("load", load)
    with raises_code("serve.not_found"):
        second.run("export", {"name": "one", "where": SAMPLER})


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": {"target_tokens": np.int64(3)}},
        {"inputs": {"target_tokens": np.zeros((4, 2, 2), np.int64)}},
        {"inputs": {"clip_low_threshold": np.zeros(2, np.float32)}},
        {"tokens": np.zeros(70, np.int64), "inputs": {"target_tokens": np.zeros(70, np.int64)}},
    ],
)
def test_a_malformed_datum_fails_its_request_alone(executor, change):
    tenant = Tenant(executor, "a")
    good = random_data(1, [4])[0]
    wrong = Datum(tokens=change.get("tokens", good.tokens), inputs={**good.inputs, **change["inputs"]})
    with pytest.raises(RequestError):
        tenant.loss([wrong], "ppo")
    tenant.loss([good], "ppo")


@pytest.mark.parametrize(("loss_fn", "name"), [("gspo", "clip_low_threshold"), ("dro", "beta")])
def test_a_setting_without_a_default_is_needed(loss_fn, name):
    data = random_data(1, [4], LOSSES[loss_fn][0])
    with raises_code("request.invalid_field", name):
        checked_loss(LossRequest(data=data, loss_fn=loss_fn))


def test_an_unknown_command_fails(executor):
    with raises_code("request.invalid_field", "sleep is not a command"):
        Tenant(executor, "a").run("sleep")


def test_a_state_replaces_an_adapter_that_is_not_brought_back_first(executor, slots, monkeypatch):
    first, second = Tenant(executor, "a"), Tenant(executor, "b")
    first.run("snapshot")
    activated = []
    monkeypatch.setattr(slots, "activate", activated.append)
    executor.execute(ReceivedCommand("restore", "a", first.seq - 1, {"settings": {"rank": 4}}, b""))
    second.run("drop")
    assert activated == []


def test_the_rank_has_a_limit(executor):
    with raises_code("request.invalid_field", "rank 9 is not between 1 and 8"):
        Tenant(executor, "a", rank=9)
    assert AdapterSettings(rank=1).trains("lm_head")
    assert StepSettings(**STEP).max_norm == float("inf")
