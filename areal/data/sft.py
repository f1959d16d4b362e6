"""Owns rows of supervised fine-tuning: a prompt and its answer become token ids and a loss mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal.api.errors import InputError
from areal.data.chat import checked_messages, encode_prompt, render_chat
from areal.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """One training text. Token aligned."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 on the answer and its end token, 0 on the prompt."""


def encode_sft_row(row: dict[str, Any], tokenizer: Tokenizer) -> EncodedRow:
    """Token ids and mask of a row: `prompt` and `answer`, or `messages` (and `answer` when no assistant ends them).

    Prompt and answer are tokenised apart, as they meet in a rollout. The answer ends with the end token, and nothing
    the template writes after it is kept.
    """
    prompt_row, answer = row, row.get("answer")
    if "messages" in row:
        messages = checked_messages(row["messages"])
        if messages[-1]["role"] == "assistant":
            prompt_row, answer = {**row, "messages": messages[:-1]}, messages[-1]["content"]
    if not isinstance(answer, str):
        raise InputError(
            f"a row of type sft needs text in the column 'answer' or a last message of the assistant; it has "
            f"{sorted(row)}: name a map_fn that makes one (train_dataset.map_fn), or use type=rl"
        )
    prompt_ids = encode_prompt(prompt_row, tokenizer).token_ids
    answer_ids = _answer_ids(prompt_row, answer, tokenizer)
    return EncodedRow(token_ids=prompt_ids + answer_ids, loss_mask=[0] * len(prompt_ids) + [1] * len(answer_ids))


def _answer_ids(prompt_row: dict[str, Any], answer: str, tokenizer: Tokenizer) -> list[int]:
    end = tokenizer.eos_token_id
    text = answer
    if "messages" in prompt_row:
        messages = prompt_row["messages"]
        prompt = render_chat(tokenizer, messages, add_generation_prompt=True, enable_thinking=False)
        whole = render_chat(
            tokenizer,
            [*messages, {"role": "assistant", "content": answer}],
            add_generation_prompt=False,
            enable_thinking=False,
        )
        if whole.startswith(prompt):  # else the template shows past answers in another way than it asks for new ones
            text = whole[len(prompt) :]
    ids = tokenizer.encode(text, add_special_tokens=False)
    if end is None:
        return ids
    return [*ids[: ids.index(end)], end] if end in ids else [*ids, end]
