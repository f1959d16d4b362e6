"""Log-probabilities and entropies from hidden states: linear head and softmax in blocks, never all logits at once.

The backward pass computes the blocks (some tokens times some of the vocabulary) again, and their softmax from the saved
logsumexp. With z = logits / temperature, p = softmax(z), H its entropy:

    d log p_i / d z_j = [i = j] - p_j            d H / d z_j = -p_j (log p_j + H)
"""

import re
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.api.batch import OutputSpec, TokenOutputs
from areal.api.errors import ConfigError
from areal.engine.mesh import RankGroup
from areal.models.output_head import unrounded_linear

# ----------------------------------------------------------------------------------------------------------------------
# The part of the vocabulary whose logits a rank computes, and the clamped entropy of a distribution over all parts.


@dataclass(frozen=True, slots=True)
class VocabPart:
    """`size` tokens from `first` of a vocabulary that `ranks` share; None = the whole vocabulary.

    The reductions are over the ranks, in place.
    """

    size: int
    ranks: RankGroup | None = None

    @property
    def first(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank * self.size

    @property
    def vocab_size(self) -> int:
        return self.size if self.ranks is None else self.ranks.size * self.size

    def ids(self, columns: slice) -> slice:
        """The token ids of some columns of this part."""
        return slice(self.first + columns.start, self.first + columns.stop)

    def places(self, wanted: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Positions of token ids [t, k] in some columns of this part, and which of the ids they contain."""
        ids = self.ids(columns)
        inside = (wanted >= ids.start) & (wanted < ids.stop)
        return (wanted - ids.start).masked_fill_(~inside, 0), inside

    def trained_rows(self, valid: Tensor, upstream: tuple[Tensor | None, ...]) -> Tensor | None:
        """Indices of the tokens with a gradient that is not 0 on any rank, NaN included; None = all tokens."""
        reached = torch.zeros_like(valid)
        for values in upstream:
            if values is not None:
                reached |= (values != 0) if values.ndim == 1 else (values != 0).any(1)
        if self.ranks is not None:
            reached = self.max(reached.to(torch.uint8)).bool()
        rows = (reached & valid).nonzero().squeeze(1)
        return None if rows.numel() == valid.numel() else rows

    def sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def min(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MIN)

    def columns(self, values: Tensor) -> Tensor:
        """[T, n] -> [T, n x ranks], in the order of the ranks."""
        if self.ranks is None:
            return values
        parts = [torch.empty_like(values) for _ in range(self.ranks.size)]
        dist.all_gather(parts, values.contiguous(), group=self.ranks.group)
        return torch.cat(parts, dim=1)

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.ranks is not None:
            dist.all_reduce(values, op, group=self.ranks.group)
        return values


def clamped_entropy(logits: Tensor, num_clamped: int, vocab: VocabPart) -> Tensor:
    """Entropy of whole rows [t, V] without the `num_clamped` least likely tokens. Returns [5, t]: lower and upper limit
    around the last kept logit, logsumexp of the kept tokens, the kept part of the last ones, the entropy.

    When the bound is among tokens of equal logits, each counts with the kept part of them: the value is that of any
    choice among them, and the gradient prefers none. The limits are half way to the next different logits, so that
    logits recomputed in other blocks, with other last bits, are on the same side.
    """
    if vocab.ranks is None:
        last = logits.kthvalue(num_clamped + 1, dim=-1, keepdim=True).values
    else:
        last = _kth_of_all(logits, num_clamped + 1, vocab)
    above, tied = logits > last, logits == last
    num_above, num_tied = vocab.sum(torch.stack([above.sum(-1), tied.sum(-1)]))
    part = (vocab.vocab_size - num_clamped - num_above) / num_tied
    lower = vocab.max(logits.masked_fill(logits >= last, float("-inf")).amax(-1))
    higher = vocab.min(logits.masked_fill(~above, float("inf")).amin(-1))
    highest = vocab.max(logits.amax(-1))
    shifted = logits - highest.unsqueeze(1)
    shares = shifted.exp().mul_(torch.where(above, 1.0, tied * part.unsqueeze(1)))
    total, product = vocab.sum(torch.stack([shares.sum(-1), shares.mul_(shifted).sum(-1)]))
    entropy = total.log() - product / total
    middle = last.squeeze(1)
    return torch.stack([(middle + lower) / 2, (middle + higher) / 2, highest + total.log(), part, entropy])


def _kth_of_all(logits: Tensor, k: int, vocab: VocabPart) -> Tensor:
    """The k-th smallest value of each row [t, 1], exactly, from the parts [t, n] of all ranks.

    A search over the integers that order floating-point numbers, with one count per row and step: the ranks exchange
    t numbers as often as a number has bits, and no logits.
    """
    kind = torch.int32 if logits.dtype == torch.float32 else torch.int64
    bits = torch.iinfo(kind).bits
    rest = torch.iinfo(kind).max  # all bits but the sign
    raw = (logits + 0.0).view(kind)  # without negative zeros
    keys = torch.where(raw < 0, raw ^ rest, raw).sort(-1).values
    low = torch.full((logits.shape[0], 1), torch.iinfo(kind).min, dtype=kind, device=logits.device)
    high = torch.full_like(low, rest)
    for _ in range(bits):
        middle = (low & high) + ((low ^ high) >> 1)  # the mean rounded down, without overflow
        enough = vocab.sum(torch.searchsorted(keys, middle, right=True)) >= k
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle + 1)
    return torch.where(high < 0, high ^ rest, high).view(logits.dtype)


MAX_LOGITS_CPU = 2**22
"""Logits per block on the CPU: 16 MiB in float32, so that a block fits the cache."""
MAX_LOGITS = 2**26
"""Logits per block on other devices: 256 MiB in float32, so that a block uses the whole device."""
MAX_ROW_LOGITS = 2**24
"""Minimum logits per block of whole rows, which the clamped entropy needs in the forward pass."""
MAX_BLOCK_TOKENS = 8192
"""Maximum tokens per block, so that blocks do not become long and narrow."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    outputs: OutputSpec | None = None,
    candidate_ids: Tensor | None = None,
    valid: Tensor | None = None,
    max_logits: int | None = None,
    softcap: float | None = None,
    float32_head: bool = False,
    tensor_ranks: RankGroup | None = None,
) -> TokenOutputs:
    """Compute log_softmax((hidden @ weight.T + bias) / temperature) at the labels, and the other `outputs`.

    hidden [T, h], weight [V, h] and bias [V] have one dtype; labels [T] int64 in [0, V); temperature one number or [T]
    float32; valid [T] bool, false where all outputs are 0 without gradient (default: all true). candidate_ids [T, k]
    int64 are used when outputs.candidates is not None; without them the most likely tokens, in descending order, or all
    V tokens if it is 0, the only case that materialises [T, V] (candidate_ids is None then). `max_logits`: size of a
    block. `softcap`: a logit z is softcap * tanh(z / softcap), before the temperature. `float32_head`: logits are not
    rounded. Outputs: float32, or float64 for such. `tensor_ranks` have equal hidden states, and each the next V / t
    rows of weight and bias; ids and outputs are those of the whole vocabulary.

    Gradients flow to hidden, weight and bias; those of a bfloat16 weight are summed in float32 and rounded once. Tokens
    whose upstream gradients are all 0 (prompts, clipped ratios) are skipped in the backward pass.
    """
    if isinstance(weight, DTensor):
        raise RuntimeError("the head's weight is still sharded: it must belong to the model's outermost FSDP unit")
    outputs = outputs or OutputSpec()
    count, wanted = outputs.candidates, labels.unsqueeze(1)
    candidate_ids = None if count is None else candidate_ids
    if candidate_ids is not None:
        wanted, count = torch.cat([wanted, candidate_ids], dim=1), None
    vocab, is_cpu = VocabPart(weight.shape[0], tensor_ranks), hidden.device.type == "cpu"
    plan = _Plan(
        temperature=temperature,
        spec=outputs,
        num_clamped=int(vocab.vocab_size * outputs.entropy_clamp),
        top_k=min(count or 0, vocab.vocab_size),
        vocab=vocab,
        all_tokens=count == 0,
        max_logits=max_logits or (MAX_LOGITS_CPU if is_cpu else MAX_LOGITS),
        max_row_logits=max_logits or (MAX_ROW_LOGITS if is_cpu else MAX_LOGITS),
        softcap=softcap,
        float32_head=float32_head,
    )
    valid = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid
    applied: Any = _LinearLogprobs.apply(hidden, weight, bias, wanted, valid, plan)
    logprobs, entropy, clamped, candidates, top_ids, squared_sums = applied
    ids = top_ids if candidate_ids is None else candidate_ids.masked_fill(~valid.unsqueeze(1), 0)
    return TokenOutputs(
        logprobs=logprobs,
        entropy=entropy,
        clamped_entropy=clamped,
        candidate_logprobs=candidates,
        candidate_ids=None if candidates is None else ids,
        squared_sums=squared_sums,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    temperature: float | Tensor
    vocab: VocabPart
    spec: OutputSpec
    num_clamped: int  # tokens left out of the clamped entropy
    top_k: int
    all_tokens: bool
    max_logits: int
    max_row_logits: int
    softcap: float | None
    float32_head: bool

    def of(self, rows: Tensor) -> Self:
        return replace(self, temperature=self.temperature[rows]) if isinstance(self.temperature, Tensor) else self

    def divided(self, values: Tensor, tokens: slice) -> Tensor:
        """Divide values [t, v] in place."""
        each = self.temperature[tokens, None] if isinstance(self.temperature, Tensor) else self.temperature
        return values if isinstance(each, float) and each == 1.0 else values.div_(each)

    def slopes(self, logits: Tensor, tokens: slice) -> Tensor | None:
        """Derivative of capped logits by those before; None without a cap. `logits`: after the temperature."""
        if self.softcap is None:
            return None
        each = self.temperature[tokens, None] if isinstance(self.temperature, Tensor) else self.temperature
        return logits.mul(each / self.softcap).square_().neg_().add_(1.0)

    def rows(self, num_tokens: int, vocab_size: int) -> tuple[list[slice], list[slice]]:
        """Slices of the tokens, and the whole vocabulary."""
        return _even_slices(num_tokens, max(self.max_row_logits // vocab_size, 1)), [slice(0, vocab_size)]

    def blocks(self, num_tokens: int, vocab_size: int) -> tuple[list[slice], list[slice]]:
        """Slices of the tokens and of the vocabulary."""
        tokens = _even_slices(num_tokens, MAX_BLOCK_TOKENS)
        longest = max((cut.stop - cut.start for cut in tokens), default=1)
        return tokens, _even_slices(vocab_size, max(self.max_logits // longest, 1))


class _LinearLogprobs(torch.autograd.Function):
    """-> log-probabilities, entropy, clamped entropy [T], candidates, their ids [T, k], sums of p^2 [T]; or None."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, valid: Tensor, plan: _Plan
    ) -> tuple[Tensor | None, ...]:
        cut = plan.rows if plan.spec.entropy_clamp else plan.blocks
        token_cuts, vocab_cuts = cut(hidden.shape[0], weight.shape[0])
        is_small = len(token_cuts) == len(vocab_cuts) == 1 and plan.softcap is None
        forward = _Forward(hidden, weight, wanted, plan)
        kept = None
        for tokens in token_cuts:
            for vocabulary in vocab_cuts:
                logits = _logits(hidden, weight, bias, tokens, vocabulary, plan)
                forward.add(logits, tokens, vocabulary)
                if is_small and any(ctx.needs_input_grad):
                    kept = logits  # `add` has subtracted their maximum
        forward.merge_ranks(kept)
        result = forward.finish(~valid, is_less_highest=kept is not None)
        ctx.plan = plan
        saved = (forward.wanted, valid, forward.logsumexp, result[1], forward.clamp, kept)
        ctx.save_for_backward(hidden, weight, bias, *saved)
        constants = [values for values in result[4:] if values is not None]
        ctx.mark_non_differentiable(*constants, *([] if plan.spec.entropy_grad else [result[1]]))
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, wanted, valid, logsumexp, entropy, clamp, kept = ctx.saved_tensors
        rows = ctx.plan.vocab.trained_rows(valid, upstream)
        if rows is not None:
            upstream = tuple(None if values is None else values[rows] for values in upstream)
            wanted, logsumexp, entropy = wanted[rows], logsumexp[rows], entropy[rows]
            clamp = None if clamp is None else clamp[:, rows]
            kept = None if kept is None else kept[rows]
        plan: _Plan = ctx.plan if rows is None else ctx.plan.of(rows)
        backward = _Backward(wanted, logsumexp, entropy, clamp, upstream, plan)
        states = hidden if rows is None else hidden[rows]
        grads = _Gradients(states, weight, bias, ctx.needs_input_grad)
        token_cuts, vocab_cuts = ctx.plan.blocks(states.shape[0], weight.shape[0])
        for vocabulary in vocab_cuts:
            for tokens in token_cuts:
                if kept is None:
                    logits = _logits(states, weight, bias, tokens, vocabulary, plan)
                else:
                    part = kept[tokens, vocabulary]
                    logits = part.clone() if rows is None else part  # backward may run twice
                slopes = plan.slopes(logits, tokens)
                grad = backward.block(logits, tokens, vocabulary)
                grads.add(grad if slopes is None else grad.mul_(slopes), tokens, vocabulary)
        grad_hidden = grads.hidden
        if grad_hidden is not None:
            grad_hidden = plan.vocab.sum(grad_hidden).to(hidden.dtype)
            if rows is not None:
                grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_hidden)
        grad_bias = None if grads.bias is None else grads.bias.to(bias.dtype)
        return grad_hidden, grads.weight, grad_bias, None, None, None


class _Forward:
    """Accumulated state of each token over blocks of the vocabulary."""

    def __init__(self, hidden: Tensor, weight: Tensor, wanted: Tensor, plan: _Plan) -> None:
        size, options = hidden.shape[0], {"dtype": _exact(hidden.dtype), "device": hidden.device}
        self.wanted = wanted
        self._plan = plan
        self._highest = torch.full((size,), torch.finfo(_exact(hidden.dtype)).min, **options)
        self._total = torch.zeros(size, **options)
        self._product = torch.zeros(size, **options)
        self._squares = torch.zeros(size, **options) if plan.spec.squared_sums else None
        self._found = torch.zeros(wanted.shape, **options)
        self.clamp = torch.zeros((5, size), **options) if plan.spec.entropy_clamp else None
        self._all = torch.empty((size, weight.shape[0]), **options) if plan.all_tokens else None
        self._top = torch.full((size, plan.top_k), float("-inf"), **options)
        self._top_ids = torch.zeros((size, plan.top_k), dtype=torch.int64, device=hidden.device)

    def add(self, logits: Tensor, tokens: slice, vocabulary: slice) -> None:
        """Add a block of logits [t, v] in place: afterwards it contains the logits minus the maximum so far."""
        places, inside = self._plan.vocab.places(self.wanted[tokens], vocabulary)
        self._found[tokens] = torch.where(inside, logits.gather(1, places), self._found[tokens])
        if self._all is not None:
            self._all[tokens, vocabulary] = logits
        if self._plan.top_k:
            self._merge_top(logits, tokens, vocabulary)
        if self.clamp is not None:
            self.clamp[:, tokens] = clamped_entropy(logits, self._plan.num_clamped, self._plan.vocab)
        before, total, product = self._highest[tokens], self._total[tokens], self._product[tokens]
        highest = torch.maximum(before, logits.amax(-1))
        shift = before - highest
        decay = shift.exp()
        logits.sub_(highest.unsqueeze(1))
        weights = logits.exp()
        if self._squares is not None:
            self._squares[tokens] = self._squares[tokens] * decay.square() + weights.square().sum(-1)
        moved = product + shift * total  # of earlier blocks, relative to the new maximum
        self._highest[tokens] = highest
        self._total[tokens] = total * decay + weights.sum(-1)
        self._product[tokens] = moved * decay + weights.mul_(logits).sum(-1)

    def merge_ranks(self, kept: Tensor | None) -> None:
        """Make the state that of the whole vocabulary. `kept` [T, V / t]: logits minus the maximum of this rank."""
        vocab = self._plan.vocab
        if vocab.ranks is None:
            return
        shift = self._highest
        self._highest = vocab.max(shift.clone())
        shift = shift.sub_(self._highest)
        decay = shift.exp()
        sums = [self._total * decay, (self._product + shift * self._total) * decay]
        if self._squares is not None:
            sums.append(self._squares * decay.square())
        self._total, self._product, *squares = vocab.sum(torch.stack(sums)).unbind()
        self._squares = squares[0] if squares else None
        self._found = vocab.sum(self._found)
        if self._all is not None:
            self._all = vocab.columns(self._all)
        if self._plan.top_k:
            ids = vocab.columns(self._top_ids)
            self._top, order = vocab.columns(self._top).topk(self._plan.top_k, dim=-1)
            self._top_ids = ids.gather(1, order)
        if kept is not None:
            kept.add_(shift.unsqueeze(1))

    def finish(self, left_out: Tensor, *, is_less_highest: bool) -> tuple[Tensor | None, ...]:
        """Return the outputs, 0 at positions that are not valid. Sets `logsumexp`, of the logits or of the logits minus
        their maximum."""
        log_total = self._total.log()
        self.logsumexp = log_total if is_less_highest else self._highest + log_total
        entropy = log_total - self._product / self._total

        def normalised(values: Tensor) -> Tensor:
            # the difference of two large numbers first, because it is exact
            values = values.sub_(self._highest.unsqueeze(1)).sub_(log_total.unsqueeze(1))
            return values.masked_fill_(left_out.unsqueeze(1), 0.0)

        summed = normalised(self._found)
        candidates, ids = summed[:, 1:].clone() if summed.shape[1] > 1 else None, None
        if self._all is not None:
            candidates = normalised(self._all)
        elif self._plan.top_k:
            candidates, ids = normalised(self._top), self._top_ids.masked_fill_(left_out.unsqueeze(1), 0)
            self.wanted = torch.cat([self.wanted, ids], dim=1)
        clamped = None
        if self.clamp is not None:
            clamped = self.clamp[-1].masked_fill(left_out, 0.0)
            if is_less_highest:
                self.clamp[:3] -= self._highest
        squares = self._squares
        if squares is not None:
            squares = (squares / self._total.square()).masked_fill(left_out, 0.0)
        # copies, because FSDP warns about outputs that are views
        return summed[:, 0].clone(), entropy.masked_fill(left_out, 0.0), clamped, candidates, ids, squares

    def _merge_top(self, logits: Tensor, tokens: slice, vocabulary: slice) -> None:
        count = self._plan.top_k
        best, places = logits.topk(min(count, logits.shape[1]), dim=-1)
        values = torch.cat([self._top[tokens], best], dim=1)
        ids = torch.cat([self._top_ids[tokens], places + self._plan.vocab.ids(vocabulary).start], dim=1)
        self._top[tokens], order = values.topk(count, dim=-1)
        self._top_ids[tokens] = ids.gather(1, order)


class _Backward:
    """Gradients of the logits of a block from the gradients of the outputs."""

    def __init__(
        self,
        wanted: Tensor,
        logsumexp: Tensor,
        entropy: Tensor,
        clamp: Tensor | None,
        upstream: tuple[Tensor | None, ...],
        plan: _Plan,
    ) -> None:
        on_label, self._on_entropy, self._on_clamped, on_candidates = upstream[:4]
        self._logsumexp, self._entropy, self._clamp, self._plan = logsumexp, entropy, clamp, plan
        self._on_all = on_candidates if plan.all_tokens else None
        parts = [torch.zeros_like(logsumexp) if on_label is None else on_label.to(logsumexp.dtype)]
        self._on_wanted = parts[0].unsqueeze(1)
        self._mass = parts[0]
        if on_candidates is not None:
            self._mass = self._mass + on_candidates.sum(1)
        if wanted.shape[1] > 1 and on_candidates is not None:
            self._on_wanted = torch.cat([self._on_wanted, on_candidates], dim=1)
        self._wanted = wanted[:, : self._on_wanted.shape[1]]

    def block(self, logits: Tensor, tokens: slice, vocabulary: slice) -> Tensor:
        """Return d loss / d (unscaled logits), [t, v]. Overwrites the logits."""
        clamped = None
        if self._on_clamped is not None and self._clamp is not None:
            low, high, logsumexp, part, entropy = self._clamp[:, tokens].unsqueeze(2)
            stays = torch.where(logits > high, 1.0, torch.where(logits > low, part, 0.0))
            log_share = logits - logsumexp
            clamped = stays.mul_(log_share.exp()).mul_(log_share.add_(entropy)).mul_(self._on_clamped[tokens, None])
        logits.sub_(self._logsumexp[tokens].unsqueeze(1))
        mass = self._mass[tokens].unsqueeze(1)
        if self._on_entropy is None:
            grad = logits.exp_().mul_(-mass)
        else:
            probabilities = logits.exp()
            factor = logits.add_(self._entropy[tokens].unsqueeze(1)).mul_(self._on_entropy[tokens].unsqueeze(1))
            grad = probabilities.mul_(factor.add_(mass)).neg_()
        if clamped is not None:
            grad.sub_(clamped)
        places, inside = self._plan.vocab.places(self._wanted[tokens], vocabulary)
        grad.scatter_add_(1, places, torch.where(inside, self._on_wanted[tokens], 0.0))
        if self._on_all is not None:
            grad.add_(self._on_all[tokens, self._plan.vocab.ids(vocabulary)])
        return self._plan.divided(grad, tokens)


class _Gradients:
    """The gradients of hidden states, weight and bias, summed over blocks in float32."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self._states, self._weight = hidden, weight
        exact = _exact(hidden.dtype)
        self.hidden = torch.zeros(hidden.shape, dtype=exact, device=hidden.device) if needed[0] else None
        self.weight = torch.zeros_like(weight) if needed[1] else None
        self.bias = torch.zeros(bias.shape, dtype=exact, device=bias.device) if bias is not None and needed[2] else None
        self._rows: Tensor | None = None

    def add(self, grad: Tensor, tokens: slice, vocabulary: slice) -> None:
        """Add one block, [t, v]; the token blocks of a vocabulary block follow one another."""
        is_last = tokens.stop == self._states.shape[0]
        if self.bias is not None:
            self.bias[vocabulary] += grad.sum(0)
        grad = grad.to(self._weight.dtype)
        if self.hidden is not None:
            _add_product(self.hidden[tokens], grad, self._weight[vocabulary])
        if self.weight is None:
            return
        if tokens.start == 0 and is_last:  # a single token block: no accumulator
            torch.mm(grad.T, self._states, out=self.weight[vocabulary])
            return
        if tokens.start == 0:
            shape = (grad.shape[1], self._weight.shape[1])
            self._rows = torch.zeros(shape, dtype=_exact(grad.dtype), device=grad.device)
        assert self._rows is not None
        _add_product(self._rows, grad.T, self._states[tokens])
        if is_last:
            self.weight[vocabulary] = self._rows.to(self.weight.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    total.addmm_(left, right) if total.dtype == left.dtype else total.add_(left @ right)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: slice, vocab: slice, plan: _Plan) -> Tensor:
    """A block of capped logits divided by temperature, [t, v], in new memory."""
    linear = unrounded_linear if plan.float32_head else F.linear
    logits = linear(hidden[tokens], weight[vocab], None if bias is None else bias[vocab]).to(_exact(hidden.dtype))
    if plan.softcap is not None:
        logits = logits.div_(plan.softcap).tanh_().mul_(plan.softcap)
    return plan.divided(logits, tokens)


def _even_slices(total: int, limit: int) -> list[slice]:
    count = -(-total // limit)
    bounds = [total * i // count for i in range(count + 1)] if count else []
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ----------------------------------------------------------------------------------------------------------------------
# Log-probabilities by Liger's fused linear cross-entropy. CUDA only; no entropies and no candidates.

MIN_VERSION = (0, 8, 2)
"""Older versions multiply every token's gradient by that of the first token, without an error (Liger PR 1298)."""
NO_LABEL = -100  # no token has it: positions that are not valid are masked afterwards


def require_liger(device: torch.device, outputs: OutputSpec, tensor_ranks: int = 1) -> None:
    """Raise ConfigError unless logprob_kernel=liger can compute `outputs` on `device`."""
    try:
        installed = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        installed = ""
    wanted = ".".join(map(str, MIN_VERSION))
    if outputs != OutputSpec():
        problem = "computes log-probabilities only, but entropy bonuses and full KL divergences need more"
    elif tensor_ranks > 1:
        problem = f"needs the whole vocabulary on each rank, but {tensor_ranks} tensor ranks split it"
    elif device.type != "cuda":
        problem = f"needs CUDA, but the device is {device.type}"
    elif not installed:
        problem = f"needs the package liger-kernel: pip install 'liger-kernel>={wanted}'"
    elif tuple(map(int, re.findall(r"\d+", installed)[:3])) < MIN_VERSION:
        problem = f"needs liger-kernel {wanted} or newer, but {installed} is installed, which computes wrong gradients"
    else:
        return
    raise ConfigError(f"logprob_kernel=liger {problem}; or use logprob_kernel=torch", code="model.liger_unavailable")


def liger_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, valid: Tensor) -> Tensor:
    """Compute log_softmax(hidden @ weight.T + bias) at the labels: [T] float32 with gradients, 0 where not valid.

    hidden [T, h], weight [V, h], bias [V] or None, labels [T] int64, valid [T] bool. The gradients of weight and bias
    are summed in float32.
    """
    from liger_kernel.ops import fused_linear_cross_entropy as liger  # pyright: ignore[reportMissingImports]

    # class weights, ignored label, z-loss, smoothing, reduction, soft cap, whether to return z-loss, type of the sums
    losses = liger.LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, labels, bias, None, NO_LABEL, 0.0, 0.0, "none", None, False, torch.float32
    )  # fmt: skip
    return torch.where(valid, -losses[0], 0.0)
