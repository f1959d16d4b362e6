"""Owns which sampling settings an SGLang server can honour exactly; says what to do about the others.

Measured on SGLang 0.5.23. Its log-probabilities are of the logits it samples from, at the request's temperature and
before top-k and top-p: what training needs, as long as nothing else was done to the logits. Its penalties count the
last token of the prompt instead of the newest token of the answer, and like its shortest length they begin anew when
a request is put back into the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.api.config.fields import Problems
from areal.api.config.inference import GenerationHyperparameters

_LOWEST_TEMPERATURE = 1e-6
"""SGLang takes what is lower for greedy, and tells log-probabilities of temperature 1."""
_MAX_STOP_STRINGS = 32


def sampling_problems(
    gconfig: GenerationHyperparameters, flags: Mapping[str, Any], *, needs_logprobs: bool = True
) -> Problems:
    """What an SGLang server started with these flags would not do as asked. `needs_logprobs`: the answers are trained
    on, unlike those of an evaluation."""
    told = {name.replace("-", "_"): value for name, value in flags.items()}
    if not gconfig.greedy and gconfig.temperature < _LOWEST_TEMPERATURE:
        yield (
            "temperature",
            f"{gconfig.temperature:g} is too low for SGLang: set it to at least {_LOWEST_TEMPERATURE:g}, or greedy: "
            "true for the likeliest tokens",
        )
    if gconfig.frequency_penalty:
        yield (
            "frequency_penalty",
            f"{gconfig.frequency_penalty:g} would be applied one token late by SGLang: set it to 0, or use native or "
            "vllm servers",
        )
    if gconfig.repetition_penalty != 1:
        yield (
            "repetition_penalty",
            f"{gconfig.repetition_penalty:g} would leave out the prompt and the newest token on SGLang: set it to 1, "
            "or use native or vllm servers",
        )
    if gconfig.min_new_tokens and not (gconfig.ignore_eos and not gconfig.stop):
        yield (
            "min_new_tokens",
            f"{gconfig.min_new_tokens} would change SGLang's log-probabilities, and is counted anew after a pause: set "
            "it to 0, or use native servers",
        )
    if gconfig.stop and told.get("skip_tokenizer_init"):
        yield "stop", "needs the server's tokenizer: leave sglang.skip_tokenizer_init out, or use stop_token_ids"
    if gconfig.stop and len(gconfig.stop) > _MAX_STOP_STRINGS:
        yield "stop", f"holds {len(gconfig.stop)} strings, of which SGLang takes {_MAX_STOP_STRINGS}: name fewer"
    if needs_logprobs and told.get("rl_on_policy_target"):
        yield (
            "temperature",
            "is applied in bfloat16 under sglang.rl_on_policy_target, and so are the log-probabilities: leave that "
            "flag out",
        )
