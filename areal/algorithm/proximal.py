"""Approximations of the proximal policy's log-probabilities, used instead of a forward pass.

A policy's version is the number of weight updates before it, and the batch of step k is trained with weights k: the
proximal policy, at the start of the update, has version k. Its update takes M optimiser steps to version k + 1, so
after j of them the policy in training has version v_theta = k + j / M. A token was sampled at version v <= k. If the
log-probability of a token is a linear function of the version,

    log pi_prox = log pi_old + alpha (log pi_theta - log pi_old)

    alpha = (k - v) / (v_theta - v) = (k - v) / (k - v + j / M),

and alpha = 1 at j = 0, where the policy in training is the proximal one (for v = k too, where it is 0 / 0).
For example, v = k - 1 half way through the update gives 1 / 1.5. docs/algorithms.md describes how AReaL differs.
"""

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, require_same_shape


def prox_position(output_versions: Tensor, *, version: int, progress: float) -> Tensor:
    """alpha of each token, [T] float32 from 0 (the rollout policy) to 1 (the policy in training).

    output_versions [T] int64: the version v that sampled token t+1, -1 for none, which gives 0. `version` is k,
    `progress` is j / M, from 0 to below 1. A version above k counts as k.
    """
    staleness = (version - output_versions).clamp(min=0).float()
    alpha = staleness / (staleness + progress) if progress > 0 else torch.ones_like(staleness)
    return torch.where(output_versions < 0, 0.0, alpha)


def loglinear_logprobs(logprobs: Tensor, rollout_logprobs: Tensor, alpha: Tensor) -> Tensor:
    """log pi_old + alpha (log pi_theta - log pi_old), [T], no gradient. At alpha 0 or 1 exactly one of the two."""
    require_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, alpha=alpha)
    now = logprobs.detach()
    between = rollout_logprobs + alpha.to(now.dtype) * (now - rollout_logprobs)
    return torch.where(alpha == 1, now, torch.where(alpha == 0, rollout_logprobs.to(now.dtype), between))


def linear_logprobs(logprobs: Tensor, rollout_logprobs: Tensor, alpha: Tensor) -> Tensor:
    """The same line between probabilities: log((1 - alpha) pi_old + alpha pi_theta), [T], no gradient."""
    require_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, alpha=alpha)
    share = alpha.to(logprobs.dtype)
    return torch.logaddexp(rollout_logprobs + torch.log1p(-share), logprobs.detach() + share.log())


def approximation_errors(
    logprobs: Tensor, rollout_logprobs: Tensor, prox_logprobs: Tensor, alpha: Tensor, mask: Tensor
) -> dict[str, TokenStat]:
    """|guess - log pi_prox| of each trained token, in nats, for every guess that needs no forward pass. All [T].

    Names: prox_error/loglinear, prox_error/linear, prox_error/rollout (the old policy in its place), each with _max.
    """
    guesses = {
        "loglinear": loglinear_logprobs(logprobs, rollout_logprobs, alpha),
        "linear": linear_logprobs(logprobs, rollout_logprobs, alpha),
        "rollout": rollout_logprobs,
    }
    stats: dict[str, TokenStat] = {}
    for name, guess in guesses.items():
        error = (guess - prox_logprobs).abs()
        stats[f"prox_error/{name}"] = TokenStat(error, mask)
        stats[f"prox_error/{name}_max"] = TokenStat(error, mask, "max")
    return stats
