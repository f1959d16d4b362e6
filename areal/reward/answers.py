"""The final answer of a completion, which decides a majority vote."""

from collections.abc import Callable

from areal.api.config import PPOConfig
from areal.api.functions import ANSWER_CALL, ANSWER_FUNCTIONS, load_function, resolve_function

AnswerFn = Callable[[str], str | None]
"""Text of a completion -> its final answer, in one spelling for equal answers; None = it has none."""


def answer_function(config: PPOConfig) -> AnswerFn:
    """The function at evaluator.answer_fn. Empty: `number` for the rewards gsm8k and math, `choice` for choice, else
    `text`. ConfigError when there is no such function."""
    name = config.evaluator.answer_fn
    if not name:
        used = {config.reward_fn, *(each for _, fns in config.reward.tables() for each in fns)}
        name = "number" if used & {"gsm8k", "math"} else "choice" if "choice" in used else "text"
    return load_function(resolve_function(name, ANSWER_FUNCTIONS, key="evaluator.answer_fn"), ANSWER_CALL)
