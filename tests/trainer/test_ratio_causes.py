"""Some trained rows are scored by a server, and the log-ratio of their tokens is split by cause."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal.api.batch import IMAGE_INDEX, BatchShare
from areal.api.config import PPOConfig
from areal.api.data import TEMPERATURES, TokenScores
from areal.api.table import TokenTable
from areal.data.pack import to_train_batch
from areal.trainer import ratio_causes
from areal.trainer.ratio_causes import RatioCauses
from tests.fake_ranks import FakeRanks

CAUSES = ("numerics", "staleness", "sampling", "drift")


class Engine:
    """Log-probability of token t + 1 at position t: -1 at the run's temperature, -2 at temperature 1."""

    def __init__(self):
        self.rows = []

    def forward(self, batch):
        self.rows.append(batch.input_ids.tolist())
        value = -2.0 if TEMPERATURES in batch.columns else -1.0
        return SimpleNamespace(logprobs=torch.full((batch.num_tokens,), value))


class Control:
    def __init__(self, answers=True, top=()):
        self.asked, self.answers, self.top = [], answers, list(top)

    def score(self, rows, *, version, top_k):
        self.asked.append((version, top_k, [(row.token_ids, row.first) for row in rows]))
        if not self.answers:
            return None
        return [
            TokenScores([-2.25] * (len(row.token_ids) - row.first), self.top * (len(row.token_ids) - row.first))
            for row in rows
        ]


def batch_of(rows: int = 1, version: int = 3):
    """Rows of two prompt tokens and two generated ones, of which the second belongs to `version`."""
    table = TokenTable(
        lengths=np.full(rows, 4, np.int32),
        token_ids=np.arange(10, 10 + 4 * rows, dtype=np.int32),
        output_versions=np.array([-1, -1, version - 2, version] * rows, np.int32),
        rewards=np.zeros(rows, np.float32),
        rollout_logprobs=np.array([0, 0, -1.5, -0.75] * rows, np.float32),
        loss_mask=np.array([0, 0, 1, 1] * rows, np.uint8),
        finished=np.ones(rows, np.uint8),
    )
    group = np.arange(rows, dtype=np.int32)
    return to_train_batch(BatchShare(step=version, version=version, table=table, group_index=group))


def config_of(**gconfig) -> PPOConfig:
    config = PPOConfig()
    return replace(
        config,
        actor=replace(config.actor, dtype="float32"),
        native=replace(config.native, dtype="float32"),
        allocation_mode="native:d1+fsdp:d1",
        gconfig=replace(config.gconfig, **gconfig),
        stats_logger=replace(config.stats_logger, causes_freq_steps=3),
    )


def measured(control, batch, *, rank=0, step=3, **gconfig):
    causes = RatioCauses(config_of(**gconfig), Engine(), FakeRanks(rank), control)
    metrics = causes.measure(batch, step)
    return {re.sub("^batch/log_ratio(/|_)", "", name): metric for name, metric in metrics.items()}


def test_the_parts_of_a_row_by_hand():
    control = Control()
    result = measured(control, batch_of())
    assert control.asked == [(3, 0, [([10, 11, 12, 13], 2)])]
    # Numerics -2 + 2.25 = .25 for both tokens. Token 2, of an older version: -1 + 1.5 - .25 = .25 of staleness. Token
    # 3, of this version: -1 + .75 - .25 = -.5, more than rounding: drift.
    means = {name: metric.value for name, metric in result.items()}
    assert means == pytest.approx(
        {
            "numerics": 0.25, "staleness": 0.125, "drift": -0.25, "sampling": 0.0, "whole": 0.125,
            "abs/numerics": 0.25, "abs/staleness": 0.125, "abs/drift": 0.25, "abs/sampling": 0.0, "abs/whole": 0.375,
            "current": 0.5,
        }
    )  # fmt: skip
    assert sum(means[name] for name in CAUSES) == pytest.approx(means["whole"], abs=1e-6)


def test_the_likeliest_tokens_are_asked_for_where_the_sampler_leaves_tokens_out():
    control = Control(top=[[(5, np.log(0.6)), (6, np.log(0.3))]])
    result = measured(control, batch_of(), top_p=0.8)
    assert control.asked[0][1] == 64
    assert result["sampling"].value == pytest.approx(np.log(0.9))


def test_only_rank_0_asks_and_every_rank_computes():
    control, engine = Control(), Engine()
    causes = RatioCauses(config_of(), engine, FakeRanks(1), control)
    metrics = causes.measure(batch_of(), 3)
    assert control.asked == []
    assert engine.rows == [[10, 11, 12, 13]] * 2
    assert {metric.count for metric in metrics.values()} == {0}


def test_without_an_answer_of_the_servers_nothing_is_measured():
    result = measured(Control(answers=False), batch_of())
    assert {metric.count for metric in result.values()} == {0}


def test_four_rows_of_the_steps_that_are_due():
    control = Control()
    measured(control, batch_of(9))
    assert [ids[0] for ids, _ in control.asked[0][2]] == [10, 22, 30, 42]
    assert measured(control, batch_of(9), step=4) == {}


def test_rows_with_images_are_left_out():
    batch = batch_of(3)
    images = torch.tensor([[0], [-1], [0]])
    control = Control()
    measured(control, batch.with_column(IMAGE_INDEX, images))
    assert [ids[0] for ids, _ in control.asked[0][2]] == [14]


def test_long_rows_are_cut_and_rows_that_are_trained_late_are_left_out(monkeypatch):
    monkeypatch.setattr(ratio_causes, "_TOKENS", 3)
    control = Control()
    result = measured(control, batch_of())
    assert control.asked == [(3, 0, [([10, 11, 12], 2)])]
    assert {metric.count for metric in result.values()} == {1}
    monkeypatch.setattr(ratio_causes, "_TOKENS", 2)
    assert ratio_causes.chosen_rows(batch_of()) == []


def test_a_row_whose_last_token_a_server_did_not_score(monkeypatch):
    control = Control()
    score = control.score

    def shorter(rows, *, version, top_k):
        return [TokenScores(scores.logprobs[:-1], []) for scores in score(rows, version=version, top_k=top_k)]

    monkeypatch.setattr(control, "score", shorter)
    assert {metric.count for metric in measured(control, batch_of()).values()} == {1}
