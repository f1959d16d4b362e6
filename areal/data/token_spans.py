"""How the tokens of two tokenizers for one text correspond: by the spans of text at whose ends both have a border.

Pure. A token that ends inside a character, or has no text, has no border of its own: it belongs to the span of the
token that follows.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # The end of a text whose last token ends inside a character.


class Decoder(Protocol):
    """The part of a tokenizer that finds the text of tokens."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class Pieces(NamedTuple):
    """A text and the borders of its tokens."""

    text: str
    ends: dict[int, int]
    """Number of characters -> number of tokens up to there. The last one is the whole text with all tokens."""


class Span(NamedTuple):
    """The same characters in the tokens of both tokenizers."""

    tokens: slice
    other_tokens: slice


def pieces_of(tokenizer: Decoder, token_ids: Sequence[int]) -> Pieces:
    """The text of tokens and its borders. A token is decoded after the one before it: tokenizers drop the space of the
    first token of a text."""
    ids, text, ends = list(token_ids), "", dict[int, int]()
    context = start = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[context:start], skip_special_tokens=True)
        both = tokenizer.decode(ids[context:end], skip_special_tokens=True)
        if len(both) <= len(before) or (both.endswith(_BROKEN) and end < len(ids)):
            continue
        text += both[len(before) :]
        ends[len(text)] = end
        context, start = start, end
    if ids:
        ends[len(text)] = len(ids)
    return Pieces(text, ends)


def common_spans(pieces: Pieces, other: Pieces) -> list[Span]:
    """The shortest spans of text that are whole tokens of both, in order; one span when the texts differ.

    A tokenizer that changes the text, for example by another form of Unicode, has no borders that could be compared.
    """
    ends, other_ends = pieces.ends, other.ends
    if pieces.text != other.text:
        ends, other_ends = {0: max(ends.values(), default=0)}, {0: max(other_ends.values(), default=0)}
    spans, first, other_first = list[Span](), 0, 0
    for border in sorted(ends.keys() & other_ends.keys()):
        last, other_last = ends[border], other_ends[border]
        spans.append(Span(slice(first, last), slice(other_first, other_last)))
        first, other_first = last, other_last
    return spans


def spread(spans: Sequence[Span], other_logprobs: Sequence[float], own_logprobs: Sequence[float]) -> list[float]:
    """The log-probability that the other model gives to each span, in equal parts on the tokens of the span.

    The sum over a span of this minus the log-probabilities of its tokens is the log-ratio of both models for its text.
    other_logprobs, own_logprobs: one for each token, in nats -> one for each own token, that in no span unchanged.
    """
    parts = list(own_logprobs)
    for tokens, other_tokens in spans:
        count = tokens.stop - tokens.start
        if count:
            parts[tokens] = [sum(other_logprobs[other_tokens]) / count] * count
    return parts
