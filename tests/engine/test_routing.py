"""Routers: recorded choices, the load-balance loss against transformers, the bias of experts, metrics."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from areal.api.batch import LossOutput
from areal.api.columns import ROUTED_EXPERTS
from areal.engine.routing import find_rule
from tests.expect import raises_code
from tests.weights.test_stored_form import SIZES

LAYERS = 2


@pytest.fixture(scope="module")
def models(cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    cases.write_models(folder)
    return folder


def gates_of(model):
    return {int(path.split(".")[-3]): gate for path, gate in model.named_modules() if path.endswith("mlp.gate")}


def choices_of(model, batch) -> torch.Tensor:
    """What the routers of a transformers model choose: [T, layers, k] int16, -1 for layers without experts."""
    result = torch.full((batch.num_tokens, LAYERS, 2), -1, dtype=torch.int16)
    chosen: dict[int, list[torch.Tensor]] = {layer: [] for layer in gates_of(model)}
    hooks = [
        gate.register_forward_hook(lambda _, __, out, layer=layer: chosen[layer].append(out[2]))
        for layer, gate in gates_of(model).items()
    ]
    for ids in torch.split(batch.input_ids, batch.sequence_lengths):
        with torch.no_grad():
            model(input_ids=ids.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    for layer, parts in chosen.items():
        result[:, layer] = torch.cat(parts)
    return result


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "olmoe"])
def test_the_rule_of_a_router_is_found(family):
    known = AutoConfig.for_model(family).to_dict()
    sizes = {name: value for name, value in (SIZES | {"routed_scaling_factor": 2.5}).items() if name in known}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    for gate in gates_of(model).values():
        rule = find_rule(gate, model.config)
        assert rule is not None
        torch.nn.init.normal_(gate.weight)
        with torch.no_grad():
            logits, weights, chosen = gate(torch.randn(7, model.config.hidden_size))
        torch.testing.assert_close(rule.weights(logits, chosen), weights.float())


def near_ties(path, noise: float) -> dict[str, torch.Tensor]:
    """The state of a model whose experts come in pairs with nearly equal router weights, with noise on them."""
    state = AutoModelForCausalLM.from_pretrained(path).state_dict()
    generator = torch.Generator().manual_seed(3)
    for name, weight in state.items():
        if name.endswith("gate.weight"):
            weight[1] = weight[0]
            weight += noise * torch.randn(weight.shape, generator=generator)
    return state


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_recorded_choices_are_replayed(cases, models, tmp_path, model, is_checkpointed):
    """The served and the trained weights differ by 1e-6, which decides between two experts."""
    served = AutoModelForCausalLM.from_pretrained(models / model)
    paths = []
    for number, sign in enumerate((1e-6, -1e-6)):
        served.load_state_dict(near_ties(models / model, sign))
        served.save_pretrained(tmp_path / str(number))
        paths.append(tmp_path / str(number))
    batch = cases.make_batch()
    first, second = (AutoModelForCausalLM.from_pretrained(path) for path in paths)
    recorded, ours = choices_of(first, batch), choices_of(second, batch)
    assert not torch.equal(recorded.sort(-1).values, ours.sort(-1).values)
    expected = cases.make_engine(paths[0]).forward(batch).logprobs
    replayed = batch.with_column(ROUTED_EXPERTS, recorded)
    options = {"gradient_checkpointing": is_checkpointed}
    engine = cases.make_engine(paths[1], router_replay=True, **options)
    assert (engine.forward(batch).logprobs - expected).abs().max() > 1e-3
    torch.testing.assert_close(engine.forward(replayed).logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        cases.gradients(engine, replayed)["lm_head.weight"],
        cases.gradients(cases.make_engine(paths[0], **options), batch)["lm_head.weight"],
        rtol=0,
        atol=1e-4,
    )
    metrics = cases.train(cases.make_engine(paths[1], router_replay=True, **options), replayed)
    assert metrics["router_replayed"].value == 1.0
    assert 0.3 < metrics["router_agreement"].value < 1.0


def test_tokens_without_a_record_get_the_routers_own_choice(cases, models):
    batch, engine = cases.make_batch(), cases.make_engine(models / "qwen3_moe", router_replay=True)
    plain = engine.forward(batch).logprobs
    unknown = torch.full((batch.num_tokens, LAYERS, 2), -1, dtype=torch.int16)
    assert torch.equal(engine.forward(batch.with_column(ROUTED_EXPERTS, unknown)).logprobs, plain)
    with raises_code("data.routed_experts"):
        engine.forward(batch.with_column(ROUTED_EXPERTS, unknown[:, :1]))
    outside = batch.with_column(ROUTED_EXPERTS, torch.full((batch.num_tokens, LAYERS, 2), 3, dtype=torch.int16))
    with raises_code("data.routed_experts"):
        engine.forward(outside)


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_the_balance_loss_is_that_of_transformers(cases, models, model):
    def no_loss(outputs, micro):
        return LossOutput(loss=outputs.logprobs.sum() * 0.0, metrics={})

    batch = cases.make_batch()
    engine = cases.make_engine(models / model, router_aux_loss_coef=0.7)
    before = cases.weights_of(engine)
    metrics = engine.forward_backward(batch, no_loss, denominator=1.0) | engine.optimizer_step()
    theirs = AutoModelForCausalLM.from_pretrained(models / model)
    logits = []
    for ids in torch.split(batch.input_ids, batch.sequence_lengths):
        logits.append(theirs(input_ids=ids.unsqueeze(0), output_router_logits=True).router_logits)
    loss = load_balancing_loss_func(tuple(map(torch.cat, zip(*logits, strict=True))), theirs.num_experts, 2)
    (0.7 * loss).backward()
    assert metrics["router_balance_loss"].value == pytest.approx(loss.item(), rel=1e-5)
    for layer, gate in gates_of(theirs).items():
        name = next(n for n in before if f"layers.{layer}." in n and n.endswith("gate.weight"))
        moved = before[name] - cases.weights_of(engine)[name]
        torch.testing.assert_close(moved, gate.weight.grad, rtol=0, atol=1e-6)


def test_biases_move_towards_a_balanced_load(cases, models):
    engine = cases.make_engine(models / "deepseek_v3", router_bias_update_rate=0.01)
    batch = cases.make_batch()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    before = cases.weights_of(engine)[name]
    metrics = cases.train(engine, batch)
    counts = choices_of(AutoModelForCausalLM.from_pretrained(models / "deepseek_v3"), batch)[:, 1].flatten().bincount()
    expected = 0.01 * (counts.double().mean() - counts).sign()
    torch.testing.assert_close(cases.weights_of(engine)[name] - before, expected.float())
    assert metrics["router_load_max"].value == pytest.approx(float(counts.max() / counts.double().mean()))
    assert metrics["router_dropped"].value == 0.0
    assert 0.0 < metrics["router_entropy"].value < 1.1
    engine = cases.make_engine(models / "deepseek_v3", dtype="bfloat16")
    assert cases.weights_of(engine)[name].dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3", {"router_replay": True}),
        ("qwen2", {"router_aux_loss_coef": 0.1}),
        ("qwen3_moe", {"router_bias_update_rate": 0.1}),
    ],
)
def test_a_model_that_cannot_follow_a_router_option_is_refused(cases, models, model, options):
    with raises_code("model.no_router"):
        cases.make_engine(models / model, **options)
