#!/usr/bin/env bash
# PEFT: leaving disable_adapter() makes every weight of the active adapter trainable, also those that were frozen.
#
# Version: peft 0.21.2 with transformers 5.23.0, torch 2.13.0 (CPU) and numpy 2.3.5, Python 3.11, Linux.
#
# Assumption: `with model.disable_adapter(): ...` computes with the base model, and afterwards the model is as before.
#
# Behaviour: when the block ends, requires_grad of all weights of the active adapter becomes True. A model whose A
# matrices are frozen (LoRA-FA), or whose adapter was loaded with is_trainable=False, trains them from then on.
#
# Output seen (weights of the adapter that are trainable, of two):
#   frozen A: 1 before the block, 2 after it
#   loaded with is_trainable=False: 0 before the block, 2 after it
#
# Why it matters: disable_adapter() is how the reference of a KL term is computed with LoRA, so the block runs in every
# step of GRPO, PPO and DPO. Gradients of the frozen weights take memory from the first step on, their norm counts in
# clipping, and an optimiser that was given all weights changes them.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.3.5
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check peft==0.21.2 transformers==5.23.0
FOLDER="$folder" "$folder/env/bin/python" -W ignore - <<'PYTHON'
import os

import torch
from peft import LoraConfig, PeftModel, get_peft_model


def base():
    return torch.nn.Sequential(torch.nn.Linear(4, 4))


def num_trainable(model):
    return sum(weight.requires_grad for name, weight in model.named_parameters() if "lora_" in name)


def around_the_block(model):
    before = num_trainable(model)
    with model.disable_adapter(), torch.no_grad():
        model(torch.ones(1, 4))
    return before, num_trainable(model)


frozen = get_peft_model(base(), LoraConfig(target_modules=["0"], r=2))
frozen.save_pretrained(os.environ["FOLDER"] + "/adapter")
for name, weight in frozen.named_parameters():
    if "lora_A" in name:
        weight.requires_grad_(False)
loaded = PeftModel.from_pretrained(base(), os.environ["FOLDER"] + "/adapter", is_trainable=False)
seen = around_the_block(frozen), around_the_block(loaded)
for what, (before, after) in zip(("frozen A", "loaded with is_trainable=False"), seen):
    print(f"{what}: {before} before the block, {after} after it")
raise SystemExit(0 if seen == ((1, 2), (0, 2)) else 1)
PYTHON
