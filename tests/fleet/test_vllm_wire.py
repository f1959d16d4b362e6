"""The JSON of vLLM: what is asked, and what is made of the recorded answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from areal.api.data import GenerationRequest
from areal.api.errors import RequestError
from areal.fleet.replica import AnswerForm, ReplicaLoad
from areal.fleet.vllm import generate_body, parse_load, parse_piece, parse_worker_state, part_seed, version_number
from tests.fleet.fake_vllm import RECORDING
from tests.fleet.generation_parts import FORM, a_part


def sampling(part: GenerationRequest, form: AnswerForm = FORM) -> dict[str, Any]:
    return generate_body(part, form)["sampling_params"]


def test_a_request_is_the_one_that_was_recorded() -> None:
    """The recording was made with this very code: a change here wants a new one."""
    asked = RECORDING["generate_stream"]["request"]["body"]
    part = a_part(5, request_id="recorded-001", input_ids=[5, 9, 11, 30], ignore_eos=True)
    assert generate_body(part, FORM) == asked


def test_greedy_and_unlimited_sampling_use_the_values_of_vllm() -> None:
    told = sampling(a_part(greedy=True, top_p=0.5, top_k=3))
    assert (told["temperature"], told["top_p"], told["top_k"]) == (0.0, 1.0, 0)
    assert sampling(a_part())["top_k"] == 0
    assert sampling(a_part(top_k=3))["top_k"] == 3
    assert "stream_interval" not in sampling(a_part(), AnswerForm(stream_interval=6))


def test_ignore_eos_ignores_every_stop_token_and_masks_none() -> None:
    told = sampling(a_part(ignore_eos=True, stop_token_ids=[4], min_new_tokens=3))
    assert (told["ignore_eos"], told["stop_token_ids"], told["min_tokens"]) == (True, [], 0)
    told = sampling(a_part(stop_token_ids=[4], min_new_tokens=3))
    assert (told["ignore_eos"], told["stop_token_ids"], told["min_tokens"]) == (False, [4], 3)


def test_text_is_requested_only_for_stop_strings() -> None:
    assert sampling(a_part())["detokenize"] is False
    told = sampling(a_part(stop=["<end>"]))
    assert (told["detokenize"], told["stop"], told["skip_special_tokens"]) == (True, ["<end>"], False)


def test_prior_output_counts_for_the_frequency_penalty() -> None:
    part = a_part(frequency_penalty=1.5, input_ids=[7, 8, 9, 9, 8, 9], num_prior_output_tokens=4)
    assert sampling(part)["logit_bias"] == {"9": -4.5, "8": -1.5}
    assert "logit_bias" not in sampling(dataclasses.replace(part, num_prior_output_tokens=0))
    long = dataclasses.replace(part, input_ids=list(range(1100)), num_prior_output_tokens=1100)
    with pytest.raises(RequestError, match="1024") as error:
        sampling(long)
    assert error.value.code == "server.unsupported_sampling"


def test_a_presence_penalty_is_refused_because_it_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match=r"gconfig.presence_penalty") as error:
        sampling(a_part(presence_penalty=0.5))
    assert error.value.code == "server.unsupported_sampling"


def test_each_part_has_a_seed_that_no_other_has() -> None:
    seeds = {part_seed(7, num_prior) for num_prior in range(1000)}
    assert len(seeds) == 1000
    assert part_seed(7, 0) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling(a_part(num_prior_output_tokens=2))["seed"] == part_seed(7, 2)
    assert "seed" not in sampling(a_part(seed=None))


def test_recorded_answers_are_read() -> None:
    piece = parse_piece(RECORDING["generate"]["body"])
    assert (len(piece.token_ids), piece.finish_reason, piece.spans) == (3, "length", [(0, 0, 3)])
    events = [parse_piece(event) for event in RECORDING["generate_stream"]["body"]]
    assert [len(event.token_ids) for event in events] == [1, 2, 2]
    assert [event.finish_reason for event in events] == [None, None, "length"]
    assert (events[0].spans, events[-1].spans) == (None, [(0, 0, 5)])
    assert parse_piece(RECORDING["generate_stop"]["body"]).finish_reason == "stop"
    aborted = parse_piece(RECORDING["generate_stream_aborted"]["body"][-1])
    assert aborted.finish_reason == "abort"
    assert aborted.spans is not None
    assert len(aborted.token_ids) == len(aborted.logprobs)


def test_versions_and_load_are_read() -> None:
    assert [version_number(told) for told in ("default", "3", "-1")] == [0, 3, -1]
    assert version_number("default", has_dummy_weights=True) == -1
    assert parse_load(RECORDING["metrics"]["body"]).running == 0
    two_engines = 'vllm:num_requests_running{engine="%d"} 2.0\nvllm:num_requests_waiting{engine="%d"} 1.0\n'
    two_engines += 'vllm:kv_cache_usage_perc{engine="%d"} 0.5\nvllm:generation_tokens_total{engine="%d"} 1e3\n'
    result = parse_load("".join(two_engines.replace("%d", str(index)) for index in range(2)))
    assert result == ReplicaLoad(running=4, queued=2, cache_usage=0.5, generated_tokens=2000)
    with pytest.raises(KeyError):
        parse_load("")


def test_weights_are_complete_when_those_of_every_worker_are() -> None:
    state = RECORDING["state"]["body"]["results"][0]
    torn = RECORDING["state_torn"]["body"]["results"][0]
    assert parse_worker_state({"results": [state, state]}).weights_whole
    assert not parse_worker_state({"results": [state, torn]}).weights_whole
