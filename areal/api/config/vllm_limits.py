"""Owns which sampling settings a vLLM server can honour exactly, and in which of its modes; says what to do otherwise.

vLLM tells one kind of log-probability for all requests of a server (--logprobs-mode): of the softmax as the model made
it, or of the one that was sampled from, after temperature, penalties and truncation. Training needs that of
logits / temperature, so the two agree only for some settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.api.config.fields import Problems
from areal.api.config.inference import GenerationHyperparameters

RAW = "raw_logprobs"
PROCESSED = "processed_logprobs"
_ALL_TOKENS = 100_000_000
"""The default of top_k, which means no limit."""
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises what is lower without a word, and refuses what is higher."""
MAX_BIASED_TOKENS = 1024
"""More of them in the logit bias of a request end a server on GPU."""
_MAX_STOP_IDS = 100
"""On GPU a request has room for 128, the model's own end tokens included."""


def logprobs_mode(gconfig: GenerationHyperparameters) -> str:
    """The --logprobs-mode under which a server tells what training needs of requests with these settings."""
    return RAW if gconfig.temperature == 1 or gconfig.greedy else PROCESSED


def sampling_problems(
    gconfig: GenerationHyperparameters, flags: Mapping[str, Any], *, needs_logprobs: bool = True
) -> Problems:
    """What a vLLM server started with these flags would not do as asked. `needs_logprobs`: the answers are trained on,
    unlike those of an evaluation."""
    told = {name.replace("-", "_"): value for name, value in flags.items()}
    if not gconfig.greedy and not _LOWEST_TEMPERATURE <= gconfig.temperature <= _HIGHEST_TEMPERATURE:
        yield (
            "temperature",
            f"{gconfig.temperature:g} is outside of what vLLM takes, {_LOWEST_TEMPERATURE:g} to "
            f"{_HIGHEST_TEMPERATURE:g}: use a temperature in there, or greedy: true for the likeliest tokens",
        )
    if needs_logprobs:
        yield from _logprob_problems(gconfig)
    yield from _penalty_problems(gconfig, told)
    yield from _stop_problems(gconfig, told)


def _logprob_problems(gconfig: GenerationHyperparameters) -> Problems:
    if gconfig.greedy and gconfig.temperature != 1:
        yield (
            "temperature",
            f"{gconfig.temperature:g} has no effect on greedy answers of vLLM, and their log-probabilities would be "
            "those of temperature 1: set temperature: 1, or greedy: false",
        )
        return
    changed = _changes(gconfig)
    if logprobs_mode(gconfig) == PROCESSED and changed:
        yield (
            "temperature",
            f"{gconfig.temperature:g} does not go with {' and '.join(changed)} on vLLM servers, which then tell no "
            "log-probability that training can use: set temperature: 1, or leave the others at their defaults, or use "
            "native servers",
        )


def _changes(gconfig: GenerationHyperparameters) -> list[str]:
    """Settings besides the temperature that make the tokens come from another softmax than the model's."""
    facts = {
        "top_p": gconfig.top_p < 1,
        "top_k": gconfig.top_k < _ALL_TOKENS,
        "frequency_penalty": gconfig.frequency_penalty != 0,
        "repetition_penalty": gconfig.repetition_penalty != 1,
        "min_new_tokens": gconfig.min_new_tokens > 0 and not gconfig.ignore_eos,  # end tokens are masked until then
    }
    return [name for name, is_used in facts.items() if is_used]


def _penalty_problems(gconfig: GenerationHyperparameters, flags: Mapping[str, Any]) -> Problems:
    if not gconfig.frequency_penalty:
        return
    if gconfig.repetition_penalty != 1:
        yield (
            "frequency_penalty",
            f"{gconfig.frequency_penalty:g} cannot go with repetition_penalty={gconfig.repetition_penalty:g} on vLLM "
            "servers: an answer that goes on after an interruption would not be penalised as before; use one of them, "
            "or native servers",
        )
    if gconfig.max_new_tokens > MAX_BIASED_TOKENS + 1:  # the last token has none after it
        yield (
            "frequency_penalty",
            f"{gconfig.frequency_penalty:g} goes on over an interruption of an answer of up to {MAX_BIASED_TOKENS} "
            f"different tokens on vLLM servers, and max_new_tokens is {gconfig.max_new_tokens}: set it to 0, or "
            f"max_new_tokens to at most {MAX_BIASED_TOKENS + 1}, or use native servers",
        )
    if flags.get("speculative_config"):
        yield (
            "frequency_penalty",
            f"{gconfig.frequency_penalty:g} cannot be kept up over an interruption when vLLM decodes speculatively: "
            "set it to 0, or leave vllm.speculative_config out",
        )


def _stop_problems(gconfig: GenerationHyperparameters, flags: Mapping[str, Any]) -> Problems:
    if gconfig.stop and flags.get("skip_tokenizer_init"):
        yield "stop", "needs the server's tokenizer: leave vllm.skip_tokenizer_init out, or use stop_token_ids"
    if gconfig.stop and gconfig.ignore_eos and gconfig.min_new_tokens:
        yield (
            "min_new_tokens",
            f"{gconfig.min_new_tokens} with ignore_eos and stop would keep vLLM from choosing the end token for so "
            "long: leave one of the three out",
        )
    if len(gconfig.stop_token_ids) > _MAX_STOP_IDS:
        yield (
            "stop_token_ids",
            f"holds {len(gconfig.stop_token_ids)} ids, of which vLLM has room for {_MAX_STOP_IDS}: name fewer",
        )
