"""The loss of supervised fine-tuning over a held-out set."""

import pytest
import torch

from areal.data.sft import EncodedRow
from areal.trainer.sft import evaluation_loss

ROWS = [
    EncodedRow(token_ids=[0, *answer], loss_mask=[0] + [1] * len(answer))
    for answer in ([1], [2, 3, 4], [5, 0], [3], [1, 2, 4, 5, 3])
]


def expected_loss(table):
    """By hand: -log p of every answer token, over their number."""
    distribution = table.detach().log_softmax(-1)
    losses = [
        -distribution[a, b].item() for row in ROWS for a, b in zip(row.token_ids, row.token_ids[1:], strict=False)
    ]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
def test_held_out_loss_is_the_mean_over_all_tokens_however_it_is_cut(toolbox, num_ranks, rows_at_once):
    group = toolbox.RankGroup(num_ranks)
    engines = [toolbox.TableEngine(rank=rank, group=group) for rank in range(num_ranks)]
    found = group.run(lambda rank: evaluation_loss(engines[rank], ROWS, rows_at_once=rows_at_once))
    assert found == [{"eval/loss": pytest.approx(expected_loss(engines[0].table), rel=1e-5)}] * num_ranks
    assert {engine.num_forwards for engine in engines} == {-(-len(ROWS) // rows_at_once)}


def test_an_empty_mask_is_no_division_by_zero(toolbox):
    rows = [EncodedRow(token_ids=[0, 1], loss_mask=[0, 0])]
    assert evaluation_loss(toolbox.TableEngine(), rows, rows_at_once=4) == {"eval/loss": 0.0}
    assert torch.is_grad_enabled()
