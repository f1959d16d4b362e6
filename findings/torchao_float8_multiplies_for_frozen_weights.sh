#!/usr/bin/env bash
# torchao's float8 training layer computes the gradient of a frozen weight and drops it: LoRA on it costs a product more.
#
# Version: torchao 0.18.0, torch 2.13.0 (CPU, emulated products), Python 3.11, Linux.
#
# Assumption: a layer whose weight has requires_grad=False computes no gradient of it, as nn.Linear does: two products
# instead of three in a forward and a backward pass.
#
# Behaviour: the layer's autograd function returns the gradient of the weight without asking whether it is needed. A
# frozen weight costs three products, as a trained one does, and its input is kept in memory until the backward pass.
# No gradient is stored, and nothing is logged.
#
# Output seen: as in `expected` below: matrix products of a forward and a backward pass
#
# Why it matters: adapters are trained on frozen layers, which are most of the model. A float8 recipe that is to make
# them faster computes half as much again as needed, and gains less than its recipe promises, or nothing.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 torchao==0.18.0 numpy==2.3.5
seen=$("$folder/env/bin/python" - 2> "$folder/errors" <<'PYTHON' || { cat "$folder/errors" >&2; exit 1; }
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def products(is_float8: bool, is_frozen: bool) -> int:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    if is_float8:
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    model.requires_grad_(not is_frozen)
    states = torch.randn(16, 32, requires_grad=True)
    with Counting() as counting:
        model(states).sum().backward()
    assert states.grad is not None and (model[0].weight.grad is None) == is_frozen
    return counting.count


for name, is_float8 in (("nn.Linear", False), ("float8", True)):
    print(f"{name}: trained {products(is_float8, False)}, frozen {products(is_float8, True)}")
PYTHON
)
expected='nn.Linear: trained 3, frozen 2
float8: trained 3, frozen 3'
echo "$seen"
[ "$seen" = "$expected" ]
