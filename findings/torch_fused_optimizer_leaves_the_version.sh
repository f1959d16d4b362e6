#!/usr/bin/env bash
# The fused optimisers of torch change a weight in place and do not advance its version counter.
#
# Version: torch 2.13.0 (CPU) with numpy 2.3.5, Python 3.11, Linux; Adam, AdamW and SGD.
#
# Assumption: every operation that changes a tensor in place advances `tensor._version`, so a copy of a weight in the
# compute type is current as long as the counter is the one at which it was made. add_, copy_ and the foreach and
# single-tensor optimisers behave so, also under no_grad.
#
# Behaviour: after a step with fused=True the weight has other values and the counter is where it was.
#
# Output seen:
#   Adam single 1 foreach 1 fused 0
#   AdamW single 1 foreach 1 fused 0
#   SGD single 1 foreach 1 fused 0
# (whether the counter advanced in a step; the weight changed in every one)
#
# Why it matters: a trainer that keeps float32 weights and refreshes their bfloat16 copies when the counter advances
# trains with the weights of its first step. The loss is finite, the gradient norm is constant, and nothing fails.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.3.5
"$folder/env/bin/python" -W ignore - <<'PYTHON'
import torch

holds = True
for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
    seen = {}
    for name, how in (("single", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
        weight = torch.nn.Parameter(torch.full((3,), 2.0))
        weight.grad = torch.ones(3)
        optimizer, before = kind([weight], lr=0.5, **how), weight._version
        optimizer.step()
        assert (weight != 2.0).all()
        seen[name] = int(weight._version > before)
    print(kind.__name__, *(f"{name} {value}" for name, value in seen.items()), flush=True)
    holds &= seen == {"single": 1, "foreach": 1, "fused": 0}
raise SystemExit(0 if holds else 1)
PYTHON
