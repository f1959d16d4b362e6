"""Rows of supervised fine-tuning: a prompt with its answer, or a conversation, as token ids and loss mask."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from areal.api.errors import InputError
from areal.data.chat import checked_messages, has_images, plain_ids, tools_of
from areal.data.chat_template import DialogueTemplate, dialogue_template, plain_spans, stop_token_ids
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

    The column `tools` has the JSON schemas that the template shows.

    An answer is what the policy should write after the prompt of a rollout: reasoning, content and calls as the chat
    template writes them, and the end token that servers stop at. Text of messages and answers that looks like a control
    token is plain text. `train_on` is sft.train_on: last, assistant or all. `images`: how the model takes the images of
    the row, which are in its column `image_key`; None for a model of text. Raises InputError.
    """
    if "messages" in row:
        row = {**row, "messages": checked_messages(row["messages"])}
    if images is None:
        if has_images(row, image_key):
            text = f"a row has images (column {image_key!r}, or a part of a message), and the model takes text alone"
            raise InputError(f"{text}: drop them, or train a vision-language model", code="model.image_processor")
        return _encoded(row, tokenizer, train_on)
    placed, row_images = images.placed(row)
    encoded = _encoded(placed, tokenizer, train_on)
    mask = images.expanded_mask(encoded.token_ids, encoded.loss_mask, row_images)
    return EncodedRow(token_ids=images.expanded(encoded.token_ids, row_images), loss_mask=mask, images=row_images)


def _encoded(row: dict[str, Any], tokenizer: Tokenizer, train_on: str) -> EncodedRow:
    """The tokens of a row, with one placeholder for each image."""
    if "messages" in row:
        encoded = _dialogue(_with_answer(row), tools_of(row), dialogue_template(tokenizer), train_on == "assistant")
    else:
        prompt, answer = row.get("prompt"), row.get("answer")
        if not isinstance(prompt, str) or not isinstance(answer, str):
            message = f"a row of type sft needs text in 'prompt' and 'answer', or 'messages', not {sorted(row)}"
            raise InputError(f"{message}: set a map_fn", code="data.missing_column")
        encoded = _plain(prompt, answer, tokenizer)
    if train_on == "all":
        return EncodedRow(token_ids=encoded.token_ids, loss_mask=[1] * encoded.num_tokens)
    return encoded


