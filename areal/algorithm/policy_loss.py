"""The record that every policy loss takes and the record that it returns; `areal.algorithm.losses` holds the losses."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, require_same_shape
from areal.api.batch import required
from areal.api.config import PolicyLossOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The inputs of a policy loss. Per-token tensors are [T], float32 or float64, predicted-token aligned."""

    logprobs: Tensor  # log pi_theta, with gradient
    old_logprobs: Tensor  # log of the policy the ratio is taken against (pi_prox when decoupled)
    rollout_logprobs: Tensor  # log of the policy that sampled the tokens
    advantages: Tensor
    mask: Tensor  # bool
    sequence_index: Tensor  # [T] int64
    num_sequences: int
    chosen: Tensor | None = None
    """[T] bool: the tokens of Clip-Cov and KL-Cov, chosen over the whole batch before the update."""

    def __post_init__(self) -> None:
        require_same_shape(
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            rollout_logprobs=self.rollout_logprobs,
            advantages=self.advantages,
            mask=self.mask,
            sequence_index=self.sequence_index,
            chosen=self.mask if self.chosen is None else self.chosen,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per-token losses, 0 where the mask is off, and the statistics to log."""

    losses: Tensor  # [T] with gradient
    stats: dict[str, TokenStat]


PolicyLossFn = Callable[[PolicyTokens, PolicyLossOptions], PolicyLoss]


def weighted_log_likelihood(tokens: PolicyTokens, weights: Tensor, advantages: Tensor) -> Tensor:
    """-w A log pi of each token, [T], 0 where the mask is off; no gradient flows through the weights w."""
    logprobs = torch.where(tokens.mask, tokens.logprobs, 0.0)
    return torch.where(tokens.mask, -weights.detach() * advantages * logprobs, 0.0)


def chosen_tokens(tokens: PolicyTokens) -> Tensor:
    """`tokens.chosen` within the mask, [T] bool. Raises StageError when it is missing."""
    return required(tokens.chosen, "chosen_tokens") & tokens.mask
