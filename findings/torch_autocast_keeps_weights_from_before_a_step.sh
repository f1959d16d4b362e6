#!/usr/bin/env bash
# Inside one autocast block the forward pass goes on with the weights of its first call, whatever changes them later.
#
# Version: torch 2.13.0 (CPU) with numpy 2.3.5, Python 3.11, Linux; weights of float32, autocast to bfloat16.
#
# Assumption: autocast casts inputs and weights of a product when it computes it. So it makes no difference to the
# numbers whether `with torch.autocast(...)` is around each forward pass or around a loop over several steps. (The
# documentation advises against backward passes in the block; it does not mention stale weights.)
#
# Behaviour: autocast keeps the bfloat16 copy of each float32 weight that requires a gradient until the outermost block
# ends, and does not look whether the weight was changed in place. After optimizer.step(), copy_() or load_state_dict()
# the block computes with the copy from before. backward() does not raise: it adds gradients of the old weights to the
# new ones. With cache_enabled=False, or with weights that require no gradient, the numbers are right.
#
# Output seen (losses of four steps from weight 0 to the target 1, and the weight after them):
#   a block around each forward pass: 1.0 0.25 0.0625 0.015625, weight 0.9375
#   a block around the loop: 1.0 1.0 1.0 1.0, weight 2.0
#   a block around the loop with cache_enabled=False: 1.0 0.25 0.0625 0.015625, weight 0.9375
#   output before and after load_state_dict() of weight 5 in a block: 3.0 3.0, after the block 5.0
#
# Why it matters: a step of PPO or GRPO has several updates, and a reference or an average of the weights is often
# swapped in by copy_(). One block around all of it trains every update after the first on stale weights: importance
# ratios and the KL term stay at what they were, clipping never acts, and the loss just looks flat. One block for each
# forward pass avoids it.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.3.5
seen=$("$folder/env/bin/python" -W ignore - <<'PYTHON'
import contextlib

import torch


def cast(**settings):
    return torch.autocast("cpu", dtype=torch.bfloat16, **settings)


def layer(value):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def train(around_loop, around_pass):
    model, losses = layer(0.0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with around_loop():
        for _ in range(4):
            with around_pass():
                loss = (model(torch.ones(1, 1)) - 1.0).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return f"{' '.join(map(str, losses))}, weight {model.weight.item()}"


print("a block around each forward pass:", train(contextlib.nullcontext, cast))
print("a block around the loop:", train(cast, contextlib.nullcontext))
uncached = train(lambda: cast(cache_enabled=False), contextlib.nullcontext)
print("a block around the loop with cache_enabled=False:", uncached)
model, one = layer(3.0), torch.ones(1, 1)
with cast():
    before = model(one).item()
    model.load_state_dict(layer(5.0).state_dict())
    after = model(one).item()
print("output before and after load_state_dict() of weight 5 in a block:", before, f"{after}, after the block", end=" ")
with cast():
    print(model(one).item())
PYTHON
)
echo "$seen"
expected='a block around each forward pass: 1.0 0.25 0.0625 0.015625, weight 0.9375
a block around the loop: 1.0 1.0 1.0 1.0, weight 2.0
a block around the loop with cache_enabled=False: 1.0 0.25 0.0625 0.015625, weight 0.9375
output before and after load_state_dict() of weight 5 in a block: 3.0 3.0, after the block 5.0'
[ "$seen" = "$expected" ] || { echo "expected:"; echo "$expected"; exit 1; }
