"""A train engine small enough to reason about: a table of logits, token by token, and ranks that are threads."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from areal.api.batch import MicroBatch, TokenOutputs, TrainBatch
from areal.api.metrics import Metric, merge_metrics

VOCABULARY = 6


class RankGroup:
    """All-reduce among threads."""

    def __init__(self, size, *, is_for_thread=False):
        self.size = size
        self.for_thread = None if is_for_thread else RankGroup(size, is_for_thread=True)
        self._barrier = threading.Barrier(size, timeout=200)
        self._slots = [None] * size

    def all_reduce(self, rank, values, op):
        if self.size == 1:
            return values
        self._slots[rank] = values
        self._barrier.wait()
        stacked = torch.stack(self._slots)
        self._barrier.wait()
        return {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]

    def gather(self, rank, content):
        self._slots[rank] = content
        self._barrier.wait()
        contents = self._slots[1:] if rank == 0 else []
        self._barrier.wait()
        return contents

    def run(self, function):
        """Call function(rank) on every rank; the results in order."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(function, rank) for rank in range(self.size)]
            return [future.result(timeout=250) for future in futures]


class TableEngine:
    """log p(next | token) = log_softmax(table[token]), V(token) = value_of[token]; float64; plain gradient descent."""

    def __init__(self, *, critic=False, num_micro_batches=1, lr=1.0, rank=0, group=None):
        generator = torch.Generator().manual_seed(7)
        shape = (VOCABULARY,) if critic else (VOCABULARY, VOCABULARY)
        self.table = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        self.critic, self.num_micro_batches, self.lr = critic, num_micro_batches, lr
        self.group, self.dp_rank = group or RankGroup(1), rank
        self.dp_size = self.group.size
        self.num_forwards, self.denominators, self.gradients, self.minibatches = 0, [], [], []

    def outputs(self, batch):
        ids = batch.input_ids
        last = torch.zeros_like(batch.loss_mask)
        last[batch.cu_seqlens[1:].long() - 1] = True
        if self.critic:
            return TokenOutputs(values=torch.where(last, 0.0, self.table[ids]))
        distribution = self.table[ids].log_softmax(-1)
        logprobs = distribution.gather(1, ids.roll(-1)[:, None]).squeeze(1)
        squared_sums = torch.where(last, 0.0, distribution.exp().square().sum(-1).detach())
        entropy = -(distribution.exp() * distribution).sum(-1).detach()
        return TokenOutputs(
            logprobs=torch.where(last, 0.0, logprobs),
            entropy=torch.where(last, 0.0, entropy),
            squared_sums=squared_sums,
        )

    def forward(self, batch):
        self.num_forwards += 1
        with torch.no_grad():
            result = self.outputs(batch)
        return TokenOutputs(
            logprobs=None if self.critic else result.logprobs.float(),
            entropy=None if self.critic else result.entropy.float(),
            values=result.values.float() if self.critic else None,
            squared_sums=None if result.squared_sums is None else result.squared_sums.float(),
        )

    def forward_backward(self, batch, loss_fn, *, denominator):
        self.denominators.append(denominator)
        self.minibatches.append(batch)
        metrics = {}
        for part in range(self.num_micro_batches):
            indices = list(range(part, batch.num_sequences, self.num_micro_batches))
            micro = select(batch, indices)
            loss = loss_fn(
                self.outputs(micro),
                MicroBatch(
                    batch=micro,
                    position_ids=torch.zeros_like(micro.input_ids),
                    max_seqlen=max(micro.sequence_lengths, default=0),
                    source_index=indices,
                ),
            )
            (loss.loss / denominator).backward()
            metrics = merge_metrics(metrics, loss.metrics)
        return metrics

    def optimizer_step(self):
        gradient = torch.zeros_like(self.table) if self.table.grad is None else self.table.grad
        gradient = self.group.all_reduce(self.dp_rank, gradient.clone(), "sum")
        self.gradients.append(gradient)
        with torch.no_grad():
            self.table -= self.lr * gradient
        self.table.grad = None
        return {"grad_norm": Metric(float(gradient.norm()))}

    def all_reduce(self, values, op="sum"):
        assert values.dtype == torch.float64
        return self.group.all_reduce(self.dp_rank, values, op)


def select(batch, indices):
    """The sequences of a batch at these places (kept apart from areal.data.pack on purpose)."""
    bounds = batch.cu_seqlens.tolist()
    rows = torch.tensor([t for s in indices for t in range(bounds[s], bounds[s + 1])], dtype=torch.int64)
    lengths = [bounds[s + 1] - bounds[s] for s in indices]
    ours = {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "sequence_index": torch.arange(len(indices)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
    }
    per_sequence = {f.name for f in dataclasses.fields(TrainBatch) if f.metadata.get("per") == "sequence"}
    fields = {}
    for name in TrainBatch.__dataclass_fields__:
        value = getattr(batch, name)
        if name not in ours and isinstance(value, torch.Tensor):
            fields[name] = value[torch.tensor(indices, dtype=torch.int64) if name in per_sequence else rows]
    chosen = {"token": rows, "sequence": torch.tensor(indices, dtype=torch.int64)}
    fields["columns"] = {spec: values[chosen[spec.per]] for spec, values in batch.columns.items()}
    return replace(batch, **fields, **ours)


def make_batch(sequences, *, prompt_length=1, rewards=None, group_ids=None, finished=None, rollout=None):
    """Pack token lists; everything after the prompt is trained on. `rollout` [T] overrides the default of -1.5."""
    count = len(sequences)
    ids = torch.tensor([token for row in sequences for token in row], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in sequences], dtype=torch.int64)
    mask = [prompt_length - 1 <= t < len(row) - 1 for row in sequences for t in range(len(row))]
    loss_mask = torch.tensor(mask, dtype=torch.bool)
    return TrainBatch(
        input_ids=ids,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        loss_mask=loss_mask,
        sequence_index=torch.arange(count).repeat_interleave(lengths),
        rollout_logprobs=torch.where(loss_mask, -1.5, 0.0) if rollout is None else torch.tensor(rollout),
        output_versions=torch.where(loss_mask, 0, -1),
        rewards=torch.tensor([0.0] * count if rewards is None else rewards),
        group_ids=torch.tensor([0] * count if group_ids is None else group_ids, dtype=torch.int64),
        finished=torch.tensor([True] * count if finished is None else finished, dtype=torch.bool),
    )


def random_batch(seed, num_sequences, *, longest=9):
    """Random tokens, rewards and groups of two; lengths 2 to `longest`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (num_sequences,), generator=generator).tolist()
    sequences = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    batch = make_batch(
        sequences,
        rewards=torch.randint(0, 3, (num_sequences,), generator=generator).float().tolist(),
        group_ids=[seed * 1000 + s // 2 for s in range(num_sequences)],
        finished=(torch.rand(num_sequences, generator=generator) > 0.3).tolist(),
    )
    noise = 0.5 * torch.randn(batch.num_tokens, generator=generator)
    return replace(batch, rollout_logprobs=torch.where(batch.loss_mask, batch.rollout_logprobs + noise, 0.0))


class Toolbox:
    """What the tests of the roles build with."""

    TableEngine = TableEngine
    RankGroup = RankGroup
    VOCABULARY = VOCABULARY
    make_batch = staticmethod(make_batch)
    random_batch = staticmethod(random_batch)
    select = staticmethod(select)


@pytest.fixture
def toolbox():
    return Toolbox
