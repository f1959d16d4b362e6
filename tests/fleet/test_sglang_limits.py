"""Which sampling settings an SGLang server honours exactly, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from areal.api.config.rollout import GenerationHyperparameters
from areal.fleet.sglang import sampling_problems


def problems(
    flags: dict[str, Any] | None = None, *, needs_logprobs: bool = True, **changes: Any
) -> list[tuple[str, str]]:
    gconfig = GenerationHyperparameters(**changes)
    return list(sampling_problems(gconfig, flags or {}, needs_logprobs=needs_logprobs))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"greedy": True, "temperature": 0.5},
        {"stop": ["x"], "stop_token_ids": [4]},
        {"ignore_eos": True, "min_new_tokens": 5},
    ],
    ids=str,
)
def test_settings_that_sglang_honours_exactly_are_accepted(changes: dict[str, Any]) -> None:
    assert problems(**changes) == []


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"temperature": 1e-7}, "temperature", "1e-06"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "0.5"),
        ({"presence_penalty": 0.5}, "presence_penalty", "0.5"),
        ({"repetition_penalty": 1.1, "greedy": True}, "repetition_penalty", "1.1"),
        ({"min_new_tokens": 3}, "min_new_tokens", "3"),
        ({"min_new_tokens": 3, "ignore_eos": True, "stop": ["x"]}, "min_new_tokens", "3"),
        ({"stop": [str(n) for n in range(33)]}, "stop", "32"),
    ],
    ids=str,
)
def test_settings_that_sglang_cannot_honour_are_refused(changes: dict[str, Any], field: str, value: str) -> None:
    [(result, sentence)] = problems(**changes)
    assert result == field
    assert value in sentence
    assert problems(needs_logprobs=False, **changes)  # the choice of the token is wrong, not only its number


def test_a_flag_that_changes_the_settings_is_refused() -> None:
    assert [name for name, _ in problems({"skip_tokenizer_init": True}, stop=["x"])] == ["stop"]
    assert [name for name, _ in problems({"rl_on_policy_target": "fsdp"})] == ["temperature"]
    assert problems({"rl_on_policy_target": "fsdp"}, needs_logprobs=False) == []
