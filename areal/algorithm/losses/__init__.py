"""The policy losses: a table of names and functions, and the one function that looks a loss up."""

from areal.algorithm.losses import custom, gmpo, policy_gradient, ppo, sapo
from areal.algorithm.policy_loss import PolicyLoss, PolicyLossFn, PolicyTokens
from areal.api.config import PolicyLossOptions

LOSSES: dict[str, PolicyLossFn] = {
    "ppo": ppo.loss,
    "gspo": ppo.gspo_loss,
    "sapo": sapo.loss,
    "cispo": policy_gradient.cispo_loss,
    "aipo": policy_gradient.aipo_loss,
    "gpg": policy_gradient.gpg_loss,
    "gmpo": gmpo.loss,
    "clip_cov": ppo.clip_cov_loss,
    "kl_cov": ppo.kl_cov_loss,
    "topr": policy_gradient.topr_loss,
    "kimi15": policy_gradient.kimi15_loss,
    "dppo": policy_gradient.dppo_loss,
    "custom": custom.loss,
}
"""Name in `actor.policy_loss` -> loss. CONTRIBUTING.md lists the files that a new entry needs."""


def policy_loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """Per-token losses of the function that `options.policy_loss` names."""
    return LOSSES[options.policy_loss](tokens, options)
