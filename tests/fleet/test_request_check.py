"""A request that would kill or confuse a server is refused before it is sent, in the same words for all backends."""

from __future__ import annotations

import dataclasses

import pytest

from areal.api.config.inference import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.api.errors import RequestError
from areal.fleet.replica import ReplicaInfo
from areal.fleet.request_check import RequestBounds, check_request, common_bounds

BOUNDS = RequestBounds(vocab_size=100, context_length=20)


def a_request(input_ids: list[int], **gconfig: object) -> GenerationRequest:
    settings = {"max_new_tokens": 5, **gconfig}
    gconfig_ = GenerationHyperparameters(**settings)  # type: ignore[arg-type]
    return GenerationRequest(request_id="r", input_ids=input_ids, gconfig=gconfig_)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (a_request([]), "the prompt is empty"),
        (a_request([3, 100]), r"prompt holds token id 100, .*vocabulary \(0 to 99\): does the tokenizer belong"),
        (a_request([-1, 3]), "prompt holds token id -1"),
        (a_request([3], stop_token_ids=[99, 100]), r"gconfig.stop_token_ids holds 100, .*: remove it"),
        (a_request([1] * 20), "prompt of 20 tokens leaves no room .*context length of 20: shorten"),
        (
            a_request([1] * 16),
            r"prompt \(16 tokens\) and answer \(up to 5\) exceed .*of 20: set gconfig.max_new_tokens to at most 4",
        ),
        (
            a_request([1], max_new_tokens=16384),
            "set gconfig.max_new_tokens to at most 19",
        ),  # the default is no exception
        (a_request([1] * 4, max_tokens=4), r"gconfig.max_tokens=4"),
    ],
)
def test_what_is_refused_says_what_to_do(request_: GenerationRequest, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_request(request_, BOUNDS)


@pytest.mark.parametrize(
    "request_",
    [
        a_request([0, 99], stop_token_ids=[0, 99]),
        a_request([1] * 15),
        a_request([1] * 18, max_new_tokens=500, max_tokens=20),
    ],
    ids=["ids", "length", "max_tokens"],
)
def test_what_fits_passes(request_: GenerationRequest) -> None:
    check_request(request_, BOUNDS)


def test_an_answer_may_go_on_anywhere_so_the_tightest_replica_counts() -> None:
    one = ReplicaInfo(version=0, vocab_size=10, context_length=90, weights_whole=True)
    other = dataclasses.replace(one, vocab_size=20, context_length=80)
    assert common_bounds([one, other]) == RequestBounds(vocab_size=10, context_length=80)
