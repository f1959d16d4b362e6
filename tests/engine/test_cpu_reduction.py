"""The sum of the parts of all ranks, without the ranks: tests of two and more ranks train with it."""

import pytest
import torch
import torch.distributed as dist

from areal.engine.fsdp import AddedParts


@pytest.mark.parametrize(("op", "divisor"), [(dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parts_that_ranks_send_are_added(monkeypatch, op, divisor, dtype):
    ours = torch.randn(12).to(dtype)
    received = torch.cat([ours[4:8], *torch.randn(2, 4).to(dtype)])

    def exchange(result, values, group=None):
        assert values is ours
        result.copy_(received)

    monkeypatch.setattr("torch.distributed.all_to_all_single", exchange)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 3)
    reduction = AddedParts()
    actual = reduction.allocate((4,), dtype=dtype, device=torch.device("cpu"))
    reduction(output_tensor=actual, input_tensor=ours, group=None, op=op)
    exact = received.double().view(3, 4).sum(0) / divisor
    torch.testing.assert_close(actual.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_other_reductions_are_an_error():
    with pytest.raises(AssertionError):
        AddedParts()(torch.zeros(1), torch.zeros(2), None, dist.ReduceOp.MAX)
