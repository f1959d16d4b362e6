#!/usr/bin/env bash
# torchao's float8 all-gather ignores round_scales_to_power_of_2 for weights, so FSDP2 changes the numbers of training.
#
# Version: torchao 0.18.0, torch 2.13.0 (CPU, gloo, one process), Python 3.11, Linux.
#
# Assumption: enable_fsdp_float8_all_gather decides how weights travel, and nothing else: with it a layer computes what it
# computes without. round_scales_to_power_of_2 is a setting of all casts, weights included.
#
# Behaviour: without the option of scales the two are equal, bit for bit. With it, a layer that gathers in 8 bits has
# inputs and gradients with scales that are powers of two, and weights with the scale 448 / max|w| as it is. The outputs
# differ; nothing is refused or logged. precompute_float8_dynamic_scale_for_fsdp has no argument for it either.
#
# Output seen: as in `expected` below: whether outputs are equal, and whether the scale of the weight is a power of two
#
# Why it matters: the option is chosen so that forward and backward passes round alike; a run on one card then is not
# the run on several, and log-probabilities of a trainer and of a server that rounds by the option do not agree.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 torchao==0.18.0 numpy==2.3.5
seen=$("$folder/env/bin/python" - 2> "$folder/errors" <<'PYTHON' || { cat "$folder/errors" >&2; exit 1; }
import math
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
generator = torch.Generator().manual_seed(0)
weight, given = torch.randn(32, 32, generator=generator), torch.randn(4, 32, generator=generator)


def layer(gathers: bool, rounds: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Identity())
    with torch.no_grad():
        model[0].weight.copy_(weight)
    config = Float8LinearConfig(
        emulate=True, enable_fsdp_float8_all_gather=gathers, round_scales_to_power_of_2=rounds
    )
    convert_to_float8_training(model, config=config)
    fully_shard(model, mesh=mesh)
    model.unshard()
    return model


for rounds in (False, True):
    plain, gathered = layer(False, rounds), layer(True, rounds)
    scale = gathered[0].weight._scale.item()
    print(f"rounds={rounds}: equal={torch.equal(plain(given), gathered(given))}, power={math.log2(scale).is_integer()}")
dist.destroy_process_group()
PYTHON
)
expected='rounds=False: equal=True, power=False
rounds=True: equal=False, power=False'
echo "$seen"
[ "$seen" = "$expected" ]
