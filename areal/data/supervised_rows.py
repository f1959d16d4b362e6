"""Rows of supervised fine-tuning: a prompt with its answer, or a conversation, as token ids and loss mask."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from areal.api.errors import InputError
from areal.data.chat import ChatTemplate, checked_messages, encode_prompt, has_images, render_chat, tail_ids
from areal.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from areal.data.images import PromptImages, RowImage


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """One training text. The mask is aligned with the tokens."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 = train on this token: by default those of the answer and its end token."""
    images: tuple[RowImage, ...] = ()

    def shortened(self, max_length: int, *, keep_end: bool) -> EncodedRow:
        """Keep at most `max_length` tokens, from the end or from the beginning. InputError for a row with images."""
        if self.images:
            text = f"a row with {len(self.images)} images has {self.num_tokens} tokens, and images cannot be cut"
            raise InputError(f"{text}: raise max_length, or use truncation=drop", code="data.too_long")
        part = slice(-max_length, None) if keep_end else slice(max_length)
        return EncodedRow(token_ids=self.token_ids[part], loss_mask=self.loss_mask[part])

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    max_length = num_tokens  # as of a pair, whose longer side counts

    @property
    def is_trainable(self) -> bool:
        """Whether a token is trained on. No position predicts the first token."""
        return any(self.loss_mask[1:])


def encode_sft_row(
    row: dict[str, Any],
    tokenizer: Tokenizer,
    *,
    train_on: str = "last",
    images: PromptImages | None = None,
    image_key: str = "images",
) -> EncodedRow:
    """Encode a row: `prompt` and `answer`, or `messages` (and `answer` unless the assistant's message is last).

    Prompt and answer are tokenised separately, as in a rollout. The answer ends with the end token; text that the
    template writes after it is dropped. `train_on` is sft.train_on: last, assistant or all. `images`: how the model
    takes the images of the row, which are in its column `image_key`; None for a model of text. Raises InputError.
    """
    if images is None:
        if has_images(row, image_key):
            text = f"a row has images (column {image_key!r}, or a part of a message), and the model takes text alone"
            raise InputError(f"{text}: drop them, or train a vision-language model", code="model.image_processor")
        return _encoded(row, tokenizer, train_on)
    if "messages" in row:
        checked_messages(row["messages"])
    placed, found = images.placed(row)
    one = _encoded(placed, tokenizer, train_on)
    mask = images.expanded_mask(one.token_ids, one.loss_mask, found)
    return EncodedRow(token_ids=images.expanded(one.token_ids, found), loss_mask=mask, images=found)


def _encoded(row: dict[str, Any], tokenizer: Tokenizer, train_on: str) -> EncodedRow:
    """The tokens of a row, with one placeholder for each image."""
    prompt_row, answer = row, row.get("answer")
    if "messages" in row:
        messages = checked_messages(row["messages"])
        if messages[-1]["role"] == "assistant":
            prompt_row, answer = {**row, "messages": messages[:-1]}, messages[-1]["content"]
    if not isinstance(answer, str):
        message = f"a row of type sft needs text in 'answer' or a last message of the assistant, not {sorted(row)}"
        raise InputError(f"{message}: set a map_fn", code="data.missing_column")
    if train_on == "assistant" and "messages" in prompt_row:
        return _every_answer([*prompt_row["messages"], {"role": "assistant", "content": answer}], tokenizer)
    prompt_ids = list(encode_prompt(prompt_row, tokenizer).token_ids)
    answer_ids = _answer_ids(prompt_row, answer, tokenizer)
    learned = 1 if train_on == "all" else 0
    return EncodedRow(token_ids=prompt_ids + answer_ids, loss_mask=[learned] * len(prompt_ids) + [1] * len(answer_ids))


def _every_answer(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> EncodedRow:
    """Encode a conversation turn by turn and train on every answer. No answer's tokens depend on later turns.

    This also holds for templates that render past answers differently from new ones.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    token_ids = list(encode_prompt({"messages": messages[: answers[0]]}, tokenizer).token_ids)
    loss_mask = [0] * len(token_ids)
    template = ChatTemplate(tokenizer)
    for index, following in zip(answers, [*answers[1:], None], strict=True):
        content = messages[index]["content"]
        if not isinstance(content, str):
            message = "a message of the assistant has no text: drop such rows with a map_fn"
            raise InputError(message, code="data.invalid_column")
        answer_ids = _answer_ids({"messages": messages[:index]}, content, tokenizer)
        token_ids, loss_mask = token_ids + answer_ids, loss_mask + [1] * len(answer_ids)
        if following is not None:
            between = tail_ids(template, messages[: index + 1], messages[index + 1 : following])
            if between[:1] == answer_ids[-1:]:  # both contain the end token
                between = between[1:]
            token_ids, loss_mask = token_ids + between, loss_mask + [0] * len(between)
    return EncodedRow(token_ids=token_ids, loss_mask=loss_mask)


def _answer_ids(prompt_row: dict[str, Any], answer: str, tokenizer: Tokenizer) -> list[int]:
    end = tokenizer.eos_token_id
    text = answer
    if "messages" in prompt_row:
        messages = prompt_row["messages"]
        prompt = render_chat(tokenizer, messages, add_generation_prompt=True, enable_thinking=False)
        turns = [*messages, {"role": "assistant", "content": answer}]
        whole = render_chat(tokenizer, turns, add_generation_prompt=False, enable_thinking=False)
        if whole.startswith(prompt):  # else the template renders past answers differently
            text = whole[len(prompt) :]
    ids = tokenizer.encode(text, add_special_tokens=False)
    if end is None:
        return ids
    return [*ids[: ids.index(end)], end] if end in ids else [*ids, end]


# ----------------------------------------------------------------------------------------------------------------------
# Preference pairs for reward models and DPO: a prompt with a chosen and a rejected answer as two token rows.

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
