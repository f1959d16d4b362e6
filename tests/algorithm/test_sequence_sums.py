"""Sums and means over the trained tokens of each sequence, which DPO, SFT and the losses of whole answers share."""

import math

import pytest
import torch

from areal.algorithm.aggregate import sequence_means, sequence_sums
from tests.expect import raises_code

INDEX = torch.tensor([0, 0, 0, 1, 2, 2])
MASK = torch.tensor([True, False, True, False, True, False])


def test_sums_and_means_of_sequences():
    values = torch.tensor([1.0, 100.0, 3.0, 100.0, 5.0, 100.0], dtype=torch.float64)
    assert sequence_sums(values, MASK, INDEX, 3).tolist() == [4.0, 0.0, 5.0]
    means, known = sequence_means(values, MASK, INDEX, 3)
    assert means.tolist() == [2.0, 0.0, 5.0]
    assert known.tolist() == [True, False, True]


@pytest.mark.parametrize("reduce", [sequence_sums, lambda *args: sequence_means(*args)[0]], ids=["sum", "mean"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_stands_outside_of_the_mask_reaches_neither_value_nor_gradient(reduce, bad):
    values = torch.where(MASK, torch.tensor([1.0, 0, 3, 0, 5, 0]), bad).requires_grad_()
    result = reduce(values, MASK, INDEX, 3)
    assert torch.isfinite(result).all()
    result.sum().backward()
    assert values.grad[~MASK].tolist() == [0.0] * 3
    assert torch.isfinite(values.grad).all()
    inside = torch.tensor([1.0, 0, bad, 0, 5, 0])
    assert not reduce(inside, MASK, INDEX, 3).isfinite().all()


def test_all_masked_and_single_tokens():
    first, index = torch.tensor([2.5]), torch.tensor([0])
    assert sequence_sums(first, torch.tensor([True]), index, 1).tolist() == [2.5]
    means, known = sequence_means(first, torch.tensor([False]), index, 1)
    assert (means.tolist(), known.tolist()) == ([0.0], [False])
    nothing = torch.zeros(0)
    assert sequence_sums(nothing, nothing.bool(), nothing.long(), 0).shape == (0,)


def test_shapes_that_would_broadcast_are_refused():
    with raises_code("algorithm.shapes_differ"):
        sequence_sums(torch.zeros(1), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1)
