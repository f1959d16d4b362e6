#!/usr/bin/env bash
# The gradient of mse_loss of sharded DTensors is too large by the number of ranks; so are those of four other losses.
#
# Version: torch 2.13.0 (CPU, gloo, two and four processes) with numpy 2.3.5, Python 3.11, Linux.
#
# Assumption: DTensor gives a sharded tensor the meaning of the whole one, so F.mse_loss of predictions and targets
# that are sharded alike has the value and the gradient of the whole batch, as their l1_loss has.
#
# Behaviour: the loss is right when all shards have the same size, but each rank divides its gradient by the size of its
# own shard, not of the whole tensor: the gradient is as many times too large as there are ranks. The same holds for
# huber_loss, smooth_l1_loss, binary_cross_entropy and soft_margin_loss with reduction="mean". l1_loss, the form of
# binary_cross_entropy that takes logits, and `(x - y).square().mean()` are right. With shards of unequal size the value
# of mse_loss is wrong too: it is the mean of the shards' means.
#
# Output seen: as in `expected` below: losses by the factor of their gradient, for two and for four ranks, and the loss
# of the squares 0, 0, 0 on one rank and 4, 4 on the other
#
# Why it matters: mse_loss and huber_loss are what critics, reward models and distillation train with. As the logged
# loss is right, such a run looks well and trains with a learning rate, or against a clipping bound, that is off by the
# number of ranks, and other numbers of ranks give other weights. Adam hides it until there is clipping or a second term
# in the loss. Take the mean of the squares, or reduction="sum" and a division.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cat > "$folder/ranks.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

LOSSES = {
    "mse_loss": F.mse_loss, "huber_loss": F.huber_loss, "smooth_l1_loss": F.smooth_l1_loss,
    "binary_cross_entropy": F.binary_cross_entropy, "soft_margin_loss": F.soft_margin_loss,
    "l1_loss": F.l1_loss, "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "mean_of_squares": lambda x, y: (x - y).square().mean(),
    "divided_sum": lambda x, y: F.mse_loss(x, y, reduction="sum") / x.numel(),
}


def rank_main(rank, num_ranks, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}{num_ranks}", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    inputs, targets = [[number / 10] for number in range(1, 9)], [0.25] * 8
    factors = {}
    for name, loss in LOSSES.items():
        factors.setdefault(factor_of(loss, inputs, targets, mesh), []).append(name)
    if rank == 0:
        for factor, names in factors.items():
            print(num_ranks, "ranks, gradient times", f"{factor}:", *names, flush=True)
    if num_ranks == 2:
        unequal = split([0.0, 0.0, 0.0, 2.0, 2.0], mesh), split([0.0] * 5, mesh)
        if (loss := F.mse_loss(*unequal).full_tensor().item()) and rank == 0:
            print(f"unequal shards: mse_loss {loss:.3f}, mean of the squares {8 / 5:.3f}", flush=True)
    dist.destroy_process_group()


def split(numbers, mesh):
    return distribute_tensor(torch.tensor(numbers), mesh, [Shard(0)])


def factor_of(loss, inputs, targets, mesh):
    """The gradient of a weight with sharded inputs and targets, divided by that with whole ones."""
    plain = torch.ones(1, requires_grad=True)
    value = loss(torch.tensor(inputs) @ plain, torch.tensor(targets))
    value.backward()
    weight = distribute_tensor(torch.ones(1), mesh, [Replicate()]).requires_grad_()
    sharded_value = loss(split(inputs, mesh) @ weight, split(targets, mesh)).full_tensor()
    sharded_value.backward()
    assert torch.allclose(sharded_value, value)
    return f"{(weight.grad.full_tensor() / plain.grad).item():.3f}"


if __name__ == "__main__":
    for num_ranks in (2, 4):
        mp.start_processes(rank_main, (num_ranks, sys.argv[1]), nprocs=num_ranks, start_method="fork")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/ranks.py" "$folder/store" 2>"$folder/errors") || {
    cat "$folder/errors"
    exit 1
}
echo "$seen"
wrong="mse_loss huber_loss smooth_l1_loss binary_cross_entropy soft_margin_loss"
right="l1_loss binary_cross_entropy_with_logits mean_of_squares divided_sum"
expected="2 ranks, gradient times 2.000: $wrong
2 ranks, gradient times 1.000: $right
unequal shards: mse_loss 2.000, mean of the squares 1.600
4 ranks, gradient times 4.000: $wrong
4 ranks, gradient times 1.000: $right"
[ "$seen" = "$expected" ] || { echo "expected:"; echo "$expected"; exit 1; }
