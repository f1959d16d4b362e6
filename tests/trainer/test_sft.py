"""Supervised fine-tuning: the loss of a step and over a held-out set, however rows are cut."""

import pytest
import torch

from areal.api.config import SFTOptions
from areal.data.supervised_rows import EncodedRow
from areal.trainer.row_loop import evaluate, share_of
from areal.trainer.supervised import SFTTask

ROWS = [
    EncodedRow(token_ids=[0, *answer], loss_mask=[0] + [1] * len(answer))
    for answer in ([1], [2, 3, 4], [5, 0], [3], [1, 2, 4, 5, 3])
]
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
SCALE = 7


def options(aggregation="token-mean") -> SFTOptions:
    scale = SCALE if aggregation == "seq-mean-token-sum-norm" else None
    return SFTOptions(loss_aggregation=aggregation, loss_scale_tokens=scale)


def losses_of(table, rows) -> list[list[torch.Tensor]]:
    """By hand: -log p of every learned token of every row."""
    distribution = table.log_softmax(-1)
    return [
        [-distribution[row.token_ids[t], row.token_ids[t + 1]] for t, on in enumerate(row.loss_mask[1:]) if on]
        for row in rows
    ]


def expected_loss(table, rows, aggregation) -> torch.Tensor:
    losses = [row for row in losses_of(table, rows) if row]
    count = len(losses)
    return {
        "token-mean": lambda: sum(sum(row) for row in losses) / sum(len(row) for row in losses),
        "seq-mean-token-sum": lambda: sum(sum(row) for row in losses) / count,
        "seq-mean-token-mean": lambda: sum(sum(row) / len(row) for row in losses) / count,
        "seq-mean-token-sum-norm": lambda: sum(sum(row) / SCALE for row in losses) / count,
    }[aggregation]()


def expected_perplexity(table, rows) -> float:
    losses = [row for row in losses_of(table, rows) if row]
    return sum(float(torch.exp(sum(row) / len(row))) for row in losses) / len(losses)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_held_out_loss_is_the_mean_over_all_tokens_however_it_is_cut(toolbox, num_ranks, rows_at_once, aggregation):
    group = toolbox.RankGroup(num_ranks)
    engines = [toolbox.TableEngine(rank=rank, group=group) for rank in range(num_ranks)]
    tasks = [SFTTask(engine, options(aggregation)) for engine in engines]
    actual = group.run(lambda rank: evaluate(tasks[rank], ROWS, rows_at_once=rows_at_once))
    table = engines[0].table.detach()
    expected = {
        "eval/loss": pytest.approx(float(expected_loss(table, ROWS, aggregation)), rel=1e-5),
        "eval/perplexity": pytest.approx(expected_perplexity(table, ROWS), rel=1e-5),
    }
    assert actual == [expected] * num_ranks
    assert {engine.num_forwards for engine in engines} == {-(-len(ROWS) // rows_at_once)}


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 1), (1, 3), (2, 1), (3, 2), (7, 1)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_descends_the_loss_of_the_whole_batch(toolbox, num_ranks, num_micro_batches, aggregation):
    """Also with more ranks than rows."""
    rows = [*ROWS, EncodedRow(token_ids=[1, 2, 3], loss_mask=[1, 0, 0])]  # its first token can never be learned
    group = toolbox.RankGroup(num_ranks)
    engines = [
        toolbox.TableEngine(rank=rank, group=group, num_micro_batches=num_micro_batches) for rank in range(num_ranks)
    ]
    tasks = [SFTTask(engine, options(aggregation)) for engine in engines]
    table = engines[0].table.detach().clone().requires_grad_()
    expected = expected_loss(table, rows, aggregation)
    expected.backward()
    actual = group.run(lambda rank: tasks[rank].update(tasks[rank].batch_of(share_of(tasks[rank], rows))))
    for engine in engines:
        torch.testing.assert_close(engine.gradients[0], table.grad, rtol=0, atol=1e-6)
    assert len({tuple(sorted(metrics)) for metrics in actual}) == 1
    total, count = (sum(getattr(m["loss"], name) for m in actual) for name in ("total", "count"))
    assert total / count == pytest.approx(expected.item(), rel=1e-5)


def test_a_worked_number(toolbox):
    """A uniform table of 6 tokens: every -log p is log 6, its perplexity 6; rows of 1 and 3 tokens."""
    engine = toolbox.TableEngine()
    with torch.no_grad():
        engine.table.zero_()
    result = {a: evaluate(SFTTask(engine, options(a)), ROWS[:2], rows_at_once=2) for a in AGGREGATIONS}
    log6 = 1.791759469
    assert [result[a]["eval/loss"] for a in AGGREGATIONS] == pytest.approx([log6, 2 * log6, log6, 4 / 14 * log6])
    assert result["token-mean"]["eval/perplexity"] == pytest.approx(6.0)


def test_an_empty_mask_is_no_division_by_zero(toolbox):
    rows = [EncodedRow(token_ids=[0, 1], loss_mask=[0, 0])]
    task = SFTTask(toolbox.TableEngine(), options())
    assert evaluate(task, rows, rows_at_once=4) == {}
    metrics = task.update(task.batch_of(rows))
    assert float(metrics["grad_norm"].value) == 0.0
    assert torch.is_grad_enabled()
