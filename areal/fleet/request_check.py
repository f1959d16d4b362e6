"""Owns what no server may be sent, whichever kind it is: such a request kills some servers and is cut short by others.

Pure. One rule for the length: prompt and the most tokens that the answer may have must fit into the context, as the
native server has always demanded; nothing is cut silently, also where only a default asks for that much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal.api.data import GenerationRequest
from areal.api.errors import RequestError
from areal.fleet.continuation import token_budget
from areal.fleet.replica import ReplicaInfo


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """What every replica can take: an answer may go on at any of them."""

    vocab_size: int
    context_length: int
    """Most tokens of prompt and answer together."""


def common_bounds(infos: Iterable[ReplicaInfo]) -> RequestBounds:
    """The tightest of at least one replica's."""
    found = list(infos)
    return RequestBounds(min(info.vocab_size for info in found), min(info.context_length for info in found))


def check_request(request: GenerationRequest, bounds: RequestBounds) -> None:
    """RequestError unless every replica can take the request."""
    gconfig, num_prompt = request.gconfig, len(request.input_ids)
    budget = token_budget(gconfig, num_prompt)
    _check_ids(request.input_ids, bounds, "the prompt holds token id", "does the tokenizer belong to the served model?")
    if gconfig.stop_token_ids:
        _check_ids(gconfig.stop_token_ids, bounds, "gconfig.stop_token_ids holds", "remove it")
    room = bounds.context_length - num_prompt
    if room < 1:
        raise RequestError(
            f"a prompt of {num_prompt} tokens leaves no room for an answer in the servers' context length of "
            f"{bounds.context_length}: shorten the prompt, or give the servers a longer context"
        )
    if budget > room:
        raise RequestError(
            f"prompt ({num_prompt} tokens) and answer (up to {budget}) exceed the servers' context length of "
            f"{bounds.context_length}: set gconfig.max_new_tokens to at most {room}, or gconfig.max_tokens to "
            f"{bounds.context_length}, which bounds both together"
        )


def _check_ids(ids: list[int], bounds: RequestBounds, where: str, what_to_do: str) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= bounds.vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(
            f"{where} {wrong}, which is outside of the servers' vocabulary (0 to {bounds.vocab_size - 1}): {what_to_do}"
        )
