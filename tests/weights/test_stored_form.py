"""The parts that transformers joins have the names, shapes and bits of the checkpoint it writes."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

from areal.models import stored_form
from areal.models.stored_form import StoredForm
from tests.expect import raises_code

SIZES = {
    "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 4, "num_hidden_layers": 2, "vocab_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32,
    "num_experts": 3, "n_routed_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
    "first_k_dense_replace": 1, "shared_expert_intermediate_size": 4, "decoder_sparse_step": 1, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "minimax_m2"],
)
def test_every_stored_weight_is_a_view_of_the_parameter_that_contains_it(family, tmp_path):
    known = AutoConfig.for_model(family).to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    model.save_pretrained(tmp_path)
    stored, form = load_file(tmp_path / "model.safetensors"), StoredForm(model)
    ours = model.state_dict()
    views = {name: view for key, value in ours.items() for name, view in form.views(key, value)}
    assert views.keys() == stored.keys()
    assert all(torch.equal(views[name], value) for name, value in stored.items())
    memory = {value.untyped_storage().data_ptr() for value in ours.values()}
    assert all(view.untyped_storage().data_ptr() in memory for view in views.values())


def test_parameters_that_share_a_stored_weight_and_permuted_ones_are_refused(monkeypatch):
    model = nn.ModuleDict({"q": nn.Linear(2, 4), "k": nn.Linear(2, 4)})
    model.config = None
    joined = WeightConverter("qk.weight", ["q.weight", "k.weight"], [Chunk(dim=0)])
    turned = WeightConverter("q.stored", "q.weight", [Transpose(0, 1)])
    for change in (joined, turned):
        monkeypatch.setattr(stored_form, "get_model_conversion_mapping", lambda *_, change=change, **__: [change])
        with raises_code("model.unsupported"):
            StoredForm(model)


def test_a_model_without_conversions_is_stored_as_it_is():
    linear = nn.Linear(2, 3)
    form = StoredForm(linear)
    assert [dict(form.views(name, value))[name] is value for name, value in linear.named_parameters()] == [True, True]
