"""Writes the files of the quickstart: a character tokenizer, a random Qwen2-style model, the data. No network.

python examples/quickstart/prepare.py FOLDER [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import task
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

NUM_SFT_ROWS = 55 * 256
NUM_RL_ROWS = 8192
NUM_HELD_OUT = 256


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: index for index, token in enumerate([*task.SPECIALS, *task.CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """2 layers of width 64, 2 heads of 32, so that vLLM can serve the same checkpoint."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model/ and the .jsonl files are written")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(args.folder / "model")
    build_model(tokenizer, args.seed).save_pretrained(args.folder / "model")
    held_out = task.make_rows(NUM_HELD_OUT, seed=10_000 + args.seed)
    taken = frozenset(row["prompt"] for row in held_out)
    write_rows(args.folder / "held_out.jsonl", held_out)
    write_rows(args.folder / "sft.jsonl", task.make_rows(NUM_SFT_ROWS, seed=20_000 + args.seed, exclude=taken))
    write_rows(args.folder / "train.jsonl", task.make_rows(NUM_RL_ROWS, seed=30_000 + args.seed, exclude=taken))


if __name__ == "__main__":
    main()
