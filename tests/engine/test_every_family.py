"""Every family that transformers maps to a language model: it computes and exports what transformers does, on one rank
and on two, or is refused with a code before anything starts."""

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from areal.api.allocation import ParallelDims
from areal.api.errors import ArealError
from areal.engine.fsdp import check_model
from areal.engine.mesh import TrainerMesh
from tests.engine import engine_cases as cases
from tests.rank_processes import run_ranks

FAMILIES = {
    **dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM),
    **dict.fromkeys(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, AutoModelForImageTextToText),
}
"""Model type -> the class that loads its checkpoints."""
OF_WEIGHTS = ("model.not_loadable", "model.weights_do_not_fit")
"""Refusals that a configuration alone does not show."""
REASONS = ("cannot use packed rows: its ", "accepts ")
"""What precedes reasons that the table names, in the lines of refusals with model.unsupported."""
MAX_PARAMETERS = 32_000_000
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "text_hidden_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "hidden_size_global", "image_token_embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_head", "v_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_dim", "d_ff", "inner_dim"), 48),
    **dict.fromkeys(("vocab_size", "text_vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts"), 2),
    **{"num_experts_per_token": 2, "num_expert_group": 1, "zero_expert_num": 1, "num_kv_shared_layers": 0},
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_dim", "expert_ffn_hidden_size"), 16
    ),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "patch_size"), 4),
    **dict.fromkeys(("out_hidden_size", "projection_dim"), 32),
    **dict.fromkeys(("image_size", "num_position_embeddings", "mamba_d_head"), 16),
    **dict.fromkeys(("image_token_id", "image_token_index"), 90),  # not in the batch, which has no images
    **{"encoder_hash_byte_group_vocab": 64, "num_embeddings": 64, "mamba_d_ssm": 64},
    **{"mamba_d_state": 8, "mamba_n_groups": 1, "hidden_size_per_layer_input": 8, "first_k_dense_replace": 1},
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 4),
    **{"logit_scale": 0.25, "logits_scaling": 4.0, "dim_model_base": 16},
    **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Small values of the sizes in configurations."""
NEEDED = ("head_dim", "num_experts_per_tok", "n_routed_experts", "num_key_value_heads", "n_shared_experts")
"""Set also where the configuration has None, which is not always what a checkpoint has."""


_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
_INDEXER |= {"indexer_budget": 8, "indexer_compress_ratio": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "cohere_compass": {"text_config": {"rope_parameters": _ROPE}},
    "cohere_compass_text": {"rope_parameters": _ROPE},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "emu3": {"vocabulary_map": {"<image>": 90}, "vq_config": {"base_channels": 32, "embed_dim": 4}},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "florence2": {"vision_config": {"embed_dim": [32] * 4, "depths": [1] * 4}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0, "head_dim": 0}},
    "janus": {"vq_config": {"base_channels": 32, "latent_channels": 32}},
    "mamba2": {"num_heads": 8},
    "mistral4": {"head_dim": 4},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "step3p7": {"text_config": {"sliding_window": 4}},
}


def small_values(config: PretrainedConfig) -> dict[str, Any]:
    values = config.to_dict()
    result: dict[str, Any] = {
        name: value
        for name, value in SMALL.items()
        if isinstance(values.get(name), int | float | str) or (name in NEEDED and name in values)
    }
    if values.get("layer_types", ()) is None:
        result["layer_types"] = ["full_attention"] * SMALL["num_hidden_layers"]
    elif kinds := list(dict.fromkeys(values.get("layer_types") or ())):  # each once, at least two layers
        result["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        result["num_hidden_layers"] = len(result["layer_types"])
        if mlps := list(dict.fromkeys(values.get("mlp_layer_types") or ())):
            result["mlp_layer_types"] = [mlps[i % len(mlps)] for i in range(result["num_hidden_layers"])]
    rope = values.get("rope_parameters") or {}
    if "rope_theta" in rope:  # parts of half a head, for time, height and width; most families have none
        half = int(SMALL["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        result["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    if "qk_rope_head_dim" in values:  # of latent attention: its heads have keys and values of their own
        result.pop("head_dim", None)
        result["num_key_value_heads"] = 4
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            result[name] = small_values(part) | {"model_type": part.model_type}
    return result


def small_model(family: str) -> PreTrainedModel:
    """Raises any error of transformers for a family that these sizes do not fit, and ValueError for a large model."""
    kind = CONFIG_MAPPING[family]
    values = small_values(kind())
    for name, value in SPECIAL.get(family, {}).items():
        values[name] = values.get(name, {}) | value if isinstance(value, dict) else value
    config, auto = kind(**values), FAMILIES[family]
    with torch.device("meta"):
        count = sum(weight.numel() for weight in auto.from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{family} has {count} parameters")
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return model


def logprobs_of(model: PreTrainedModel) -> torch.Tensor:
    """Of each sequence of `make_batch` alone, as transformers computes them."""
    batch, result = cases.make_batch(), list[torch.Tensor]()
    with torch.no_grad():
        for ids in torch.split(batch.input_ids, batch.sequence_lengths):
            logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1].float().log_softmax(-1)
            result += [logits.gather(1, ids[1:, None])[:, 0], torch.zeros(1)]
    return torch.cat(result)


def outcome(family: str, folder: Path) -> str:
    """`loads`, the code of the refusal, or that there is no small model. `folder` gets the checkpoint and its export.

    AssertionError when the engine computes, or exports, something else than transformers, or loads a model that cannot
    compute text alone.
    """
    expected = None
    try:
        small_model(family).save_pretrained(folder)
        theirs = FAMILIES[family].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    except Exception:  # noqa: BLE001 - whatever an architecture raises: none of our code ran
        return "no small model"
    with suppress(Exception):
        expected = logprobs_of(theirs)
    said = refused = None
    try:
        check_model(cases.make_config(folder), role="actor", dims=ParallelDims())
    except ArealError as error:
        said = str(error)
    try:
        engine = cases.make_engine(folder)
    except ArealError as error:
        refused = error
    if refused is not None:
        is_said = said is not None and fact_of(said) == fact_of(str(refused))
        assert is_said or refused.code in OF_WEIGHTS or expected is None, said
        return next((str(refused).partition(each)[2] for each in REASONS if each in str(refused)), refused.code)
    assert said is None
    assert expected is not None
    assert (engine.forward(cases.make_batch()).logprobs - expected).abs().max() < 1e-5
    engine.save(folder / "export", with_optimizer=False)
    before, after = (load_file(path / "model.safetensors") for path in (folder, folder / "export"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    again = FAMILIES[family].from_pretrained(folder / "export", dtype=torch.float32).state_dict()
    assert all(torch.equal(again[name], value) for name, value in theirs.state_dict().items())
    save_file({"logprobs": expected}, folder / "expected")
    return "loads"


def fact_of(text: str) -> str:
    """A refusal without what torch says of tensors, in other words where these have no memory."""
    return text.partition(" for packed rows: ")[0]


def _on_two_ranks(folder: Path, mesh: TrainerMesh) -> float | str:
    engine = cases.make_engine(folder, mesh)
    gap = engine.forward(cases.make_batch()).logprobs - load_file(folder / "expected")["logprobs"]
    engine.save(folder / "export-2", with_optimizer=False)
    before, after = (load_file(each / "model.safetensors") for each in (folder, folder / "export-2"))
    is_equal = before.keys() == after.keys() and all(torch.equal(after[name], value) for name, value in before.items())
    return gap.abs().max().item() if is_equal else "export differs"


def on_two_ranks(mesh: TrainerMesh, folder: Path) -> dict[str, float | str]:
    """Load every checkpoint on both ranks: the largest difference of each, or the code of its refusal."""
    result: dict[str, float | str] = {}
    for path in sorted(folder.glob("*/expected")):
        try:
            result[path.parent.name] = _on_two_ranks(path.parent, mesh)
        except ArealError as error:
            result[path.parent.name] = error.code
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # of an architecture
            result[path.parent.name] = type(error).__name__
    return result


PAGE = Path(__file__).parents[2] / "docs" / "train_engines.md"
START, END = "<!-- families: make test-parallel writes it -->", "<!-- end of families -->"
MUST_LOAD = {
    "apertus", "arcee", "aria_text", "bitnet", "cohere", "cohere2", "ctrl", "cwm", "deepseek_v2", "deepseek_v3",
    "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "gemma2", "gemma3_text",
    "glm", "glm4", "glm4_moe", "glm4v", "gpt-sw3", "gpt2", "gpt_neox", "gpt_oss", "granite", "granite_swa",
    "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax",
    "internlm3", "iquestcoder", "jais2", "laguna", "lfm2", "lfm2_moe", "llama", "mellum", "minicpm3", "minimax_m2",
    "ministral", "mistral", "mistral3", "mixtral", "olmo3", "phi3", "qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3",
    "qwen3_moe", "qwen3_vl", "starcoder2", "vaultgemma",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Family -> its outcome; filled by the tests."""
    return {}


