"""Owns the names of the reward functions that come with areal."""

from __future__ import annotations

from areal.api.functions import FunctionRef, function_ref, resolve_function
from areal.api.workflow import RewardFn

REWARD_FUNCTIONS: dict[str, FunctionRef] = {
    "none": FunctionRef(name="no_reward", module="areal.reward.text"),
    "exact": FunctionRef(name="exact_reward", module="areal.reward.text"),
    "format": FunctionRef(name="format_reward", module="areal.reward.text"),
    "choice": FunctionRef(name="choice_reward", module="areal.reward.choice"),
    "gsm8k": FunctionRef(name="math_reward", module="areal.reward.math_answer"),
    "math": FunctionRef(name="symbolic_math_reward", module="areal.reward.math_symbolic"),
    "code": FunctionRef(name="code_reward", module="areal.reward.code"),
}


def resolve_reward_fn(reward_fn: RewardFn | str, *, key: str = "reward_fn") -> FunctionRef:
    """The reference of a reward given as function, registered name, module:function or file.py:function.

    `key` is the option that names it, for errors.
    """
    if isinstance(reward_fn, str):
        return resolve_function(reward_fn, REWARD_FUNCTIONS, key=key)
    return function_ref(reward_fn)
