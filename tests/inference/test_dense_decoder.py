"""The short forward pass of dense decoders against that of transformers, bit by bit."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal.api.config import NativeServerConfig
from areal.inference import decode_graph, model_runner
from areal.inference.decode_graph import dense_decoder
from areal.inference.model_runner import use_paged_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen2-windows", "qwen3-gqa", "llama"])
def test_answers_are_those_of_transformers(build_model, drive, prompts, monkeypatch, family, dtype):
    model = build_model(family).to(dtype)

    def answers():
        driver = drive(model, max_prefill_tokens=32)  # so that prompts are computed in chunks, beside decode rows
        groups = [f"group-{number // 2}" for number in range(len(prompts))]
        each = [driver.add(prompt, group_id=group) for prompt, group in zip(prompts, groups, strict=True)]
        each += [driver.add(prompts[0], group_id=groups[0], seed=seed, temperature=0.8) for seed in (1, 2)]
        driver.run()
        return driver.engine.runner, [(item.token_ids, item.logprobs) for item in each]

    runner, result = answers()
    assert dense_decoder(runner.model, runner.layer_shapes) is not None
    monkeypatch.setattr(model_runner, "dense_decoder", lambda model, shapes: None)
    assert result == answers()[1]


PACKS = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
PACKS_BFLOAT16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN packs bfloat16 with AVX-512 only",
)


@PACKS
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=PACKS_BFLOAT16)])
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-gqa", "llama"])
def test_packed_weights_give_the_logprobs_of_transformers(build_model, drive, prompts, monkeypatch, family, dtype):
    """Before and after an update in mid-answer; with few rows and with many."""
    monkeypatch.setattr(NativeServerConfig, "packed_bytes", staticmethod(lambda size: size))
    old, new = build_model(family, 0).to(dtype), build_model(family, 1).to(dtype)
    driver = drive(old, max_prefill_tokens=32)
    runner, weights = driver.engine.runner, driver.engine.weights
    assert runner._dense is not None
    assert runner._dense._is_packed
    each = [driver.add(prompt, temperature=1.0, seed=seed, max_new_tokens=12) for seed, prompt in enumerate(prompts)]
    each += [driver.add(prompts[1], temperature=1.0, seed=9, max_new_tokens=40)]
    driver.steps(9)
    for name, tensor in new.state_dict().items():
        weights.receive_value(name, tensor)
    driver.engine.install_weights("1", "retract")
    driver.run()
    exact = {"0": old.float(), "1": new.float()}
    for sequence in each:
        for version, start, end in sequence.version_spans(0, len(sequence.logprobs)):
            with torch.no_grad():
                logits = exact[version](torch.tensor([sequence.token_ids])).logits[0].log_softmax(-1)
            for place in range(start, end):
                position = sequence.num_prompt + place
                wanted = logits[position - 1, sequence.token_ids[position]].item()
                assert sequence.logprobs[place] == pytest.approx(wanted, abs=2e-5 if dtype == torch.float32 else 0.5)
    assert {version for entry in each for version, _, _ in entry.version_spans(0, 40)} == {"0", "1"}


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=PACKS)])
@pytest.mark.parametrize("sizes", [(64, 64), (256, 64), (576, 192), (1536, 576), (33, 7)])
def test_from_the_equal_rows_of_a_product_on_a_row_has_the_same_bits_beside_any_others(sizes, packed):
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(*sizes).requires_grad_(False)
    product = decode_graph._Product(module)
    if packed:
        product.pack()
    states, more = torch.randn(2, 48, sizes[0], generator=generator), torch.randn(48, sizes[1], generator=generator)
    exact = product(states[0], more)
    least = product.equal_rows()
    assert least == 2 if packed else 1 <= least <= decode_graph.EQUAL_ROWS
    for count in range(least, 48):
        assert product(torch.cat((states[0, :count], states[1, count:])), more)[:count].equal(exact[:count])
        assert product(states[0, :count].clone(), more[:count]).equal(exact[:count])


@PACKS
def test_weights_that_onednn_computes_otherwise_are_not_packed(build_model, drive, prompts, monkeypatch):
    monkeypatch.setattr(NativeServerConfig, "packed_bytes", staticmethod(lambda size: size))
    pack = decode_graph._Product.pack

    def wrong(product):
        pack(product)
        product._packed = torch.ops.mkldnn._reorder_linear_weight(1.01 * product.modules[0].weight.detach(), 8)

    monkeypatch.setattr(decode_graph._Product, "pack", wrong)
    runner = drive(build_model("llama")).engine.runner
    assert runner._dense is not None
    assert not runner._dense._is_packed


@PACKS_BFLOAT16
def test_rounding_that_a_model_amplifies_is_no_reason_against_packing(build_model, drive, monkeypatch):
    """As a trained model does with token ids that are no text."""
    monkeypatch.setattr(NativeServerConfig, "packed_bytes", staticmethod(lambda size: size))
    model = build_model("qwen3-gqa")
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data *= 200.0
    runner = drive(model.to(torch.bfloat16)).engine.runner
    ids = torch.arange(9)[None]
    plans = [decode_graph._trial_plan(runner.layer_shapes, torch.bfloat16) for _ in range(2)]
    packed = runner._dense.logits(ids, ids, None, plans[0])
    assert runner._dense._is_packed
    runner._dense.unpack()
    exact = runner._dense.logits(ids, ids, None, plans[1])
    assert (packed - exact).abs().max() > 0.05 * exact.abs().max()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral-window", "deepseek_v3"])
def test_other_models_are_left_to_transformers(build_model, drive, family):
    runner = drive(build_model(family)).engine.runner
    assert dense_decoder(runner.model, runner.layer_shapes) is None


def test_a_model_with_other_results_is_left_to_transformers(build_model, drive):
    runner = drive(build_model("llama")).engine.runner
    runner.model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 1.001)
    assert dense_decoder(runner.model, runner.layer_shapes) is None


def test_a_model_with_other_modules_is_left_to_transformers(build_model, drive):
    runner = drive(build_model("llama")).engine.runner
    attention = runner.model.model.layers[1].self_attn
    attention.output = attention.o_proj  # as a version of transformers with another name
    del attention.o_proj
    attention.forward = lambda hidden_states, **others: (attention.output(hidden_states), None)
    assert dense_decoder(runner.model, runner.layer_shapes) is None


@pytest.mark.parametrize(("kind", "is_known"), [("linear", True), ("dynamic", False)])
def test_frequencies_that_depend_on_the_length_are_left_to_transformers(drive, kind, is_known):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rope_parameters=rope,
        )
    ).eval()  # fmt: skip
    use_paged_attention(model)
    runner = drive(model).engine.runner
    assert (dense_decoder(runner.model, runner.layer_shapes) is not None) == is_known


def test_new_weights_are_used(build_model, drive, prompts):
    old, new = build_model("qwen3-gqa", 0), build_model("qwen3-gqa", 1)
    driver, fresh = drive(old), drive(new)
    for mine, theirs in zip(driver.engine.runner.model.parameters(), new.parameters(), strict=True):
        mine.data = theirs.data.clone()  # as an exchange of the two copies of a server
    pairs = [(driver.add(prompt), fresh.add(prompt)) for prompt in prompts]
    driver.run()
    fresh.run()
    assert all(item.token_ids == other.token_ids and item.logprobs == other.logprobs for item, other in pairs)
