"""Stop strings that began in an earlier part of an answer end it where the unbroken answer would have ended."""

from __future__ import annotations

from typing import Any

import pytest

from areal.fleet.adapters import BoundaryGate
from areal.fleet.replica import PartChunk
from tests.fleet.generation_parts import PROMPT, a_part


def ended_after(prior: str, new: str, stop: str, **changes: Any) -> int | None:
    """How many of the new letters, which are tokens, are passed on before the answer ends; None when it goes on."""
    part = a_part(
        20,
        input_ids=PROMPT + [ord(letter) for letter in prior],
        num_prior_output_tokens=len(prior),
        stop=[stop],
        **changes,
    )
    passed_on: list[PartChunk] = []
    gate = BoundaryGate(part, passed_on.append)
    for letter in new:
        gate.take(PartChunk([ord(letter)], [-1.0], [0], None))
    texts = ["".join(map(chr, token_ids)) for token_ids in gate.token_lists()]
    if not gate.settle(texts):
        assert [token for chunk in passed_on for token in chunk.token_ids] == [ord(letter) for letter in new]
        return None
    return len(passed_on[-1].token_ids)


@pytest.mark.parametrize(
    ("prior", "new", "stop", "expected"),
    [("abc", "def", "cd", 1), ("abc", "def", "bcde", 2), ("abc", "def", "xy", None), ("abc", "cde", "ab", None)],
)
def test_a_stop_string_ends_at_the_token_that_completes_it(
    prior: str, new: str, stop: str, expected: int | None
) -> None:
    assert ended_after(prior, new, stop) == expected


def test_a_stop_string_within_min_new_tokens_does_not_count_later() -> None:
    assert ended_after("ab", "cdef", "ab") is None
    assert ended_after("xab", "abcd", "ab") == 2  # it counts when it comes again


def test_a_stop_string_does_not_end_an_answer_below_min_new_tokens() -> None:
    assert ended_after("abc", "def", "cd", min_new_tokens=2) is None
    assert ended_after("abc", "def", "cde", min_new_tokens=2) == 2
