"""The losses of the Tinker API: sums over all positions of the log-probabilities of target tokens.

Position t of an input of N tokens predicts target t. Formulas: tinker-docs.thinkingmachines.ai, "Loss functions".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal.api.batch import CANDIDATE_IDS, LossOutput, MicroBatch, TokenOutputs, TrainBatch, required
from areal.api.columns import ColumnSpec
from areal.api.errors import RequestError
from areal.api.metrics import Metric
from areal.data.pack import token_positions
from areal.serve.wire import Datum, LossRequest

TARGETS = "target_tokens"
_DEFAULTS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}  # Loss -> default clip_low_threshold and clip_high_threshold.
NO_FORMULA = ("stable_reinforce",)
"""Losses of the service of Thinking Machines without a published formula."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a loss at the positions of a micro-batch: [T, K] float32 by name, `weights` for cross_entropy only."""

    columns: Mapping[str, Tensor]
    config: Mapping[str, float]
    sequence_index: Tensor
    num_sequences: int

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def threshold(self, name: str, default: float | None) -> Tensor | float:
        """A clip threshold: one for each token where the request has those, else that of the configuration."""
        if name in self.columns:
            return self.columns[name]
        return self.config[name] if default is None else self.config.get(name, default)


def _ratio(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, inputs: LossInputs, name: str) -> Tensor:
    low, high = _DEFAULTS.get(name, (None, None))
    clipped = torch.maximum(ratio, torch.as_tensor(inputs.threshold("clip_low_threshold", low)))
    return torch.minimum(clipped, torch.as_tensor(inputs.threshold("clip_high_threshold", high)))


