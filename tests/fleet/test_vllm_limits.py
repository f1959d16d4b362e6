"""Which sampling settings a vLLM server honours exactly, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from areal.api.config.rollout import GenerationHyperparameters
from areal.fleet.vllm import logprobs_mode, sampling_problems


def problems(
    flags: dict[str, Any] | None = None, *, needs_logprobs: bool = True, **changes: Any
) -> list[tuple[str, str]]:
    gconfig = GenerationHyperparameters(**{"max_new_tokens": 1000, **changes})
    return list(sampling_problems(gconfig, flags or {}, needs_logprobs=needs_logprobs))


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "raw_logprobs"),
        ({"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}, "raw_logprobs"),
        ({"frequency_penalty": 1.0, "min_new_tokens": 5, "stop": ["x"]}, "raw_logprobs"),
        ({"frequency_penalty": 1.0, "max_new_tokens": 1025}, "raw_logprobs"),
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"temperature": 0.7, "stop": ["x"], "stop_token_ids": [4]}, "processed_logprobs"),
        ({"temperature": 0.7, "ignore_eos": True, "min_new_tokens": 5}, "processed_logprobs"),
        ({"greedy": True}, "raw_logprobs"),
    ],
    ids=str,
)
def test_exact_logprobs_of_vllm_need_the_processed_mode(changes: dict[str, Any], mode: str) -> None:
    assert logprobs_mode(GenerationHyperparameters(**changes)) == mode
    assert problems(**changes) == []


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"temperature": 2.5}, "temperature", "0.01 to 2"),
        ({"temperature": 0.001}, "temperature", "0.01 to 2"),
        ({"temperature": 0.7, "top_p": 0.9}, "temperature", "top_p"),
        ({"temperature": 0.7, "top_k": 50}, "temperature", "top_k"),
        ({"temperature": 0.7, "frequency_penalty": 0.5}, "temperature", "frequency_penalty"),
        ({"temperature": 0.7, "repetition_penalty": 1.5}, "temperature", "repetition_penalty"),
        ({"temperature": 0.7, "min_new_tokens": 3}, "temperature", "min_new_tokens"),
        ({"temperature": 0.7, "greedy": True}, "temperature", "0.7"),
        ({"frequency_penalty": 0.5, "repetition_penalty": 1.5}, "frequency_penalty", "repetition_penalty=1.5"),
        ({"frequency_penalty": 0.5, "max_new_tokens": 1026}, "frequency_penalty", "1025"),
        ({"presence_penalty": 0.5}, "presence_penalty", "0.5"),
        ({"stop": ["x"], "ignore_eos": True, "min_new_tokens": 3}, "min_new_tokens", "3"),
        ({"stop_token_ids": list(range(101))}, "stop_token_ids", "100"),
    ],
    ids=str,
)
def test_settings_that_vllm_cannot_honour_are_refused(changes: dict[str, Any], field: str, value: str) -> None:
    [(result, sentence)] = problems(**changes)
    assert result == field
    assert value in sentence


@pytest.mark.parametrize(
    ("flags", "changes", "field"),
    [
        ({"skip_tokenizer_init": True}, {"stop": ["x"]}, "stop"),
        ({"speculative_config": {"method": "ngram"}}, {"frequency_penalty": 1.0}, "frequency_penalty"),
    ],
    ids=str,
)
def test_a_flag_that_changes_the_settings_is_refused(
    flags: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    assert problems(**changes) == []
    assert [item for item, _ in problems(flags, **changes)] == [field]


def test_the_log_probabilities_of_an_evaluation_need_not_be_exact() -> None:
    assert problems(needs_logprobs=False, temperature=0.6, top_p=0.95, top_k=20) == []
    assert problems(needs_logprobs=False, temperature=3.0) != []
