"""The reduction of FSDP's gradients on CPU ranks. gloo's own sums the whole buffer on every rank: twice the bytes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class AddedParts:
    """Implements FSDP's `ReduceScatter`: ranks send each other parts, and add what they get in the order of ranks."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup | None,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> None:
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        assert not async_op
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(-1, output_tensor.numel()), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(dist.get_world_size(group))
