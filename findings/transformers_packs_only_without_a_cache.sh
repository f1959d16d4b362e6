#!/usr/bin/env bash
# transformers keeps packed sequences apart by their position ids only with use_cache=False and without attention mask.
#
# Version: transformers 5.23.0 with torch 2.13.0 (CPU) and numpy 2.3.5, Python 3.11, Linux; attention sdpa and eager.
#
# Assumption: position ids that start again at 0 mark the sequences of a packed row, and a model attends within each of
# them. use_cache decides what is returned, and an attention mask of ones, which tokenizers return, masks nothing: with
# the same ids and positions neither changes the logits.
#
# Behaviour: the second sequence of a row has the logits of the sequence alone only when the call has use_cache=False
# and no attention_mask. use_cache is True by default, in training too; with it, or with a mask of ones, every token
# attends to the sequences before its own, at positions that repeat. There is no warning.
#
# Output seen (largest difference of a logit of the second sequence from the sequence alone):
#   sdpa   use_cache=False 0.0000, default 0.2652, use_cache=False and a mask of ones 0.2652
#   eager  use_cache=False 0.0000, default 0.2652, use_cache=False and a mask of ones 0.2652
#
# Why it matters: a trainer that packs and recomputes log-probabilities with the default mixes the answers of a group. A
# pass with gradient checkpointing, which turns the cache off, then disagrees with the pass for evaluation, and the
# ratio of the two is not 1 before the first update.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.3.5
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check transformers==5.23.0
"$folder/env/bin/python" -W ignore - <<'PYTHON'
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

holds = True
shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
for attention in ("sdpa", "eager"):
    torch.manual_seed(0)
    config = Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention)
    model = Qwen3ForCausalLM(config).eval()
    first, second = torch.randint(0, 64, (1, 6)), torch.randint(0, 64, (1, 5))
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(6), torch.arange(5)])[None]
    ones = torch.ones_like(packed)

    def difference(**options):
        logits = model(packed, position_ids=positions, **options).logits[:, 6:]
        return (logits - alone).abs().max().item()

    with torch.no_grad():
        alone = model(second).logits
        apart, default, masked = (
            difference(use_cache=False),
            difference(),
            difference(use_cache=False, attention_mask=ones),
        )
    text = f"use_cache=False {apart:.4f}, default {default:.4f}, use_cache=False and a mask of ones {masked:.4f}"
    print(f"{attention:6}", text, flush=True)
    holds &= apart < 1e-5 and default > 0.01 and masked > 0.01
raise SystemExit(0 if holds else 1)
PYTHON
