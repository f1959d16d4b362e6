"""The losses of the Tinker API: sums over all positions of the log-probabilities of target tokens.

Position t of an input of N tokens predicts target t. Formulas: tinker-docs.thinkingmachines.ai, "Loss functions".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from areal.api.batch import CANDIDATE_IDS, LossOutput, MicroBatch, TokenOutputs, TrainBatch, required
from areal.api.columns import ColumnSpec
from areal.api.metrics import Metric
from areal.data.pack import token_positions
from areal.serve.wire import Datum, LossRequest, invalid

TARGETS = "target_tokens"
Inputs = Mapping[str, Tensor]
"""Of a loss at the positions of a micro-batch: [T, K] float32 by name, and the settings of the loss, for each position
or for all; "sequence" is the number [T] of the sequence, "num_sequences" how many there are, 0 in an empty share."""
NO_FORMULA = ("stable_reinforce",)
"""Losses of the service of Thinking Machines without a published formula."""


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, inputs: Inputs) -> Tensor:
    return torch.minimum(torch.maximum(ratio, inputs["clip_low_threshold"]), inputs["clip_high_threshold"])


def _smaller(ratio: Tensor, inputs: Inputs) -> Tensor:
    """The loss of a ratio that is clipped where that makes it larger."""
    return -torch.minimum(ratio * inputs["advantages"], _clipped(ratio, inputs) * inputs["advantages"])


def _cispo(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return -(_clipped(_ratio(logprobs.detach(), inputs), inputs) * logprobs * inputs["advantages"])


def _dro(logprobs: Tensor, inputs: Inputs) -> Tensor:
    squares = (logprobs - inputs["logprobs"]).square()
    return -(logprobs * inputs["advantages"] - inputs["beta"] / 2 * squares)


def _gspo(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """GSPO-token: the ratio of a sequence, exp of the mean log-ratio over its mask, with the gradient of each token."""
    mask, numbers = inputs["sequence_ratio_mask"], inputs["sequence"]
    sums = logprobs.new_zeros(2, int(inputs["num_sequences"]))
    sums[0].index_add_(0, numbers, ((logprobs.detach() - inputs["logprobs"]) * mask).sum(-1))
    sums[1].index_add_(0, numbers, mask.sum(-1))
    mean = (sums[0] / sums[1].clamp_min(1))[numbers].unsqueeze(-1)
    return _smaller((mean + logprobs - logprobs.detach()).exp(), inputs)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A loss of the API."""

    of: Callable[[Tensor, Inputs], Tensor]
    """Log-probabilities [T, K] and inputs -> the losses of positions, [T, K]."""
    needed: tuple[str, ...] = ("logprobs", "advantages")
    """Inputs that the request must have."""
    settings: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Settings with their defaults; None = there is none."""


_PER_TOKEN = ("clip_low_threshold", "clip_high_threshold")
_LOSSES = {
    "cross_entropy": _Loss(lambda logprobs, inputs: -(inputs["weights"] * logprobs), ("weights",)),
    "importance_sampling": _Loss(lambda logprobs, inputs: -(_ratio(logprobs, inputs) * inputs["advantages"])),
    "ppo": _Loss(
        lambda logprobs, inputs: _smaller(_ratio(logprobs, inputs), inputs),
        settings=dict(zip(_PER_TOKEN, (0.8, 1.2), strict=True)),
    ),
    "cispo": _Loss(_cispo, settings=dict(zip(_PER_TOKEN, (0.0, 4.0), strict=True))),
    "dro": _Loss(_dro, settings={"beta": None}),
    "gspo": _Loss(_gspo, ("logprobs", "advantages", "sequence_ratio_mask"), dict.fromkeys(_PER_TOKEN)),
}


def checked_loss(request: LossRequest) -> None:
    """Raise RequestError for a request that no gradient can be computed of."""
    name = request.loss_fn
    if name in NO_FORMULA:
        raise invalid(f"loss_fn={name} has no published formula: use loss_fn=cispo, ppo or importance_sampling")
    if (loss := _LOSSES.get(name)) is None:
        raise invalid(f"loss_fn={name} is not known: use {', '.join(_LOSSES)}")
    if not request.data:
        raise invalid("the request has no datum")
    for setting in (*_PER_TOKEN, *loss.settings):
        count = sum(setting in datum.inputs for datum in request.data)
        if 0 < count < len(request.data):
            raise invalid(f"{setting} is an input of some data only: give it for all")
        if not count and loss.settings.get(setting, 0.0) is None and setting not in request.config:
            raise invalid(f"{name} needs {setting} in loss_fn_config")
    for number, datum in enumerate(request.data):
        targets = datum.inputs.get(TARGETS)
        if targets is None or targets.ndim not in (1, 2) or len(targets) != len(datum.tokens) or not targets.size:
            raise invalid(f"datum {number} needs one target_tokens for each of its {len(datum.tokens)} tokens")
        for key in (*loss.needed, *(name for name in _PER_TOKEN if name in datum.inputs)):
            if key not in datum.inputs:
                raise invalid(f"datum {number} lacks {key}")
            if (shape := datum.inputs[key].shape) != targets.shape:
                raise invalid(f"datum {number}: {key} has shape {list(shape)}, not {list(targets.shape)}")
        if unknown := datum.inputs.keys() - {TARGETS, *loss.needed, *_PER_TOKEN, "mask", "weights"}:
            raise invalid(f"datum {number}: {name} has no input {min(unknown)}")


def _column(name: str, width: int) -> ColumnSpec:
    return ColumnSpec(f"{name}/{width}", show="", made_by="to_batch")


def to_batch(data: Sequence[Datum], names: Sequence[str], width: int) -> TrainBatch:
    """The batch of these datums. Each has a further token, which nothing predicts, so that its last input has a label.

    `names`: the inputs that become columns, [T, K] float32. `width`: K, that of the widest datum; the rest is 0.
    """
    bounds = np.cumsum([0, *(len(datum.tokens) + 1 for datum in data)])
    total = int(bounds[-1])

    def column(name: str, kind: type[np.generic]) -> Tensor:
        rows = np.zeros((total, width), kind)
        for datum, start in zip(data, bounds, strict=False):
            values = datum.inputs[name].reshape(len(datum.tokens), -1)
            rows[start : start + len(values), : values.shape[1]] = values
        return torch.from_numpy(rows)

    ids = [np.append(datum.tokens, 0) for datum in data]
    count = len(data)
    columns = {_column(name, width): column(name, np.float32) for name in names}
    return TrainBatch(
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        sequence_index=torch.repeat_interleave(torch.arange(count), torch.from_numpy(np.diff(bounds))),
        input_ids=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *ids])),
        loss_mask=torch.ones(total, dtype=torch.bool),
        rollout_logprobs=torch.zeros(total),
        output_versions=torch.zeros(total, dtype=torch.int64),
        rewards=torch.zeros(count),
        group_ids=torch.arange(count),
        finished=torch.ones(count, dtype=torch.bool),
        columns={CANDIDATE_IDS: column(TARGETS, np.int64), **columns},
    )


def _width(datum: Datum) -> int:
    shape = datum.inputs[TARGETS].shape
    return 1 if len(shape) == 1 else shape[1]


@dataclass(frozen=True, slots=True)
class ComputedLoss:
    """The loss of a request on the share of a rank."""

    request: LossRequest
    numbers: range
    """Numbers of the data in the share."""
    batch: TrainBatch
    logprobs: Tensor
    """Those of the target tokens of the share, [T, K], once they are computed."""

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
        loss, width = _LOSSES[self.request.loss_fn], logprobs.shape[1]
        inputs = {name: batch.column(_column(name, width)) for name in input_names(self.request)}
        for name, default in loss.settings.items():
            inputs.setdefault(name, torch.tensor(self.request.config.get(name, default)))
        inputs |= {"sequence": batch.sequence_index, "num_sequences": torch.tensor(batch.num_sequences)}
        return loss.of(logprobs, inputs)

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
    optional = [name for name in _PER_TOKEN if all(name in datum.inputs for datum in request.data)]
    return [*_LOSSES[request.loss_fn].needed, *optional]
