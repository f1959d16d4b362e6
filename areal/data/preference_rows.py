"""Preference pairs for reward models and DPO: a prompt with a chosen and a rejected answer as two token rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from areal.api.errors import InputError
from areal.data.chat import checked_messages, has_images
from areal.data.sft_rows import EncodedRow, encode_sft_row
from areal.data.tokenizer import Tokenizer

SIDES = ("chosen", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPair:
    """Two answers to one prompt; the loss masks select the answers."""

    chosen: EncodedRow
    rejected: EncodedRow
    margin: float = 0.0
    """How much better the chosen answer is, in the units of the dataset."""

    @property
    def num_tokens(self) -> int:
        return len(self.chosen.token_ids) + len(self.rejected.token_ids)

    @property
    def max_length(self) -> int:
        """Tokens of the longer side."""
        return max(len(self.chosen.token_ids), len(self.rejected.token_ids))

    def shortened(self, max_length: int, *, keep_end: bool) -> EncodedPair:
        """Keep at most `max_length` tokens of each answer, from the end or from the beginning."""
        return EncodedPair(
            chosen=self.chosen.shortened(max_length, keep_end=keep_end),
            rejected=self.rejected.shortened(max_length, keep_end=keep_end),
            margin=self.margin,
        )

    @property
    def is_trainable(self) -> bool:
        """Whether the two sides differ and each has a trained token, for example after truncation."""
        differ = self.chosen.token_ids != self.rejected.token_ids
        return differ and self.chosen.is_trainable and self.rejected.is_trainable


def encode_pair(
    row: dict[str, Any], tokenizer: Tokenizer, *, use_margin: bool = False, image_key: str = "images"
) -> EncodedPair:
    """Encode the pair in the columns `chosen` and `rejected`. Each column contains one of:

    - text: the answer to `prompt` (text or messages) or to `messages`;
    - messages that end with the assistant; those of `prompt` or `messages`, if any, precede them;
    - text without a prompt column: prompt and answer together. The common prefix of both sides is the prompt.

    Prompt and answer are tokenised as in supervised fine-tuning. `use_margin` reads the column `margin`. Raises
    InputError when a column is missing or has another type, when both sides are equal, and for a row with images
    (column `image_key`, or a part of a message), which only types sft and rl take.
    """
    if has_images(row, image_key):
        text = f"a row of type rw has images (column {image_key!r}, or a part of a message)"
        raise InputError(f"{text}: only rows of types sft and rl may; drop them", code="data.invalid_column")
    first, second = (_side(row, name, tokenizer) for name in SIDES)
    if first.token_ids == second.token_ids:
        message = "chosen and rejected are equal: drop such rows with a map_fn"
        raise InputError(message, code="data.invalid_column")
    if "prompt" not in row and "messages" not in row and isinstance(row["chosen"], str):
        pairs = zip(first.token_ids, second.token_ids, strict=False)
        num_shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        first, second = (_masked_until(side, num_shared) for side in (first, second))
    margin = row.get("margin") if use_margin else 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        message = f"rw.use_margin needs a finite number in the column 'margin', which contains {margin!r}"
        raise InputError(message, code="data.invalid_column")
    return EncodedPair(chosen=first, rejected=second, margin=float(margin))


def _side(row: dict[str, Any], name: str, tokenizer: Tokenizer) -> EncodedRow:
    value = row.get(name)
    given = row.get("messages", row.get("prompt"))
    before = checked_messages(given) if isinstance(given, list) else None
    if isinstance(value, list):
        if isinstance(given, str):
            message = f"column 'prompt' is text, but '{name}' is a list of messages: use the same type for both"
            raise InputError(message, code="data.invalid_column")
        messages = [*(before or []), *checked_messages(value)]
        if messages[-1]["role"] != "assistant":
            message = f"the last message in column '{name}' must have the role assistant"
            raise InputError(message, code="data.invalid_column")
        return encode_sft_row({"messages": messages}, tokenizer)
    if not isinstance(value, str):
        message = f"a row of type rw needs the columns 'chosen' and 'rejected', not {sorted(row)}: set a map_fn"
        raise InputError(message, code="data.missing_column")
    if before is not None:
        # a conversation that ends with the answer, even if `messages` end with an assistant's turn
        return encode_sft_row({"messages": [*before, {"role": "assistant", "content": value}]}, tokenizer)
    if given is not None:
        return encode_sft_row({"prompt": given, "answer": value}, tokenizer)
    end = tokenizer.eos_token_id
    ids = tokenizer.encode(value)
    ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
    return EncodedRow(token_ids=ids, loss_mask=[1] * len(ids))


def _masked_until(side: EncodedRow, place: int) -> EncodedRow:
    """Mask the first `place` tokens, which are the prompt."""
    return EncodedRow(token_ids=side.token_ids, loss_mask=[0] * place + side.loss_mask[place:])
