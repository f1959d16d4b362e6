"""The policy losses: log-probabilities enter, a loss per token leaves. `areal.algorithm.registered` names them."""

from areal.algorithm.aggregate import stats_problem
from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens
from areal.api.config import PolicyLossOptions
from areal.api.errors import ConfigError
from areal.api.registry import registered


def policy_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """Per-token losses of the function that `options.policy_loss` names.

    Each update also calls it once with T = 0, to learn the names of its statistics. ConfigError when the function does
    not return a PolicyLoss with one loss per token.
    """
    name = options.policy_loss.name
    result = registered("losses", name, key="actor.policy_loss").load()(tokens, options)
    if not isinstance(result, PolicyLoss) or result.losses.shape != tokens.mask.shape:
        what = (
            f"losses of shape {tuple(result.losses.shape)}" if isinstance(result, PolicyLoss) else type(result).__name__
        )
        message = f"{options.policy_loss!r} returned {what}: a PolicyLoss with one loss per token is expected"
        raise ConfigError(f"{message}, {tuple(tokens.mask.shape)}", code="loss.custom_result")
    if problem := stats_problem(result.stats):
        raise ConfigError(f"{options.policy_loss!r} returned {problem}", code="loss.custom_result")
    return result
