"""Stop strings that began in an earlier part of an answer end it where the unbroken answer would have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from areal.fleet.adapters import Parts, ended_by_stops
from areal.fleet.replica import PartChunk
from tests.fleet.generation_parts import PROMPT, a_part


async def ended_after(prior: str, new: str, stop: str, **changes: Any) -> int | None:
    """How many of the new letters, which are tokens, are passed on before the answer ends; None when it continues."""
    input_ids = PROMPT + [ord(letter) for letter in prior]
    part = a_part(20, input_ids=input_ids, num_prior_output_tokens=len(prior), stop=[stop], **changes)

    async def letters() -> Parts:
        for letter in new:
            yield PartChunk([ord(letter)], [-1.0], [0], None)

    async def to_texts(lists: list[Sequence[int]]) -> list[str]:
        return ["".join(map(chr, token_ids)) for token_ids in lists]

    passed_on = [chunk async for chunk in ended_by_stops(part, letters(), to_texts)]
    token_ids = [token for chunk in passed_on for token in chunk.token_ids]
    assert token_ids == [ord(letter) for letter in new][: len(token_ids)]
    return len(token_ids) if passed_on[-1].finish_reason == "stop" else None


@pytest.mark.parametrize(
    ("prior", "new", "stop", "changes", "expected"),
    [
        ("abc", "def", "cd", {}, 1),
        ("abc", "def", "bcde", {}, 2),
        ("abc", "def", "xy", {}, None),
        ("abc", "cde", "ab", {}, None),
        ("ab", "cdef", "ab", {}, None),  # it was complete within min_new_tokens
        ("xab", "abcd", "ab", {}, 2),  # and comes again
        ("abc", "def", "cd", {"min_new_tokens": 2}, None),
        ("abc", "def", "cde", {"min_new_tokens": 2}, 2),
    ],
)
async def test_a_stop_string_ends_at_the_token_that_completes_it(
    prior: str, new: str, stop: str, changes: dict[str, Any], expected: int | None
) -> None:
    assert await ended_after(prior, new, stop, **changes) == expected
