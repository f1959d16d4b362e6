"""Every few train steps, some trained rows are scored by a server too, and the log-ratio of their tokens is split by
cause (`areal.algorithm.ratio_causes`). The servers serve the version that the trainer holds while this happens."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from areal.algorithm.aggregate import TokenStat, to_metrics
from areal.algorithm.ratio_causes import ScoredTokens, kept_mass, ratio_parts
from areal.api.batch import IMAGE_INDEX, TokenOutputs, TrainBatch, required
from areal.api.config import PPOConfig
from areal.api.data import TEMPERATURES, ScoredRow, TokenScores
from areal.api.engine import Ranks
from areal.api.metrics import Metrics
from areal.data.pack import take
from areal.trainer.minibatch import prefixed

_ROWS = 4
_TOP = 20
"""Likeliest tokens of each place that a server returns, where top-k or top-p leave tokens out; vLLM's limit."""


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
        self._dtype = config.actor.dtype if config.served_dtype == config.actor.dtype else "bfloat16"
        self._gconfig = config.gconfig
        self._engine, self._ranks, self._control = engine, ranks, control
        self._is_truncated = self._gconfig.top_p < 1 or self._gconfig.top_k <= _TOP

    def measure(self, batch: TrainBatch, step: int) -> Metrics:
        """Metrics of the batch before its update, while all servers hold version `step`; a collective."""
        if self._every is None or step % self._every:
            return {}
        rows = take(batch, _chosen(batch))
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
        """Of each position: log-probability at temperature 1, mass of the tokens that top-k and top-p leave, and
        whether a server gave them. `trainer` [T]: log-probabilities at the temperature of the token."""
        scored, mass = torch.zeros_like(mask, dtype=torch.float32), torch.ones(len(mask), dtype=torch.float64)
        is_scored = torch.zeros_like(mask)
        bounds, ids = rows.cu_seqlens.tolist(), rows.input_ids.tolist()
        asked: list[ScoredRow] = []
        places: list[slice] = []
        for begin, end in pairwise(bounds):
            trained = mask[begin:end].nonzero()
            if len(trained) and self._ranks.rank == 0:
                # Position t has what is known of token t + 1.
                first = int(trained[0, 0])
                asked.append(ScoredRow(token_ids=ids[begin:end], first=first + 1))
                places.append(slice(begin + first, end - 1))
        top_k = _TOP if self._is_truncated else 0
        answers = self._control.score(asked, version=version, top_k=top_k) if asked else None
        temperatures = rows.columns.get(TEMPERATURES)
        for place, scores in zip(places, answers or (), strict=False):
            scored[place] = torch.tensor(scores.logprobs)
            is_scored[place] = True
            heat = torch.full((len(scores.logprobs),), self._gconfig.temperature)
            if temperatures is not None:
                given = temperatures[place].float().cpu()
                heat = torch.where(given.isnan(), heat, given)
            # log p(y) at temperature h is log p(y) at 1, divided by h, minus the scale.
            scales = torch.where(heat == 1, 0.0, scored[place] / heat - trainer[place])
            top_k, top_p = self._gconfig.top_k, self._gconfig.top_p
            masses = [
                kept_mass([value for _, value in top], scale, temperature=at, top_k=top_k, top_p=top_p)
                for top, scale, at in zip(scores.top, scales.tolist(), heat.tolist(), strict=False)
            ]
            if masses:
                mass[place] = torch.tensor(masses, dtype=torch.float64)
        return scored, mass, is_scored


def _chosen(batch: TrainBatch) -> list[int]:
    """Rows at equal distances over the batch, of those without images: servers score text only."""
    images = batch.columns.get(IMAGE_INDEX)
    rows = range(batch.num_sequences) if images is None else (images < 0).all(dim=1).nonzero()[:, 0].tolist()
    places = np.unique(np.linspace(0, len(rows) - 1, min(_ROWS, len(rows))).round().astype(int))
    return [rows[place] for place in places]
