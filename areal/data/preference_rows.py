"""Owns pairs: a prompt with a chosen and a rejected answer becomes two token rows, for reward models and DPO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from areal.api.errors import InputError
from areal.data.chat import checked_messages
from areal.data.sft import EncodedRow, encode_sft_row
from areal.data.tokenizer import Tokenizer

SIDES = ("chosen", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPair:
    """Two answers to one prompt; the masks mark what is the answer."""

    chosen: EncodedRow
    rejected: EncodedRow
    margin: float = 0.0
    """By how much the chosen one is better, in the units of whoever labelled the pair."""

    @property
    def num_tokens(self) -> int:
        return len(self.chosen.token_ids) + len(self.rejected.token_ids)

    def shortened(self, max_length: int, *, keep_end: bool) -> EncodedPair:
        """Each of the two with at most `max_length` tokens, of the end or of the beginning."""
        return EncodedPair(
            chosen=self.chosen.shortened(max_length, keep_end=keep_end),
            rejected=self.rejected.shortened(max_length, keep_end=keep_end),
            margin=self.margin,
        )

    @property
    def is_trainable(self) -> bool:
        """Whether there is still a difference to learn from after a cut."""
        differ = self.chosen.token_ids != self.rejected.token_ids
        return differ and self.chosen.is_trainable and self.rejected.is_trainable


def encode_pair(row: dict[str, Any], tokenizer: Tokenizer, *, use_margin: bool = False) -> EncodedPair:
    """The pair in the columns `chosen` and `rejected`, each one of:

    - text, the answer to `prompt` (text or messages) or to `messages`;
    - messages, the last by the assistant; those of `prompt` or `messages`, if any, come before them;
    - text without any prompt: the whole. What both begin with is then taken for the prompt.

    Prompt and answer are tokenised as in supervised fine-tuning. `use_margin` reads the column `margin`. InputError
    when a column is missing or of another type, or when both sides are the same.
    """
    first, second = (_side(row, name, tokenizer) for name in SIDES)
    if first.token_ids == second.token_ids:
        raise InputError("chosen and rejected are the same, which teaches nothing: leave such rows out by a map_fn")
    if not _has_prompt(row) and isinstance(row["chosen"], str):
        pairs = zip(first.token_ids, second.token_ids, strict=False)
        num_shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        first, second = (_masked_until(side, num_shared) for side in (first, second))
    margin = row.get("margin") if use_margin else 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise InputError(f"rw.use_margin needs a finite number in the column 'margin', and it holds {margin!r}")
    return EncodedPair(chosen=first, rejected=second, margin=float(margin))


def _has_prompt(row: dict[str, Any]) -> bool:
    return "prompt" in row or "messages" in row


def _side(row: dict[str, Any], name: str, tokenizer: Tokenizer) -> EncodedRow:
    value = row.get(name)
    given = row.get("messages", row.get("prompt"))
    before = checked_messages(given) if isinstance(given, list) else None
    if isinstance(value, list):
        if isinstance(given, str):
            raise InputError(f"column 'prompt' is text, but '{name}' is a list of messages: make both the same")
        messages = [*(before or []), *checked_messages(value)]
        if messages[-1]["role"] != "assistant":
            raise InputError(f"the messages in column '{name}' must end with one of the assistant")
        return encode_sft_row({"messages": messages}, tokenizer)
    if not isinstance(value, str):
        raise InputError(
            f"a row of type rw needs text or messages in the columns 'chosen' and 'rejected'; it has {sorted(row)}: "
            "name a map_fn that makes them (train_dataset.map_fn)"
        )
    if before is not None:
        # as a conversation that ends with the answer, also where `messages` end with an assistant's turn
        return encode_sft_row({"messages": [*before, {"role": "assistant", "content": value}]}, tokenizer)
    if given is not None:
        return encode_sft_row({"prompt": given, "answer": value}, tokenizer)
    end = tokenizer.eos_token_id
    ids = tokenizer.encode(value)
    ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
    return EncodedRow(token_ids=ids, loss_mask=[1] * len(ids))


def _masked_until(side: EncodedRow, place: int) -> EncodedRow:
    """The first `place` tokens are the prompt's."""
    return EncodedRow(token_ids=side.token_ids, loss_mask=[0] * place + side.loss_mask[place:])
