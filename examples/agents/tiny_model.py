"""A tokenizer with a chat template and a random model, small enough to learn on a laptop. No network."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIALS = ["<pad>", "<|end|>", "<unk>", "<|tools|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = """
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set given = call.function.arguments %}
{%- set arguments = given if given is string else given | tojson %}
{#- #}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ arguments }}}</tool_call>
{%- endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def build_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """A token per character, except for special tokens and `pieces`, each of which is one token."""
    pieces = ["<tool_call>", "</tool_call>", *pieces]
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    texts = [*SPECIALS, *pieces, *characters]
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token="<unk>"))
    pattern = "|".join(re.escape(piece) for piece in pieces) + r"|[\s\S]"
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