def _cross_entropy(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    return -(inputs["weights"] * logprobs)


def _importance_sampling(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    return -(_ratio(logprobs, inputs) * inputs["advantages"])


def _ppo(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, "ppo") * advantages)


def _cispo(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    ratio = _ratio(logprobs.detach(), inputs)
    return -(_clipped(ratio, inputs, "cispo") * logprobs * inputs["advantages"])


def _dro(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    half_beta = inputs.threshold("beta", None) / 2
    return -(logprobs * inputs["advantages"] - half_beta * (logprobs - inputs["logprobs"]).square())


def _gspo(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """GSPO-token: the ratio of a sequence, exp of the mean log-ratio over its mask, with the gradient of each token."""
    mask, advantages = inputs["sequence_ratio_mask"], inputs["advantages"]
    sums = logprobs.new_zeros(2, inputs.num_sequences)
    sums[0].index_add_(0, inputs.sequence_index, ((logprobs.detach() - inputs["logprobs"]) * mask).sum(-1))
    sums[1].index_add_(0, inputs.sequence_index, mask.sum(-1))
    mean = (sums[0] / sums[1].clamp_min(1))[inputs.sequence_index].unsqueeze(-1)
    ratio = (mean + logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, "gspo") * advantages)


_ROLLOUT = ("logprobs", "advantages")
_LOSSES: Mapping[str, tuple[Callable[[Tensor, LossInputs], Tensor], tuple[str, ...]]] = {
    "cross_entropy": (_cross_entropy, ("weights",)),
    "importance_sampling": (_importance_sampling, _ROLLOUT),
    "ppo": (_ppo, _ROLLOUT),
    "cispo": (_cispo, _ROLLOUT),
    "dro": (_dro, _ROLLOUT),
    "gspo": (_gspo, (*_ROLLOUT, "sequence_ratio_mask")),
}
"""Name -> the losses of positions, [T, K], and the inputs that the request must have."""
_PER_TOKEN = ("clip_low_threshold", "clip_high_threshold")
_NEEDED = {"gspo": _PER_TOKEN, "dro": ("beta",)}  # Settings without a default.


def checked_loss(request: LossRequest) -> None:
    """Raise RequestError for a request that no gradient can be computed of."""
    if request.loss_fn in NO_FORMULA:
        text = f"loss_fn={request.loss_fn} has no published formula: use loss_fn=cispo, ppo or importance_sampling"
        raise RequestError(text, code="request.invalid_field")
    if request.loss_fn not in _LOSSES:
        text = f"loss_fn={request.loss_fn} is not known: use {', '.join(_LOSSES)}"
        raise RequestError(text, code="request.invalid_field")
    if not request.data:
        raise RequestError("the request has no datum", code="request.invalid_field")
    known = {TARGETS, *_LOSSES[request.loss_fn][1], *_PER_TOKEN, "mask", "weights"}
    needed = _NEEDED.get(request.loss_fn, ())
    for name in (*_PER_TOKEN, *needed):
        count = sum(name in datum.inputs for datum in request.data)
        if 0 < count < len(request.data):
            raise RequestError(f"{name} is an input of some data only: give it for all", code="request.invalid_field")
        if not count and name in needed and name not in request.config:
            raise RequestError(f"{request.loss_fn} needs {name} in loss_fn_config", code="request.invalid_field")
    for number, datum in enumerate(request.data):
        targets = datum.inputs.get(TARGETS)
        if targets is None or targets.ndim not in (1, 2) or len(targets) != len(datum.tokens) or not targets.size:
            text = f"datum {number} needs one target_tokens for each of its {len(datum.tokens)} tokens"
            raise RequestError(text, code="request.invalid_field")
        given = [name for name in _PER_TOKEN if name in datum.inputs]
        for name in (TARGETS, *_LOSSES[request.loss_fn][1], *given):
            if name not in datum.inputs:
                raise RequestError(f"datum {number} lacks {name}", code="request.invalid_field")
            if datum.inputs[name].shape != targets.shape:
                text = f"datum {number}: {name} has shape {list(datum.inputs[name].shape)}, not {list(targets.shape)}"
                raise RequestError(text, code="request.invalid_field")
        if unknown := datum.inputs.keys() - known:
            text = f"datum {number}: {request.loss_fn} has no input {min(unknown)}"
            raise RequestError(text, code="request.invalid_field")


def _column(name: str, width: int) -> ColumnSpec:
    return ColumnSpec(f"{name}/{width}", show="", made_by="to_batch")


def to_batch(data: Sequence[Datum], names: Sequence[str], width: int) -> TrainBatch:
    """The batch of these datums. Each has a further token, which nothing predicts, so that its last input has a label.

    `names`: the inputs that become columns, [T, K] float32. `width`: K, that of the widest datum; the rest is 0.
    """
    lengths = [len(datum.tokens) + 1 for datum in data]
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(bounds[-1])
    ids, targets = np.zeros(total, np.int64), np.zeros((total, width), np.int64)
    columns = {name: np.zeros((total, width), np.float32) for name in names}
    for datum, start in zip(data, bounds, strict=False):
        end = start + len(datum.tokens)
        ids[start:end] = datum.tokens
        found = datum.inputs[TARGETS].reshape(len(datum.tokens), -1)
        targets[start:end, : found.shape[1]] = found
        for name, column in columns.items():
            column[start:end, : found.shape[1]] = datum.inputs[name].reshape(len(datum.tokens), -1)
    count = len(data)
    nothing = torch.zeros(total)
    specs = {_column(name, width): torch.from_numpy(column) for name, column in columns.items()}
    return TrainBatch(
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        sequence_index=torch.repeat_interleave(torch.arange(count), torch.tensor(lengths, dtype=torch.int64)),
        input_ids=torch.from_numpy(ids),
        loss_mask=torch.ones(total, dtype=torch.bool),
        rollout_logprobs=nothing,
        output_versions=torch.zeros(total, dtype=torch.int64),
        rewards=torch.zeros(count),
        group_ids=torch.arange(count),
        finished=torch.ones(count, dtype=torch.bool),
        columns={CANDIDATE_IDS: torch.from_numpy(targets), **specs},
    )


def _width(one: Datum) -> int:
    shape = one.inputs[TARGETS].shape
    return 1 if len(shape) == 1 else shape[1]


@dataclass(frozen=True, slots=True)
class ComputedLoss:
    """The loss of a request on the share of a rank."""

    request: LossRequest
    numbers: range
    """Of the data in the share."""
    batch: TrainBatch
    logprobs: Tensor
    """Of the target tokens of the share, [T, K], once it is computed."""

    @classmethod
    def of(cls, request: LossRequest, rank: int, num_ranks: int) -> "ComputedLoss":
        """The share of data-parallel rank `rank`, which may be empty."""
        numbers, width = range(rank, len(request.data), num_ranks), max(map(_width, request.data))
        batch = to_batch([request.data[number] for number in numbers], input_names(request), width)
        return cls(request, numbers, batch, torch.zeros(batch.num_tokens, width))

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """The `LossFn` of the engine."""
        logprobs = required(outputs.candidate_logprobs, "candidate_logprobs")
        positions, _ = token_positions(self.batch.cu_seqlens, micro.source_index)
        self.logprobs[positions] = logprobs.detach().float().cpu()
        losses = self._losses(logprobs, micro.batch)
        return LossOutput(loss=losses.sum(), metrics={"loss:sum": Metric(float(losses.detach().sum()), 1.0)})

    def of_outputs(self, outputs: TokenOutputs) -> float:
        """The loss of a pass without gradients over the whole batch."""
        logprobs = required(outputs.candidate_logprobs, "candidate_logprobs")
        self.logprobs.copy_(logprobs)
        return float(self._losses(logprobs, self.batch).sum())

    def _losses(self, logprobs: Tensor, batch: TrainBatch) -> Tensor:
        function, _ = _LOSSES[self.request.loss_fn]
        width = logprobs.shape[1]
        columns = {
            name: batch.column(spec)
            for name in input_names(self.request)
            if (spec := _column(name, width)) in batch.columns
        }
        inputs = LossInputs(columns, self.request.config, batch.sequence_index, batch.num_sequences)
        return function(logprobs, inputs)

    def by_datum(self, reduce_sum: Callable[[Tensor], Tensor]) -> list[np.ndarray]:
        """The log-probabilities of all data, float32 in the shapes of their target_tokens; a collective.

        `reduce_sum`: of a CPU float64 tensor over the shares.
        """
        shapes = [datum.inputs[TARGETS].shape for datum in self.request.data]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes]).tolist()
        flat, bounds = torch.zeros(ends[-1], dtype=torch.float64), self.batch.cu_seqlens.tolist()
        for number, start in zip(self.numbers, bounds, strict=False):
            length, width = len(self.request.data[number].tokens), _width(self.request.data[number])
            flat[ends[number] - length * width : ends[number]] = self.logprobs[start : start + length, :width].flatten()
        whole = reduce_sum(flat).float().numpy()
        return [part.reshape(shape) for part, shape in zip(np.split(whole, ends[:-1]), shapes, strict=True)]


def input_names(request: LossRequest) -> list[str]:
    """The inputs of the loss that the request has, without the target tokens."""
    _, needed = _LOSSES[request.loss_fn]
    return [*needed, *(name for name in _PER_TOKEN if all(name in datum.inputs for datum in request.data))]
