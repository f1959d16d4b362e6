"""Owns the name of GSPO: PPO's loss with the ratio of the sequence."""

from __future__ import annotations

from dataclasses import replace

from areal.algorithm.losses import ppo
from areal.algorithm.policy_loss import PolicyLoss, PolicyTokens
from areal.api.config import PolicyLossOptions


def loss(tokens: PolicyTokens, options: PolicyLossOptions) -> PolicyLoss:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 5): the same function as ppo at the level of the sequence.

    Every option of that level holds here too, see `policy_ratio`.
    """
    return ppo.loss(tokens, replace(options, importance_sampling_level="sequence"))
