"""Sliding windows, capped scores and sinks of attention, against transformers on sequences longer than the window."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from areal.api.config import FSDPEngineConfig
from areal.engine.hf_model import _kept_or_not
from areal.models.attention import capped_attention
from tests.engine.test_tree import grouped_batch
from tests.expect import raises_code

pytestmark = pytest.mark.usefixtures("shares_in_small_rows")

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
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "vaultgemma": {"head_dim": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {"attention_multiplier": 0.5, "logits_scaling": 4.0},
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
    actual = []
    for ids in torch.split(batch.input_ids, batch.sequence_lengths):
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        actual += [logprobs.gather(1, ids[1:, None])[:, 0], torch.zeros(1)]
    joined = torch.cat(actual)
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
        subject = cases.rows_to_train_batch([ids.tolist()], [[0, *[1] * (len(ids) - 1)]])
        torch.testing.assert_close(engine.forward(subject).logprobs, alone, rtol=0, atol=1e-5)
    actual = cases.gradients(engine, batch, loss_fn=weighted(cases))
    stored = {name: value for name, value in gradients.items() if name in actual}
    assert stored or family == "mixtral"  # whose experts are stored under other names
    for name, value in stored.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {"gradient_checkpointing": True}),
        ("gemma2", {"gradient_checkpointing": True}),
        ("mixtral", {"gradient_checkpointing": True, "checkpointing": "selective"}),
        ("gemma2", {"gradient_checkpointing": True, "checkpointing": "selective"}),
        ("granite_swa", {"shared_prefixes": "off"}),
        ("gemma2", {"shared_prefixes": "off"}),
        ("granite_swa", {"fsdp": FSDPEngineConfig(offload_params=True)}),
        ("gemma2", {"fsdp": FSDPEngineConfig(offload_params=True)}),
    ],
)
def test_options_change_nothing(cases, windowed, family, options):
    batch = grouped_batch()
    logprobs, _ = expected(windowed / family, batch)
    plain = cases.gradients(cases.make_engine(windowed / family, shared_prefixes="tree"), batch)
    engine = cases.make_engine(windowed / family, **options)
    torch.testing.assert_close(engine.forward(batch).logprobs, logprobs, rtol=0, atol=1e-5)
    for name, value in cases.gradients(engine, batch).items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=1e-5, msg=name)


class Products(TorchDispatchMode):
    """Operators whose results have the size of all scores."""

    def __init__(self, num_scores: int) -> None:
        super().__init__()
        self.num_scores, self.found = num_scores, list[Any]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.num_scores:
            self.found.append(func)
        return result


def test_selective_checkpointing_keeps_no_capped_scores():
    states = torch.ones(1, 2, 7, 3)
    with Products(2 * 7 * 7) as products:
        capped_attention(states, states, states, is_causal=True, softcap=1.0)
    assert products.found
    assert all(_kept_or_not(None, operator) is CheckpointPolicy.PREFER_RECOMPUTE for operator in products.found)


def test_a_prompt_within_a_window_is_shared(cases, windowed):
    engine = cases.make_engine(windowed / "qwen2")
    batch = grouped_batch()
    assert engine._plan(batch)[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["whole", "sharded"])
def test_a_layer_that_does_not_pass_its_window_is_refused(cases, tmp_path, dtype):
    """Phi-MoE makes a mask with a window, and does not pass the window to attention."""
    for window in (WINDOW, SHAPE["max_position_embeddings"]):
        config = CONFIG_MAPPING["phimoe"](**SHAPE | {"sliding_window": window}, num_local_experts=4)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(window))
    with raises_code("model.unsupported", "sliding window of None"):
        cases.make_engine(tmp_path / str(WINDOW), dtype=dtype)
    cases.make_engine(tmp_path / str(window), dtype=dtype)  # sees all tokens of the longest sequence
