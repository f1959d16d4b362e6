"""Sliding windows of attention, against transformers on sequences that are longer than the window."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from areal.api.config import FSDPEngineConfig
from tests.engine.test_shared_prompts import grouped_batch
from tests.expect import raises_code

WINDOW = 4
SHAPE = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "sliding_window": WINDOW,
}  # fmt: skip
SPECIAL: dict[str, dict] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "cohere2": {},
    "exaone4": {"sliding_window_pattern": 2},
    "gemma3_text": {"head_dim": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
FAMILIES = ["mistral", "phi3", "starcoder2", "olmo3", *SPECIAL]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Folders of small models, by model type."""
    folder = tmp_path_factory.mktemp("windowed")
    for family in FAMILIES:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SHAPE, **SPECIAL.get(family, {})))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.2)
        model.save_pretrained(folder / family)
    return folder


def expected(path, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of the next tokens, and the gradients of their weighted sum, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for ids in torch.split(batch.input_ids, batch.sequence_lengths):
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        found += [logprobs.gather(1, ids[1:, None])[:, 0], torch.zeros(1)]
    joined = torch.cat(found)
    loss = (batch.advantages * joined)[batch.loss_mask].sum() / batch.loss_mask.sum()
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return joined.detach(), dict(zip(names, gradients, strict=True))


def weighted(cases):
    def loss(outputs, micro):
        terms = (micro.batch.advantages * outputs.logprobs)[micro.batch.loss_mask]
        return cases.LossOutput(loss=terms.sum(), metrics={})

    return loss


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_transformers(cases, windowed, family):
    batch = grouped_batch()
    assert max(batch.sequence_lengths) > 2 * WINDOW
    logprobs, gradients = expected(windowed / family, batch)
    engine = cases.make_engine(windowed / family)
    torch.testing.assert_close(engine.forward(batch).logprobs, logprobs, rtol=0, atol=1e-5)
    sizes = batch.sequence_lengths
    for ids, alone in zip(torch.split(batch.input_ids, sizes), torch.split(logprobs, sizes), strict=True):
        one = cases.rows_to_train_batch([ids.tolist()], [[0, *[1] * (len(ids) - 1)]])
        torch.testing.assert_close(engine.forward(one).logprobs, alone, rtol=0, atol=1e-5)
    found = cases.gradients(engine, batch, loss_fn=weighted(cases))
    stored = {name: value for name, value in gradients.items() if name in found}
    assert stored or family == "mixtral"  # whose experts are stored under other names
    for name, value in stored.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"shared_prompts": False},
        {"fsdp": FSDPEngineConfig(offload_params=True)},
    ],
    ids=["checkpointed", "whole_prompts", "sharded"],
)
@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_options_change_nothing(cases, windowed, family, options):
    batch = grouped_batch()
    logprobs, _ = expected(windowed / family, batch)
    plain = cases.gradients(cases.make_engine(windowed / family, shared_prompts=True), batch)
    engine = cases.make_engine(windowed / family, **options)
    torch.testing.assert_close(engine.forward(batch).logprobs, logprobs, rtol=0, atol=1e-5)
    for name, value in cases.gradients(engine, batch).items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=1e-5, msg=name)


def test_a_prompt_within_a_window_is_shared(cases, windowed):
    engine = cases.make_engine(windowed / "qwen2")
    batch = grouped_batch()
    _, inputs = engine._micro_batch(batch, list(range(len(batch.sequence_lengths))))
    assert inputs.rows is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["whole", "sharded"])
def test_a_layer_that_does_not_pass_its_window_is_refused(cases, tmp_path, dtype):
    """Phi-MoE makes a mask with a window, and does not pass the window to attention."""
    for window in (WINDOW, SHAPE["max_position_embeddings"]):
        config = CONFIG_MAPPING["phimoe"](**SHAPE | {"sliding_window": window}, num_local_experts=4)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(window))
    with raises_code("model.unsupported", "sliding window of None"):
        cases.make_engine(tmp_path / str(WINDOW), dtype=dtype)
    cases.make_engine(tmp_path / str(window), dtype=dtype)  # sees all tokens of the longest sequence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["whole", "sharded"])
def test_attention_with_sinks_is_refused(cases, tmp_path, dtype):
    config = CONFIG_MAPPING["gpt_oss"](**SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with raises_code("model.unsupported", "s_aux"):
        cases.make_engine(tmp_path, dtype=dtype)
