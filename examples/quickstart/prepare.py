"""Writes the files of the quickstart: a character tokenizer, a random model, the data. No network.

python examples/quickstart/prepare.py FOLDER [--seed 0] [--family qwen3_5]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import task

from areal.data.tiny_model import character_tokenizer, write_tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "intermediate_size": 256,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "intermediate_size": 256,
        "head_dim": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
}
"""What the configuration of a small model of the family has besides `hybrid_model`'s."""
NUM_SFT_ROWS = 55 * 256
NUM_RL_ROWS = 8192
NUM_HELD_OUT = 256


def build_tokenizer() -> Any:
    """One token per character."""
    return character_tokenizer([*task.SPECIALS, *task.CHARACTERS])


def hybrid_model(family: str, tokenizer: Any, seed: int) -> Any:
    """A random model of width 64 with layers that keep a state, and with attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        **FAMILIES[family],
        vocab_size=16,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model/ and the .jsonl files are written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen2", help="of the model")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(args.folder / "model")
    if args.family == "qwen2":
        write_tiny_model(args.folder / "model", tokenizer, args.seed, vocab_size=16)
    else:
        hybrid_model(args.family, tokenizer, args.seed).save_pretrained(args.folder / "model")
    held_out = task.make_rows(NUM_HELD_OUT, seed=10_000 + args.seed)
    taken = frozenset(row["prompt"] for row in held_out)
    write_rows(args.folder / "held_out.jsonl", held_out)
    write_rows(args.folder / "sft.jsonl", task.make_rows(NUM_SFT_ROWS, seed=20_000 + args.seed, exclude=taken))
    write_rows(args.folder / "train.jsonl", task.make_rows(NUM_RL_ROWS, seed=30_000 + args.seed, exclude=taken))


if __name__ == "__main__":
    main()
