"""Owns the way to a user's own policy loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens
from areal.algorithm.ratio import policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions
from areal.api.errors import ConfigError
from areal.api.functions import load_function, parse_function_path


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """`custom.path` called as loss(tokens, options); its arguments are in options.custom.args.

    It is also called with no tokens at all, once in an update, to learn the names of its statistics. What every loss
    logs about its ratio is added to them, at the level of importance_sampling_level.
    Errors: ConfigError when it cannot be found, returns no PolicyLoss or not one loss a token.
    """
    path = options.custom.path
    result = _function(path)(tokens, options)
    if not isinstance(result, PolicyLoss):
        raise ConfigError(f"custom.path={path!r} returned {type(result).__name__}, a PolicyLoss is expected")
    if result.losses.shape != tokens.mask.shape:
        raise ConfigError(
            f"custom.path={path!r} returned losses of shape {tuple(result.losses.shape)}: "
            f"one a token is expected, {tuple(tokens.mask.shape)}"
        )
    stats = ratio_stats(tokens, policy_ratio(tokens, options)) | result.stats
    return PolicyLoss(losses=result.losses, stats=stats)


@cache
def _function(path: str) -> Callable[..., Any]:
    return load_function(parse_function_path(path, key="custom.path"))
