"""A request that would end or confuse a server is refused before it is sent, in the same way for all backends."""

from __future__ import annotations

import pytest

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.api.errors import RequestError
from areal.fleet.fleet import Answer
from areal.fleet.replica import AnswerForm, RequestLimits

LIMITS = RequestLimits(vocab_size=100, context_length=20)


def a_request(input_ids: list[int], **gconfig: object) -> GenerationRequest:
    settings = {"max_new_tokens": 5, **gconfig}
    gconfig_ = GenerationHyperparameters(**settings)  # type: ignore[arg-type]
    return GenerationRequest(request_id="r", input_ids=input_ids, gconfig=gconfig_)


@pytest.mark.parametrize(
    ("request_", "code", "values"),
    [
        (a_request([]), "request.invalid_field", "empty"),
        (a_request([3, 100]), "request.token_id", r"\b100, .*0 to 99"),
        (a_request([-1, 3]), "request.token_id", r" -1\b"),
        (a_request([3], stop_token_ids=[99, 100]), "request.token_id", r"gconfig\.stop_token_ids .*\b100\b"),
        (a_request([1] * 20), "request.too_long", r"\b20 .*\b20\b"),
        (a_request([1] * 16), "request.too_long", r"\b16 .*\b5\b.*gconfig\.max_new_tokens .*\b4,"),
        (a_request([1], max_new_tokens=16384), "request.too_long", r"\b19\b"),  # the default is no exception
        (a_request([1] * 4, max_tokens=4), "request.too_long", "gconfig.max_tokens=4"),
    ],
)
def test_a_refused_request_names_the_limit(request_: GenerationRequest, code: str, values: str) -> None:
    with pytest.raises(RequestError, match=values) as error:
        Answer(request_, AnswerForm(stream_interval=1)).check(LIMITS)
    assert error.value.code == code


@pytest.mark.parametrize(
    "request_",
    [
        a_request([0, 99], stop_token_ids=[0, 99]),
        a_request([1] * 15),
        a_request([1] * 18, max_new_tokens=500, max_tokens=20),
    ],
    ids=["ids", "length", "max_tokens"],
)
def test_a_request_within_the_limits_passes(request_: GenerationRequest) -> None:
    Answer(request_, AnswerForm(stream_interval=1)).check(LIMITS)
