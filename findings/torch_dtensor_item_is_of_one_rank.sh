#!/usr/bin/env bash
# .item() of a reduction of a DTensor is the number of the rank's own shard, without a word, and differs between ranks.
#
# Version: torch 2.13.0 (CPU, gloo, two processes) with numpy 2.3.5, Python 3.11, Linux.
#
# Assumption: DTensor gives a sharded tensor the meaning of the whole one, so `norm.item()`, `grad.isnan().any()` in an
# `if`, or `weight.max().item()` are those of the whole tensor, equal on all ranks.
#
# Behaviour: a reduction over the sharded dimension returns a DTensor with the placement Partial, and item() and bool()
# read its local part. A 1-norm, 2-norm or infinity norm, a sum and a maximum are that of the own shard; a NaN that is
# on one rank is seen by that rank only. full_tensor() gives the right number.
#
# Output seen: as in `expected` below, for [1, 2, 3] and for [1, 2, NaN], split in two unequal shards: the name, the
# results of item() on ranks 0 and 1, and that of full_tensor()
#
# Why it matters: ranks that decide by such a number (clip, skip a step, raise an alarm, stop) decide differently: the
# gradient is clipped with a factor of each rank's own, or one rank raises and the others wait in a collective for ever.
# Reduce the local parts and add them over the ranks, or call full_tensor() before item().
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

REDUCTIONS = {
    "norm1": lambda x: torch.linalg.vector_norm(x, 1), "norm2": lambda x: torch.linalg.vector_norm(x, 2),
    "norminf": lambda x: torch.linalg.vector_norm(x, float("inf")), "sum": torch.sum, "max": torch.max, "min": torch.min,
}


def rank_main(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), mesh, [Shard(0)])
    broken = distribute_tensor(torch.tensor([1.0, 2.0, float("nan")]), mesh, [Shard(0)])
    for name, reduce in REDUCTIONS.items():
        show(name, reduce(whole))
    show("has_nan", broken.isnan().any())
    show("norm2_nan", torch.linalg.vector_norm(broken))
    dist.destroy_process_group()


def show(name, value):
    own = torch.tensor([float(value.item())])
    both = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(both, own)
    whole = float(value.full_tensor().item())
    if dist.get_rank() == 0:
        print(name, *(f"{float(one):.3f}" for one in both), f"{whole:.3f}", flush=True)


if __name__ == "__main__":
    mp.spawn(rank_main, (sys.argv[1],), nprocs=2)
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/ranks.py" "$folder/store" 2>"$folder/errors") || {
    cat "$folder/errors"
    exit 1
}
echo "$seen"
expected='norm1 3.000 3.000 6.000
norm2 2.236 3.000 3.742
norminf 2.000 3.000 3.000
sum 3.000 3.000 6.000
max 2.000 3.000 3.000
min 1.000 3.000 1.000
has_nan 0.000 1.000 1.000
norm2_nan 2.236 nan nan'
[ "$seen" = "$expected" ] || { echo "expected:"; echo "$expected"; exit 1; }
