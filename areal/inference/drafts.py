"""Drafts of next tokens without a model: what followed the same tokens in a prompt, or in other answers to it.

A step computes the tokens of a draft together, and the sampler draws a token behind each of them with the random number
of its place. Those up to the first that differs from the draft are the answer: each has the distribution, the random
number and the log-probability that it has without a draft. No tensors.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

_CONTEXT = 16
"""Tokens of a match; longer matches count as matches of this length."""
_LONGEST = 15
"""Tokens of a draft."""
_PLACES = 8
"""Latest places that are compared for a pair of tokens."""
_KEPT_ANSWERS = 16
"""Of a prompt, for its next epoch."""
_KEPT_TOKENS = 1 << 24
"""Of all prompts, 64 MiB."""
_ANSWER_COST = 64
"""Tokens that the memory of an answer besides its tokens is worth."""
_KEYS = 1 << 18
"""Tokens and pairs of a history, which is cleared above this number."""
_DECAY = 0.98
_PROBE_PRICE = 0.04
"""At which drafts are tried: below the chance of any token, because the counts start at one of two."""
_PROBE_STEPS = 16, 1024
"""Steps without a draft until drafts are tried again: four times as many as long as they do not pay."""
_PLAIN_STEPS = 64
"""Steps with drafts until one without is timed."""


def num_accepted(draft: list[int], drawn: list[int]) -> int:
    """The tokens of a draft that were drawn: `drawn` begins with the token behind those before the draft."""
    return next((place for place, token in enumerate(draft) if token != drawn[place]), len(draft))


class History:
    """The tokens of a prompt and its answers, and the places where each token and each pair occur in them."""

    def __init__(self, earlier: Sequence[Sequence[int]]) -> None:
        self._places: dict[int | tuple[int, int], list[tuple[Sequence[int], int]]] = {}
        self._read: dict[int, tuple[Sequence[int], int]] = {id(tokens): (tokens, 0) for tokens in earlier}
        """Identity of a list that may have more tokens than are read -> the list, and the number of those."""
        self.num_growing = 0

    def add(self, tokens: list[int], num_known: int) -> None:
        """A list that grows, whose first tokens are in other lists."""
        self._read[id(tokens)] = tokens, num_known
        self.num_growing += 1

    def complete(self, tokens: list[int]) -> None:
        """A list does not grow any more."""
        self.catch_up()
        del self._read[id(tokens)]
        self.num_growing -= 1

    def catch_up(self) -> None:
        """Read what the lists have gained."""
        for key, (tokens, start) in self._read.items():
            for end in range(start + 1, len(tokens) + 1):
                self._note(tokens[end - 1], tokens, end)
                if end > 1:
                    self._note((tokens[end - 2], tokens[end - 1]), tokens, end)
            self._read[key] = tokens, len(tokens)

    def _note(self, key: int | tuple[int, int], tokens: Sequence[int], end: int) -> None:
        if len(self._places) > _KEYS:
            self._places.clear()
        places = self._places.setdefault(key, [])
        places.append((tokens, end))
        if len(places) > _PLACES:
            del places[0]

    def proposed(self, tokens: list[int]) -> tuple[list[int], int]:
        """What may follow `tokens`, and the length of the match; without one, ([], 0).

        It followed the longest match, the latest of several. Where it ends with the end of `tokens`, it is repeated.
        """
        source, start, longest = tokens, 0, 0
        for key in ((tokens[-2:][0], tokens[-1]), tokens[-1]):
            for other, end in reversed(self._places.get(key, ())):
                length = 1
                while length < min(_CONTEXT, end, len(tokens)) and other[end - length - 1] == tokens[-length - 1]:
                    length += 1
                if length > longest and end < len(other):
                    source, start, longest = other, end, length
            if longest:
                break
        draft = list(source[start : start + _LONGEST]) if longest else []
        while source is tokens and 0 < len(draft) < _LONGEST:
            draft.append(draft[len(draft) - (len(tokens) - start)])
        return draft, longest


@dataclass(slots=True)
class _Steps:
    """Measurements of the steps with about the same number of sequences. Sums decay."""

    plain_s: float = 0.0
    plain_count: float = 0.0
    extra_s: float = 0.0
    extra_rows: float = 0.0
    """What drafts added to steps."""
    tokens: float = 0.0
    seconds: float = 0.0
    """Of steps with drafts."""
    since_plain: int = 0
    since_drafts: int = 0
    interval: int = _PROBE_STEPS[0]


class Payoff:
    """Decides by measurement how many tokens of a draft are computed."""

    def __init__(self) -> None:
        self._trials, self._hits = [0.0] * (_CONTEXT + 1), [0.0] * (_CONTEXT + 1)
        """By the length of the match before a token. Sums which decay."""
        self._steps: dict[int, _Steps] = {}

    def price(self, count: int) -> float:
        """The tokens that the time of one more row is worth in a step of `count` sequences; above 1 none is."""
        steps = self._steps.setdefault(count.bit_length(), _Steps())
        if not steps.plain_count or steps.since_plain >= _PLAIN_STEPS:
            return 2.0
        if not steps.extra_rows or steps.since_drafts >= steps.interval:
            return _PROBE_PRICE
        rate = max(count * steps.plain_count / steps.plain_s, steps.tokens / steps.seconds)
        return max(0.0, steps.extra_s / steps.extra_rows) * rate

    def length(self, matched: int, price: float) -> int:
        """The tokens of a draft that are expected to be worth the price."""
        chance = 1.0
        for place in range(_LONGEST):
            known = min(matched + place, _CONTEXT)
            chance *= (self._hits[known] + 1.0) / (self._trials[known] + 2.0)
            if chance < price:
                return place
        return _LONGEST

    def note_draft(self, matched: int, length: int, accepted: int) -> None:
        for place in range(min(length, accepted + 1)):
            known = min(matched + place, _CONTEXT)
            self._trials[known] = self._trials[known] * _DECAY + 1.0
            self._hits[known] = self._hits[known] * _DECAY + (place < accepted)

    def note_step(self, count: int, num_drafted: int, num_tokens: int, seconds: float) -> None:
        """A step of `count` sequences, without prompts, has given `num_tokens` tokens."""
        steps = self._steps.setdefault(count.bit_length(), _Steps())
        if not num_drafted:
            steps.plain_s = steps.plain_s * _DECAY + seconds
            steps.plain_count = steps.plain_count * _DECAY + 1.0
            steps.since_plain = 0
            steps.since_drafts += 1
            return
        plain_s = steps.plain_s / steps.plain_count if steps.plain_count else seconds
        steps.extra_s = steps.extra_s * _DECAY + seconds - plain_s
        steps.extra_rows = steps.extra_rows * _DECAY + num_drafted
        steps.tokens = steps.tokens * _DECAY + num_tokens
        steps.seconds = steps.seconds * _DECAY + seconds
        does_pay = steps.tokens / steps.seconds > count / plain_s
        steps.interval = _PROBE_STEPS[0] if does_pay else min(4 * steps.interval, _PROBE_STEPS[1])
        steps.since_drafts = 0
        steps.since_plain += 1


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: list[int]
    num_prompt: int
    key: bytes
    history: History


def _cost(answers: Sequence[array[int]]) -> int:
    return sum(len(answer) + _ANSWER_COST for answer in answers)


class Drafts:
    """The drafts of a server. It keeps the last answers of prompts for their next epoch."""

    def __init__(self) -> None:
        self.payoff = Payoff()
        self._answers: dict[int, _Answer] = {}
        """Identity of a token list -> the answer."""
        self._histories: dict[bytes, History] = {}
        """Of the prompts that have running answers."""
        self._earlier: OrderedDict[bytes, list[array[int]]] = OrderedDict()
        self._num_kept = 0

    def begin(self, tokens: list[int], num_prompt: int) -> None:
        """An answer starts, perhaps again: `tokens` begins with the prompt and grows."""
        if id(tokens) in self._answers:
            return
        prompt = array("i", tokens[:num_prompt])
        key = blake2b(prompt.tobytes(), digest_size=16).digest()
        history = self._histories.get(key)
        if history is None:
            earlier = self._earlier.pop(key, [])
            self._num_kept -= _cost(earlier)
            history = self._histories[key] = History([*earlier, prompt])
        history.add(tokens, num_prompt)
        self._answers[id(tokens)] = _Answer(tokens, num_prompt, key, history)

    def end(self, tokens: list[int], *, is_sound: bool) -> None:
        """An answer has ended. No effect when it has not started. `is_sound`: it may be a draft of later ones."""
        answer = self._answers.pop(id(tokens), None)
        if answer is None:
            return
        if is_sound and len(tokens) > answer.num_prompt:
            kept = self._earlier.setdefault(answer.key, [])
            self._earlier.move_to_end(answer.key)
            kept.append(array("i", tokens[answer.num_prompt :]))
            self._num_kept += _cost(kept[-1:])
            if len(kept) > _KEPT_ANSWERS:
                self._num_kept -= _cost([kept.pop(0)])
            while self._num_kept > _KEPT_TOKENS:
                self._num_kept -= _cost(self._earlier.popitem(last=False)[1])
        answer.history.complete(tokens)
        if not answer.history.num_growing:
            del self._histories[answer.key]

    def proposed(self, tokens: list[int], price: float) -> tuple[list[int], int]:
        """The draft that is worth the price, and the length of its match."""
        history = self._answers[id(tokens)].history
        history.catch_up()
        draft, matched = history.proposed(tokens)
        return draft[: self.payoff.length(matched, price)], matched
