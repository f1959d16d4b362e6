"""A Qwen3-MoE of four experts that learns the quickstart's task."""

import json
import shutil
from pathlib import Path

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed

SIZES = {
    "vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip


def write_expert_model(dense: Path, folder: Path) -> None:
    """Random weights with the tokenizer of the quickstart's model `dense`."""
    if folder != dense:
        shutil.copytree(dense, folder)
    known = json.loads((dense / "config.json").read_text())
    tokens = {name: known[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in known}
    set_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **tokens)).save_pretrained(folder)
