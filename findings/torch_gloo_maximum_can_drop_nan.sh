#!/usr/bin/env bash
# all_reduce with MAX or MIN over gloo drops a NaN or keeps it, by which rank has it.
#
# Version: torch 2.13.0 (CPU, gloo, two processes) with numpy 2.3.5, Python 3.11, Linux.
#
# Assumption: a maximum over the ranks is NaN if a rank brings a NaN, as torch.maximum and amax are.
#
# Behaviour: with two ranks the result is that of `a > b ? a : b`-like comparisons, in which every comparison with NaN is
# false: [1 on rank 0, NaN on rank 1] gives 1, [NaN on rank 0, 1 on rank 1] gives NaN, on both ranks. A sum is NaN.
#
# Output seen: as in `expected` below: operation, rank of the NaN, results on ranks 0 and 1
#
# Why it matters: "the largest importance ratio over all ranks", or a flag for bad numbers that is combined with MAX, is
# a good number while one rank has NaN, so alarms stay silent. Send isnan() beside the values, or reduce it with SUM.
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


def rank_main(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for name in ("MAX", "MIN", "SUM"):
        for place in (0, 1):
            value = torch.tensor([float("nan") if rank == place else 1.0])
            dist.all_reduce(value, op=getattr(dist.ReduceOp, name))
            both = [torch.zeros(1) for _ in range(2)]
            dist.all_gather(both, value)
            if rank == 0:
                print(name, place, *(float(one) for one in both), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, (sys.argv[1],), nprocs=2)
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/ranks.py" "$folder/store" 2>"$folder/errors") || {
    cat "$folder/errors"
    exit 1
}
echo "$seen"
expected='MAX 0 nan nan
MAX 1 1.0 1.0
MIN 0 nan nan
MIN 1 1.0 1.0
SUM 0 nan nan
SUM 1 nan nan'
[ "$seen" = "$expected" ] || { echo "expected:"; echo "$expected"; exit 1; }