def _with_answer(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages, answer = row["messages"], row.get("answer")
    if messages[-1]["role"] == "assistant":
        return messages
    if not isinstance(answer, str):
        message = (
            f"a row of type sft ends with a message of the role {messages[-1]['role']} and has no text in 'answer'"
        )
        raise InputError(f"{message}: remove what follows the last answer with a map_fn", code="data.missing_column")
    return [*messages, {"role": "assistant", "content": answer}]


def _plain(prompt: str, answer: str, tokenizer: Tokenizer) -> EncodedRow:
    """Prompt and answer as text. The answer ends with the end token that it has or the prompt uses, or with that of the
    tokenizer."""
    ends = _ends(tokenizer)
    text = answer.rstrip()
    end = next((end for end in ends if text.endswith(end)), None)
    if end is not None:
        answer = text.removesuffix(end)
    else:
        end = next((end for end in ends if end in prompt), next(iter(ends), None))
    prompt_ids = plain_ids(tokenizer, prompt)
    if not prompt_ids:
        raise InputError("the prompt of a row is empty: drop such rows with a map_fn", code="data.invalid_column")
    answer_ids = plain_spans(tokenizer).text_ids(answer) if answer else []
    answer_ids += [] if end is None else [ends[end]]
    return EncodedRow(token_ids=prompt_ids + answer_ids, loss_mask=[0] * len(prompt_ids) + [1] * len(answer_ids))


def _ends(tokenizer: Tokenizer) -> dict[str, int]:
    """Texts and ids of the tokens that end an answer, that of the tokenizer first."""
    first = tokenizer.eos_token_id
    ids = sorted(stop_token_ids(tokenizer), key=lambda token: (token != first, token))
    return {tokenizer.decode([token]): token for token in ids}


def _dialogue(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: DialogueTemplate, every_answer: bool
) -> EncodedRow:
    """The last answer, or every one, after what precedes it in a rollout. No answer's tokens depend on later turns.

    This also holds for templates that render past answers differently from new ones. An answer before the first message
    of the user is context.
    """
    asked = next((place for place, message in enumerate(messages) if message["role"] == "user"), 0)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place > asked]
    if not places:
        message = "a dialogue has an answer and nothing before it: begin it with a message of the user"
        raise InputError(message, code="data.invalid_column")
    template.require_shown(messages, tools)
    places = places if every_answer else places[-1:]
    token_ids, loss_mask = list[int](), list[int]()
    before = 0  # The messages that `token_ids` have.
    for place in places:
        answered = template.answered(messages[: place + 1], tools, with_prompt=not token_ids)
        fixed = answered.prompt_ids
        if token_ids:
            fixed = template.after(messages[:before], messages[before:place], tools, following=answered)
            if token_ids[-1] in template.stop_token_ids and fixed[0] != token_ids[-1]:
                token_ids, loss_mask = token_ids[:-1], loss_mask[:-1]  # another end inside the dialogue
            elif token_ids[-1] == fixed[0]:
                fixed = fixed[1:]
        token_ids += [*fixed, *answered.answer_ids, answered.end_id]
        loss_mask += [*[0] * len(fixed), *[1] * (len(answered.answer_ids) + 1)]
        before = place + 1
    return EncodedRow(token_ids=token_ids, loss_mask=loss_mask)


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
        first, second = (  # the tokens that they share are the prompt
            EncodedRow(token_ids=side.token_ids, loss_mask=[0] * num_shared + side.loss_mask[num_shared:])
            for side in (first, second)
        )
    margin = row.get("margin") if use_margin else 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        message = f"rw.use_margin needs a finite number in the column 'margin', which contains {margin!r}"
        raise InputError(message, code="data.invalid_column")
    return EncodedPair(chosen=first, rejected=second, margin=float(margin))


def _side(row: dict[str, Any], name: str, tokenizer: Tokenizer) -> EncodedRow:
    value, tools = row.get(name), {"tools": row.get("tools")}
    written = row.get("messages", row.get("prompt"))
    before = written if isinstance(written, list) else None
    if isinstance(value, list):
        if isinstance(written, str):
            message = f"column 'prompt' is text, but '{name}' is a list of messages: use the same type for both"
            raise InputError(message, code="data.invalid_column")
        if checked_messages(value, name)[-1]["role"] != "assistant":
            message = f"the last message in column '{name}' must have the role assistant"
            raise InputError(message, code="data.invalid_column")
        return encode_sft_row({"messages": [*(before or []), *value], **tools}, tokenizer)
    if not isinstance(value, str):
        message = f"a row of type rw needs the columns 'chosen' and 'rejected', not {sorted(row)}: set a map_fn"
        raise InputError(message, code="data.missing_column")
    if before is not None:
        # a conversation that ends with the answer, even if `messages` end with an assistant's turn
        return encode_sft_row({"messages": [*before, {"role": "assistant", "content": value}], **tools}, tokenizer)
    if written is not None:
        return encode_sft_row({"prompt": written, "answer": value}, tokenizer)
    ends = _ends(tokenizer)
    end = next((end for end in ends if value.rstrip().endswith(end)), None)
    ids = plain_ids(tokenizer, value if end is None else value.rstrip())
    if end is None:  # the end that the text uses, or that of the tokenizer
        ids += [ends[end] for end in [*(end for end in ends if end in value), *ends][:1]]
    return EncodedRow(token_ids=ids, loss_mask=[1] * len(ids))
