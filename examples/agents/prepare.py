"""Writes the files of the agent examples: a small tokenizer with a chat template, a random model, the data. No network.

python examples/agents/prepare.py FOLDER [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIALS = ["<pad>", "<|end|>", "<unk>", "<|tools|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CALL = '{"name": "calculator", "arguments": {"expression": "'
PIECES = ["<tool_call>", "</tool_call>", CALL, '"}}', "What is ", "calculator"]
"""Texts of one token each; all others are single characters."""
TEMPLATE = """
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set given = call.function.arguments %}
{%- set arguments = given if given is string else given | tojson %}
{#- #}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ arguments }}}</tool_call>
{%- endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
NUM_WARM_UP, NUM_TRAIN, NUM_HELD_OUT = 240 * 128, 4096, 128
CALLS_ONE_IN = 5
"""Of the warm-up rows with a question, one in this number calls the calculator. The others guess."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character, except for SPECIALS and PIECES."""
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    texts = [*SPECIALS, *PIECES, *characters]
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token="<unk>"))
    pattern = "|".join(re.escape(piece) for piece in PIECES) + r"|[\s\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=SPECIALS[3:],
        chat_template=TEMPLATE,
        model_max_length=128,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """2 layers of width 64."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.1,  # so that copying is learned in the warm-up
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def questions(count: int, seed: int) -> list[dict[str, str]]:
    """Products of two numbers of two digits."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(32, 100), rng.randrange(32, 100)) for _ in range(count)]
    return [{"question": f"What is {one}*{other}?", "answer": str(one * other)} for one, other in pairs]


def warm_up_rows(count: int, seed: int) -> list[dict[str, str]]:
    """The form of dialogues: a third guesses or calls, a third completes a call, a third repeats the result of one."""
    rng = random.Random(seed)
    rows: list[dict[str, str]] = []
    for index, row in enumerate(questions(count, seed)):
        asked = f"<|tools|>calculator <|end|><|user|>{row['question']}<|end|><|assistant|>"
        expression = row["question"].removeprefix("What is ").removesuffix("?")
        call = f'{CALL}{expression}"}}}}</tool_call>'
        if index % 3 == 0:
            answered = f"{asked}<tool_call>{call}<|end|><|tool|>{row['answer']}<|end|><|assistant|>"
            rows.append({"prompt": answered, "answer": row["answer"]})
        elif index % 3 == 1:
            rows.append({"prompt": f"{asked}<tool_call>", "answer": call})
        elif rng.randrange(CALLS_ONE_IN):
            rows.append({"prompt": asked, "answer": str(rng.randrange(1000, 10_000))})
        else:
            rows.append({"prompt": asked, "answer": f"<tool_call>{call}"})
    return rows


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
    write_rows(args.folder / "warm_up.jsonl", warm_up_rows(NUM_WARM_UP, args.seed + 1))
    write_rows(args.folder / "train.jsonl", questions(NUM_TRAIN, args.seed + 2))
    write_rows(args.folder / "held_out.jsonl", questions(NUM_HELD_OUT, args.seed + 3))


if __name__ == "__main__":
    main()
