"""The final answer of a completion, which decides a majority vote."""

from collections.abc import Callable

from areal.api.config import PPOConfig
from areal.api.functions import ANSWER_CALL, ANSWER_FUNCTIONS, load_function, resolve_function

_NUMBERS = {"gsm8k", "math", "clevr_count_70k", "geometry3k", "virl39k"}
"""Rewards whose answers end in a number or a formula."""
AnswerFn = Callable[[str], str | None]
"""Text of a completion -> its final answer, in one spelling for equal answers; None = it has none."""


def answer_function(config: PPOConfig) -> AnswerFn:
    """The function at evaluator.answer_fn. Empty: `number` for rewards of numbers and formulas, `choice` for choice,
    else `text`. ConfigError when there is no such function."""
    name = config.evaluator.answer_fn
    if not name:
        used = {config.reward_fn, *(each for _, fns in config.reward.tables() for each in fns)}
        name = "number" if used & _NUMBERS else "choice" if "choice" in used else "text"
    return load_function(resolve_function(name, ANSWER_FUNCTIONS, key="evaluator.answer_fn"), ANSWER_CALL)
