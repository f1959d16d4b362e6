"""The policy losses: a table of names and functions, and the one function that looks a loss up."""

from __future__ import annotations

from areal.algorithm.losses import (
    aipo,
    cispo,
    clip_cov,
    custom,
    dppo,
    gmpo,
    gpg,
    kimi15,
    kl_cov,
    ppo,
    sapo,
    topr,
)
from areal.algorithm.policy_loss import PolicyLoss, PolicyLossFn, PolicyTokens
from areal.api.config import PolicyLossOptions

LOSSES: dict[str, PolicyLossFn] = {
    "ppo": ppo.loss,
    "gspo": ppo.gspo_loss,
    "sapo": sapo.loss,
    "cispo": cispo.loss,
    "aipo": aipo.loss,
    "gpg": gpg.loss,
    "gmpo": gmpo.loss,
    "clip_cov": clip_cov.loss,
    "kl_cov": kl_cov.loss,
    "topr": topr.loss,
    "kimi15": kimi15.loss,
    "dppo": dppo.loss,
    "custom": custom.loss,
}
"""By the name in `actor.policy_loss`. docs/algorithms.md, "Adding a loss", lists the files that a new entry needs."""


def policy_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """Per-token losses of the function that `options.policy_loss` names."""
    return LOSSES[options.policy_loss](tokens, options)
