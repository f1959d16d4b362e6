"""A tokenizer with a chat template and a random model, small enough to learn on a laptop. No network."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from areal.data.tiny_model import character_tokenizer, tiny_model

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


def build_tokenizer(pieces: Sequence[str]) -> Any:
    """A token per character, except for special tokens and `pieces`, each of which is one token."""
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    tokens = [*SPECIALS, "<tool_call>", "</tool_call>", *pieces, *characters]
    return character_tokenizer(tokens, end="<|end|>", context_length=128, chat_template=TEMPLATE)


def build_model(tokenizer: Any, seed: int) -> Any:
    """2 layers of width 64. With a larger range of initial values, copying is learned in the warm-up."""
    return tiny_model(tokenizer, seed, num_heads=8, initializer_range=0.1)
