"""Samples the next tokens of a batch; each row has its own parameters and random numbers.

The random number of a row is a hash of its seed and the token position. It does not depend on the other rows, so a
request that continues on another server after an interruption uses the same random numbers.
"""

import numpy as np
import torch
from torch import Tensor

from areal.inference.sequence import ALL_TOKENS, Sequence

_RACE_ROWS = 32
"""Rows per block: a few hundred MB of temporaries at a vocabulary of 152,000 tokens."""
_INDEX_FACTOR = -1640531527
"""The odd number nearest to 2^32 divided by the golden ratio, as a signed number."""


@torch.inference_mode()
def sample(logits: Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
    """The next token of each sequence and its log-probability, from logits [rows, vocabulary].

    The log-probability is log_softmax(logits / temperature), with temperature 1 for greedy requests, as the trainer
    computes it. Penalties, top-k and top-p change the choice of the token but not this value. It is NaN, and the token
    has no meaning, for a row without a distribution: a logit is NaN or +inf, or every allowed one is -inf.
    """
    logits = logits.float()
    temperatures = [sequence.params.temperature or 1.0 for sequence in sequences]
    scaled = logits
    if any(temperature != 1.0 for temperature in temperatures):
        scaled = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = scaled.log_softmax(dim=-1)
    special = [row for row, sequence in enumerate(sequences) if not sequence.params.is_plain]
    size = logits.shape[1]
    uniforms = torch.from_numpy(uniform_numbers(sequences))
    if logits.device.type != "cpu":
        uniforms = uniforms.to(logits.device, non_blocking=True)
    if len(special) == len(sequences):
        tokens = _choose_special(logits, sequences, uniforms)
    else:
        tokens = _draw(logprobs.exp(), uniforms)
        if special:
            rows = torch.tensor(special, device=logits.device)
            tokens[rows] = _choose_special(logits[rows], [sequences[row] for row in special], uniforms[rows])
    chosen = logprobs.gather(1, tokens.clamp(max=size - 1)[:, None])[:, 0].masked_fill(tokens == size, torch.nan)
    return tokens.tolist(), chosen.tolist()


def uniform_numbers(sequences: list[Sequence]) -> np.ndarray:
    """One float32 in [0, 1 - 2**-23] per sequence, from its seed and the position of its next token."""
    seeds = np.array([sequence.seed for sequence in sequences], dtype=np.uint64)
    places = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.uint64)
    bits = _scramble(_scramble(seeds) + places)
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def _scramble(values: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, a bijection of 64-bit numbers that decorrelates neighbouring values."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row with probability proportional to its weight. An index of weight 0 is never chosen.

    The index is the length of the row when a weight is NaN. On the CPU by inversion of the cumulative sum. A parallel
    sum in float32 need not be monotone, so that its inversion can give an index of weight 0: elsewhere by `_race`.
    """
    if weights.device.type != "cpu":
        return _race(weights, uniforms)
    sums = weights.cumsum(dim=-1)
    # Below the total by at least one unit in the last place, because the numbers are at most 1 - 2**-23.
    target = uniforms[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, target, right=True)[:, 0]


def _race(weights: Tensor, uniforms: Tensor) -> Tensor:
    """As `_draw`: each index gets an exponential random number divided by its weight, and the smallest wins.

    The numbers are a hash of the row's uniform number and the index. They are computed for blocks of rows.
    """
    size = weights.shape[1]
    places = torch.arange(size, dtype=torch.int32, device=weights.device) * _INDEX_FACTOR
    found = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    for first in range(0, len(weights), _RACE_ROWS):
        rows = slice(first, first + _RACE_ROWS)
        keys = uniforms[rows].view(torch.int32)[:, None]
        bits = _mixed(_mixed(places ^ keys) + keys)
        # In (0, 1). The smallest numbers decide, and there float32 is finest.
        noise = ((bits & 0x7FFFFFFF).to(torch.float32) * 2.0**-31).clamp(2.0**-32, 1 - 2.0**-24)
        scores = weights[rows].log() - (-torch.log1p(-noise)).log()
        best, found[rows] = scores.max(dim=-1)  # NaN counts as the maximum
        found[rows] = found[rows].masked_fill(~best.isfinite(), size)
    return found


def _mixed(bits: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3 on int32, a bijection that decorrelates neighbouring values."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _wrapped(0x85EBCA6B)
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * _wrapped(0xC2B2AE35)
    return bits ^ ((bits >> 16) & 0xFFFF)


def _wrapped(value: int) -> int:
    """A 32-bit number as a signed one."""
    return value - 2**32 if value >= 2**31 else value


def _choose_special(logits: Tensor, sequences: list[Sequence], uniforms: Tensor) -> Tensor:
    """Tokens of rows that are greedy, restricted or penalised; the vocabulary size for a row without a distribution."""
    adjusted = _adjusted(logits, sequences)
    highest, tokens = adjusted.max(dim=-1)  # NaN counts as the maximum
    tokens.masked_fill_(~highest.isfinite(), logits.shape[1])
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.is_greedy]
    if not drawn:
        return tokens
    rows = torch.tensor(drawn, device=logits.device)
    params = [sequences[row].params for row in drawn]
    temperatures = torch.tensor([one.temperature for one in params], device=logits.device)
    top_k = torch.tensor([logits.shape[1] if one.top_k == ALL_TOKENS else one.top_k for one in params])
    top_p = torch.tensor([one.top_p for one in params], device=logits.device)
    ordered, places = (adjusted[rows] / temperatures[:, None]).sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=logits.device)
    ordered = ordered.masked_fill(ranks >= top_k.to(logits.device)[:, None], -torch.inf)
    weights = ordered.softmax(dim=-1)
    # A token is kept while the mass before it is below top_p; the first one always is. top_p = 1 keeps all tokens,
    # independent of rounding.
    before = weights.cumsum(dim=-1) - weights
    weights = weights.masked_fill((before >= top_p[:, None]) & (top_p[:, None] < 1) & (ranks > 0), 0.0)
    size = logits.shape[1]
    found = _draw(weights, uniforms[rows])
    tokens[rows] = places.gather(1, found.clamp(max=size - 1)[:, None])[:, 0].masked_fill(found == size, size)
    return tokens


def _adjusted(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """A copy of the logits with penalties, and with stop tokens masked while the answer is below its minimum."""
    logits = logits.clone()
    for row, sequence in enumerate(sequences):
        params = sequence.params
        if params.repetition_penalty != 1:
            seen = torch.tensor(sequence.token_ids, device=logits.device).unique()
            old = logits[row, seen]
            logits[row, seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        answer = sequence.answer_ids if params.frequency_penalty != 0 else None
        if answer:
            generated = torch.tensor(answer, device=logits.device)
            losses = torch.full((len(generated),), -params.frequency_penalty, device=logits.device)
            logits[row].index_add_(0, generated, losses)
        if sequence.num_output < params.min_new_tokens and params.stop_token_ids:
            logits[row, sorted(params.stop_token_ids)] = -torch.inf
    return logits
