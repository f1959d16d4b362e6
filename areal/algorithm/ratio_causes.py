"""Where the policy in training and the policy that sampled a token differ: the log-ratio of each token by cause. Pure.

The ratio of token y with its context is p_train(y) / p_sample(y). A server recorded log p_v(y) of its version v at the
temperature of the request; it drew the token after top-k and top-p, from p_v(y) / Z. The same server says log s_k(y)
for the version k that the trainer holds now, the trainer log t_k(y). Z is computed under version k, too. Then

    log t_k(y) - log p_v(y) + log Z = [log t_k(y) - log s_k(y)] + [log s_k(y) - log p_v(y)] + log Z

The three terms are the numerics of two engines with equal weights, the age of the weights, and the sampling transform.
For a token of version k the second term has nothing to do with age: within the rounding of the dtype it is numerics (a
server computes a prompt otherwise than one token at a time), above that the recorded value is not of this token in this
context: the workflow changed tokens, or the server used keys and values of older weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDING = {"float32": 1e-3}
_ROUNDING_16_BIT = 0.25
"""Nats between the value that a server recorded in decoding and the one that it computes from the whole text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioParts:
    """Terms of the log-ratio of each token, in nats, [T] float64. They sum to `whole`."""

    whole: Tensor
    numerics: Tensor
    staleness: Tensor
    sampling: Tensor
    drift: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Log-probabilities of trained tokens, in nats, [T] each. k is the version that the trainer holds."""

    trainer: Tensor
    """By the trainer at version k, at the temperature of the token."""
    trainer_raw: Tensor
    """The same at temperature 1."""
    server_raw: Tensor
    """By a server at version k, at temperature 1."""
    recorded: Tensor
    """By the server that generated the token, at the temperature of the token."""
    is_current: Tensor
    """[T] bool: generated under version k."""
    kept_mass: Tensor
    """Probability of the tokens among which it was drawn, 1 without top-k and top-p."""


def ratio_parts(tokens: ScoredTokens, dtype: str) -> RatioParts:
    """The parts of each token. `dtype`: in which servers and trainer compute, which bounds their rounding.

    At another temperature than 1 the numerics are those at temperature 1, and their change is in the second term.
    """
    trainer, recorded = tokens.trainer.double(), tokens.recorded.double()
    numerics = tokens.trainer_raw.double() - tokens.server_raw.double()
    sampling = tokens.kept_mass.double().log()
    between = trainer - recorded - numerics
    is_rounding = tokens.is_current & (between.abs() <= _ROUNDING.get(dtype, _ROUNDING_16_BIT))
    none = torch.zeros_like(between)
    return RatioParts(
        whole=trainer - recorded + sampling,
        numerics=numerics + torch.where(is_rounding, between, none),
        staleness=torch.where(tokens.is_current, none, between),
        sampling=sampling,
        drift=torch.where(tokens.is_current & ~is_rounding, between, none),
    )


def kept_mass(top: Sequence[float], scale: float, *, temperature: float, top_k: int | None, top_p: float) -> float:
    """Probability, at `temperature`, of the tokens that top-k (None = no limit) and then top-p leave at one place.

    `top`: log-probabilities at temperature 1 of the likeliest tokens, in order. `scale`: log of the sum of all
    probabilities to the power 1 / temperature, 0 at temperature 1. A `top_k` above their number is taken as their
    number. If top-p needs more tokens than they are, the mass is top_p.
    """
    # The scale is of two engines, whose rounding a low temperature multiplies: no weight is above 1.
    weights = [math.exp(min(value / temperature - scale, 0.0)) for value in top[:top_k]]
    limit = top_p * (1.0 if top_k is None else sum(weights))
    mass = 0.0
    for weight in weights:
        mass += weight
        if mass >= limit:
            break
    return min(max(mass, limit), 1.0)
