"""Every few train steps, some trained rows are scored by a server too, and the log-ratio of their tokens is split by
cause (`areal.algorithm.ratio_causes`). The servers serve the version that the trainer holds while this happens."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, to_metrics, trained_counts
from areal.algorithm.ratio_causes import ScoredTokens, kept_mass, ratio_parts
from areal.api.batch import IMAGE_INDEX, TokenOutputs, TrainBatch, required
from areal.api.config import PPOConfig
from areal.api.data import TEMPERATURES, ScoredRow, TokenScores
from areal.api.engine import Ranks
from areal.api.metrics import Metrics
from areal.data.pack import take
from areal.fleet.replica import ALL_TOKENS
from areal.trainer.minibatch import prefixed

_ROWS = 4
_TOKENS = 2048  # Tokens of a row that a server scores: vLLM holds the logits of all of them at once.
_TOP = 64  # Likeliest tokens of each place that a server returns, where top-k or top-p leave tokens out.


class RatioEngine(Protocol):
    """The part of a train engine that scores tokens."""

    def forward(self, batch: TrainBatch) -> TokenOutputs: ...


class ServerScores(Protocol):
    """The controller, as trainer rank 0 calls it."""

    def score(self, rows: Sequence[ScoredRow], *, version: int, top_k: int) -> list[TokenScores] | None: ...


class RatioCauses:
    """The split of one rank's rows. All ranks score rows of their own; rank 0 asks a server, others measure nothing."""

    def __init__(self, config: PPOConfig, engine: RatioEngine, ranks: Ranks, control: ServerScores) -> None:
        self._every = config.stats_logger.causes_freq_steps
        self._dtype = config.actor.compute_dtype if config.served_dtype == config.actor.compute_dtype else "bfloat16"
        self._gconfig = config.gconfig
        self._engine, self._ranks, self._control = engine, ranks, control
        self._top_k = self._gconfig.top_k if self._gconfig.top_k < ALL_TOKENS else None
        self._is_truncated = self._gconfig.top_p < 1 or self._top_k is not None

    def measure(self, batch: TrainBatch, step: int) -> Metrics:
        """Metrics of the batch before its update, while all servers hold version `step`; a collective."""
        if self._every is None or step % self._every:
            return {}
        rows = take(batch, chosen_rows(batch))
        trainer = required(self._engine.forward(rows).logprobs, "logprobs").float().cpu()
        at_one = rows.with_column(TEMPERATURES, torch.ones_like(rows.rollout_logprobs))
        trainer_raw = required(self._engine.forward(at_one).logprobs, "logprobs").float().cpu()
        mask = rows.loss_mask.cpu() & (rows.output_versions.cpu() >= 0)
        server_raw, mass, is_scored = self._by_server(rows, mask, trainer, step)
        tokens = ScoredTokens(
            trainer=trainer,
            trainer_raw=trainer_raw,
            server_raw=server_raw,
            recorded=rows.rollout_logprobs.float().cpu(),
            is_current=rows.output_versions.cpu() == step,
            kept_mass=mass,
        )
        parts, mask = ratio_parts(tokens, self._dtype), mask & is_scored
        stats = {"log_ratio/current": TokenStat(tokens.is_current, mask)}
        for name, value in asdict(parts).items():
            stats |= {
                f"log_ratio/{name}": TokenStat(value, mask),
                f"log_ratio_abs/{name}": TokenStat(value.abs(), mask),
            }
        return prefixed("batch", to_metrics(stats))

    def _by_server(
        self, rows: TrainBatch, mask: Tensor, trainer: Tensor, version: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For each position: log-probability at temperature 1, mass of the tokens that top-k and top-p leave, and
        whether a server gave them. `trainer` [T]: log-probabilities at the temperature of the token."""
        scored, mass = torch.zeros_like(mask, dtype=torch.float32), torch.ones(len(mask), dtype=torch.float64)
        is_scored = torch.zeros_like(mask)
        bounds, ids = rows.cu_seqlens.tolist(), rows.input_ids.tolist()
        asked: list[ScoredRow] = []
        begins: list[int] = []
        for begin, end in pairwise(bounds):
            end = min(end, begin + _TOKENS)
            trained = mask[begin : end - 1].nonzero()
            if len(trained) and self._ranks.rank == 0:
                # Position t has what is known of token t + 1.
                first = int(trained[0, 0])
                asked.append(ScoredRow(token_ids=ids[begin:end], first=first + 1))
                begins.append(begin + first)
        top_k = _TOP if self._is_truncated else 0
        answers = self._control.score(asked, version=version, top_k=top_k) if asked else None
        temperatures = rows.columns.get(TEMPERATURES)
        for begin, scores in zip(begins, answers or (), strict=False):
            place = slice(begin, begin + len(scores.logprobs))
            scored[place] = torch.tensor(scores.logprobs)
            is_scored[place] = True
            heat = torch.full((len(scores.logprobs),), self._gconfig.temperature)
            if temperatures is not None:
                recorded = temperatures[place].float().cpu()
                heat = torch.where(recorded.isnan(), heat, recorded)
            # log p(y) at temperature h is log p(y) at 1, divided by h, minus the scale.
            scales = torch.where(heat == 1, 0.0, scored[place] / heat - trainer[place])
            top_p = self._gconfig.top_p
            masses = [
                kept_mass([value for _, value in top], scale, temperature=at, top_k=self._top_k, top_p=top_p)
                for top, scale, at in zip(scores.top, scales.tolist(), heat.tolist(), strict=False)
            ]
            if masses:
                mass[place] = torch.tensor(masses, dtype=torch.float64)
        return scored, mass, is_scored


def chosen_rows(batch: TrainBatch) -> list[int]:
    """Rows at equal distances over those that a server can score: without images, with a trained token early."""
    place = torch.arange(batch.num_tokens) - batch.cu_seqlens.cpu()[batch.sequence_index.cpu()]
    early = batch.loss_mask.cpu() & (batch.output_versions.cpu() >= 0) & (place < _TOKENS - 1)
    can = trained_counts(early, batch.sequence_index.cpu(), batch.num_sequences) > 0
    images = batch.columns.get(IMAGE_INDEX)
    if images is not None:
        can &= (images.cpu() < 0).all(dim=1)
    rows = can.nonzero()[:, 0].tolist()
    places = np.unique(np.linspace(0, len(rows) - 1, min(_ROWS, len(rows))).round().astype(int))
    return [rows[place] for place in places]
