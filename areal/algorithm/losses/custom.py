"""A policy loss that the user names by path."""

from collections.abc import Callable
from functools import cache
from typing import Any

from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions
from areal.api.errors import ConfigError
from areal.api.registry import LOSS_CALL, load_function, parse_function_path


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """Call the function at `custom.path` as loss(tokens, options); options.custom.args holds its arguments.

    Each update also calls it once with T = 0, to learn the names of its statistics. The statistics of the ratio, at
    the level of importance_sampling_level, are added to them.
    Raises ConfigError when the function cannot be loaded, or does not return a PolicyLoss with one loss per token.
    """
    path = options.custom.path
    result = _function(path)(tokens, options)
    if not isinstance(result, PolicyLoss):
        found = type(result).__name__
        raise ConfigError(f"custom.path={path!r} returned {found}, not a PolicyLoss", code="loss.custom_result")
    if result.losses.shape != tokens.mask.shape:
        raise ConfigError(
            f"custom.path={path!r} returned losses of shape {tuple(result.losses.shape)}: "
            f"one per token is expected, {tuple(tokens.mask.shape)}",
            code="loss.custom_result",
        )
    stats = ratio_stats(tokens, policy_ratio(tokens, options)) | result.stats
    return PolicyLoss(losses=result.losses, stats=stats)


@cache
def _function(path: str) -> Callable[..., Any]:
    return load_function(parse_function_path(path, key="custom.path"), LOSS_CALL)
