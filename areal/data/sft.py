"""Owns rows of supervised fine-tuning: a prompt and its answer, or a conversation, become token ids and a loss mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal.api.errors import InputError
from areal.data.chat import checked_messages, encode_prompt, render_chat, tokens_after_answer
from areal.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """One training text. Token aligned."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 on the tokens to learn: an answer and its end token, unless the options say otherwise."""

    def shortened(self, max_length: int, *, keep_end: bool) -> EncodedRow:
        """At most `max_length` tokens, of the end or of the beginning."""
        part = slice(-max_length, None) if keep_end else slice(max_length)
        return EncodedRow(token_ids=self.token_ids[part], loss_mask=self.loss_mask[part])

    @property
    def is_trainable(self) -> bool:
        """Whether something can be learned from it. Nothing predicts the first token."""
        return any(self.loss_mask[1:])


def encode_sft_row(row: dict[str, Any], tokenizer: Tokenizer, *, train_on: str = "last") -> EncodedRow:
    """Token ids and mask of a row: `prompt` and `answer`, or `messages` (and `answer` when no assistant ends them).

    Prompt and answer are tokenised apart, as they meet in a rollout. The answer ends with the end token, and nothing
    the template writes after it is kept. `train_on` is sft.train_on: last, assistant or all.
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
    if train_on == "assistant" and "messages" in prompt_row:
        return _every_answer([*prompt_row["messages"], {"role": "assistant", "content": answer}], tokenizer)
    prompt_ids = encode_prompt(prompt_row, tokenizer).token_ids
    answer_ids = _answer_ids(prompt_row, answer, tokenizer)
    learned = 1 if train_on == "all" else 0
    return EncodedRow(token_ids=prompt_ids + answer_ids, loss_mask=[learned] * len(prompt_ids) + [1] * len(answer_ids))


def _every_answer(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> EncodedRow:
    """A conversation as it goes on turn by turn: no answer's tokens depend on what follows, all of them are learned.

    A template that shows past answers in another way than it asks for new ones therefore does no harm.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    token_ids = encode_prompt({"messages": messages[: answers[0]]}, tokenizer).token_ids
    loss_mask = [0] * len(token_ids)
    for index, following in zip(answers, [*answers[1:], None], strict=True):
        content = messages[index]["content"]
        if not isinstance(content, str):
            raise InputError("a message of the assistant has no text to learn: leave such rows out (map_fn)")
        answer_ids = _answer_ids({"messages": messages[:index]}, content, tokenizer)
        token_ids, loss_mask = token_ids + answer_ids, loss_mask + [1] * len(answer_ids)
        if following is not None:
            between = tokens_after_answer(tokenizer, messages[index + 1 : following])
            if between[:1] == answer_ids[-1:]:  # the end token stands in both
                between = between[1:]
            token_ids, loss_mask = token_ids + between, loss_mask + [0] * len(between)
    return EncodedRow(token_ids=token_ids, loss_mask=loss_mask)


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
