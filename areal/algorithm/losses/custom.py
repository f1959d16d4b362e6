"""A policy loss that the user names by path."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

from areal.algorithm.aggregate import stats_problem
from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens, policy_ratio, ratio_stats
from areal.api.config import PolicyLossOptions
from areal.api.config.policy_losses import CustomFunctionOptions
from areal.api.registry import LOSS_CALL, load_function, parse_function_path


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """Call the function at `policy_loss.path` as loss(tokens, options); options.policy_loss.args holds its arguments.

    The statistics of the ratio, at the level of importance_sampling_level, are added to its own. ConfigError when the
    function cannot be loaded.
    """
    result = _function(cast("CustomFunctionOptions", options.policy_loss).path)(tokens, options)
    if not isinstance(result, PolicyLoss) or stats_problem(result.stats):
        return result  # refused by `policy_loss`
    return replace(result, stats=ratio_stats(tokens, policy_ratio(tokens, options)) | result.stats)


@cache
def _function(path: str) -> Callable[..., Any]:
    return load_function(parse_function_path(path, key="policy_loss.path"), LOSS_CALL)
