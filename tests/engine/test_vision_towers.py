"""Models for images and text are trained on text: towers for images keep their bits."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from areal.models.model_shape import ModelShape
from tests.engine.engine_cases import VOCAB
from tests.expect import raises_code

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}  # fmt: skip
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS = {
    "qwen2_5_vl": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=TEXT | {"hidden_size": 32}, vision_config=VISION | {"out_hidden_size": 32})
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(text_config=TEXT | EXPERTS, vision_config=VISION | {"deepstack_visual_indexes": [0]})
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written("qwen2_5_vl", tmp_path_factory)


def written(family, tmp_path_factory):
    torch.manual_seed(0)
    model = MODELS[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    path = tmp_path_factory.mktemp(family)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_is_trained_and_the_tower_keeps_its_bits(cases, folder, tmp_path, dtype):
    """In float32 the model is whole, in bfloat16 it is sharded."""
    batch = cases.make_batch()
    engine = cases.make_engine(folder, dtype=dtype)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for ids, actual in zip(
            torch.split(batch.input_ids, batch.sequence_lengths),
            torch.split(engine.forward(batch).logprobs, batch.sequence_lengths),
            strict=True,
        ):
            logits = theirs(input_ids=ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
            expected = logits.gather(1, ids[1:, None])[:, 0]
            torch.testing.assert_close(actual[:-1], expected, rtol=0, atol=1e-5 if dtype == "float32" else 0.2)
    cases.train(engine, batch)
    engine.save(tmp_path / "export", with_optimizer=False)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "export"))
    assert before.keys() == after.keys()
    towers = {name for name in before if "visual" in name}
    assert towers
    assert all(after[name].dtype == before[name].dtype for name in towers)
    assert all(torch.equal(after[name], before[name]) for name in towers)
    moved = [
        name for name in before if name not in towers and not torch.equal(after[name].float(), before[name].float())
    ]
    assert len(moved) > (len(before) - len(towers)) / 2
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert torch.equal(again.state_dict()["lm_head.weight"], after["lm_head.weight"].float())
    cases.weights_of(engine)


def test_a_critic_with_a_tower_is_refused_and_its_shape_is_known(cases, folder):
    with raises_code("model.unsupported"):
        cases.make_engine(folder, role="critic")
    shape = ModelShape.read(str(folder))
    assert (shape.layers, shape.vocabulary) == (2, VOCAB)


def test_experts_that_are_stored_transposed_are_refused(cases, tmp_path_factory):
    with raises_code("model.unsupported"):
        cases.make_engine(written("qwen3_vl_moe", tmp_path_factory))
