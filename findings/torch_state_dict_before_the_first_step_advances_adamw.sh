#!/usr/bin/env bash
# Reading AdamW's state before its first step counts as a step: the weights that follow differ.
#
# Version: torch 2.13.0 (CPU) with numpy 2.3.5, Python 3.11, Linux; Adam and AdamW.
#
# Assumption: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict and get_state_dict read the optimiser's
# state, as Optimizer.state_dict does. A run that saves a checkpoint before its first step trains as one that does not.
#
# Behaviour: when the optimiser has no state yet, both functions make one by a step with gradients of zero at a learning
# rate of zero. The weights stay, but `step` is 1 afterwards, in the checkpoint and in the optimiser that goes on
# training. The moments of that step are zero, so the correction of their bias divides by too large a number: AdamW's
# first update is 25% too small, the second 14%. An optimiser without a step counter is not affected (SGD).
#
# Output seen:
#   Adam step 1 without and 2 with a checkpoint before it; size of the first update 0.01000 and 0.00744
#   AdamW step 1 without and 2 with a checkpoint before it; size of the first update 0.01000 and 0.00744
#   SGD size of the first update 0.01000 and 0.01000
#
# Why it matters: trainers save "step 0", or recover a run that was killed before its first step. Such a run is not the
# run without the save, its replay does not give the same weights, and the step counter of the checkpoint disagrees with
# the trainer's. Nothing is logged.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.3.5
"$folder/env/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

holds = True
for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
    updates, steps = [], []
    for saves_before in (False, True):
        model = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(2.0)
        optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.0)
        if saves_before:
            get_optimizer_state_dict(model, optimizer)
            assert (model.weight == 2.0).all()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        updates.append((2.0 - model.weight).abs().mean().item())
        steps.append(int(optimizer.state[model.weight].get("step", 0)))
    sizes = f"size of the first update {updates[0]:.5f} and {updates[1]:.5f}"
    if kind is torch.optim.SGD:
        print(kind.__name__, sizes, flush=True)
        holds &= updates[0] == updates[1]
    else:
        print(f"{kind.__name__} step {steps[0]} without and {steps[1]} with a checkpoint before it; {sizes}", flush=True)
        holds &= steps == [1, 2] and updates[1] < 0.8 * updates[0]
raise SystemExit(0 if holds else 1)
PYTHON
