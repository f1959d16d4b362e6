#!/usr/bin/env bash
# gloo's broadcast and all_reduce exchange the numbers of a transposed tensor in the order of its storage.
#
# Version: torch 2.13.0 (CPU) with numpy 2.3.5, Python 3.11, Linux; gloo, two ranks.
#
# Assumption: a collective works on the values of a tensor, whatever its strides are on each rank; where a backend needs
# contiguous tensors it says so, as gloo's send does ("input tensor has to be contiguous").
#
# Behaviour: a transposed tensor is accepted. Rank 0 has it as a transposed view and rank 1 as a contiguous tensor of the
# same shape: rank 1 gets the right numbers at wrong places, and no rank raises.
#
# Output seen:
#   rank 0 broadcast [[0, 2, 4], [1, 3, 5]] all_reduce [[0, 2, 4], [1, 3, 5]]
#   rank 1 broadcast [[0, 1, 2], [3, 4, 5]] all_reduce [[0, 1, 2], [3, 4, 5]]
#
# Why it matters: an optimiser that orthogonalises a tall matrix as its transpose on one rank, and broadcasts the result,
# gives the ranks different weights. The loss stays finite and each rank trains a model of its own.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cat > "$folder/rank.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)


def value():
    return torch.arange(6.0).view(3, 2).T if rank == 0 else torch.zeros(2, 3)


sent, added = value(), value()
dist.broadcast(sent, src=0)
dist.all_reduce(added)
print("rank", rank, "broadcast", sent.int().tolist(), "all_reduce", added.int().tolist())
dist.destroy_process_group()
PYTHON
for rank in 0 1; do
  GLOO_SOCKET_IFNAME=lo timeout 60 "$folder/env/bin/python" -W ignore "$folder/rank.py" "$rank" "$folder/store" > "$folder/$rank" &
done
wait
cat "$folder/0" "$folder/1"
[ "$(cat "$folder/0")" = "rank 0 broadcast [[0, 2, 4], [1, 3, 5]] all_reduce [[0, 2, 4], [1, 3, 5]]" ] || exit 1
[ "$(cat "$folder/1")" = "rank 1 broadcast [[0, 1, 2], [3, 4, 5]] all_reduce [[0, 1, 2], [3, 4, 5]]" ] || exit 1