@pytest.mark.parallel
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_equals_transformers_or_is_refused(folder, outcomes, family):
    try:
        outcomes[family] = outcome(family, folder / family)
    except Exception as error:  # a defect, which the table names
        is_other = isinstance(error, AssertionError)
        outcomes[family] = "differs" if is_other else f"fails: {type(error).__name__}"
        if family in MUST_LOAD:
            raise
        pytest.xfail(outcomes[family])
    assert family not in MUST_LOAD or outcomes[family] == "loads"


@pytest.mark.parallel
def test_two_ranks_load_the_families_that_one_rank_loads(folder, outcomes):
    for on_two in run_ranks(on_two_ranks, folder):
        assert on_two
        for family, gap in on_two.items():
            if isinstance(gap, str):
                outcomes[family] = f"one rank only: {gap}"
            assert outcomes[family] != "loads" or gap < 1e-5, family
            assert outcomes[family] == "loads" or family not in MUST_LOAD, family
    if outcomes.keys() == FAMILIES.keys():
        write_table(outcomes)


def write_table(outcomes: dict[str, str]) -> None:
    before, after = PAGE.read_text().split(START)
    lines = ["| outcome | families |", "|---|---|"]
    older = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    for result, _ in Counter(outcomes.values()).most_common():
        every = sorted(family for family, each in outcomes.items() if each == result)
        names = ", ".join(family for family in every if result == "loads" or family not in older)
        if len(rest := [family for family in every if result != "loads" and family in older]) > 0:
            names += f"{names and ', '}{len(rest)} that fill masks or translate"
        if result.startswith("no custom"):
            names = f"{len(every)} families"
        lines.append(f"| {result} | {names} |")
    PAGE.write_text("\n".join([before + START, *lines, END]) + after.partition(END)[2])
