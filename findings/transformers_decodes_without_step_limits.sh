#!/usr/bin/env bash
# transformers limits the time steps of Nemotron-H in a prompt but not in generated tokens: other log-probabilities.
#
# Version: transformers 5.23.0 with torch 2.13.0, Python 3.11, Linux, on a CPU without the kernels of other packages.
#
# Assumption: a token has the same log-probabilities, up to rounding, whether the model computes it behind a cache or
# as a part of the whole sequence. That is so for Bamba, whose Mamba layers are of the same kind.
#
# Behaviour: Mamba layers of Nemotron-H and Zamba2 clamp the time step to at least `time_step_min` (0.001) where they
# compute several tokens. For one token behind a cache, the step is not clamped. Heads whose bias makes short steps
# forget and write less than in the other form. There is no error and no warning.
#
# Output seen:
#   nemotron_h 7.1e-01 differs, bamba 4.1e-06 equal: largest difference of log-probabilities
#
# Why it matters: in reinforcement learning the server decodes token by token and the trainer computes whole sequences,
# so that the ratio of their probabilities is not 1 for unchanged weights. Clamp the step that the layer's projection
# gives before the layer sees it.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.23.0 \
    torch==2.13.0 numpy==2.3.5
seen=$("$folder/env/bin/python" - 2>/dev/null <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
FAMILIES = {
    "nemotron_h": dict(layers_block_type=["linear_attention", "full_attention"], mamba_num_heads=4, mamba_head_dim=16,
                       n_groups=1, head_dim=8),
    "bamba": dict(num_hidden_layers=2, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16),
}
for family, own in FAMILIES.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **own, initializer_range=0.3)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.data.fill_(-9.0)  # steps of about 0.0001
    ids = torch.randint(0, 50, (1, 40))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits.log_softmax(-1)[:, 8:]
        found = model(ids[:, :8], use_cache=True)
        rows = []
        for place in range(8, 40):
            position = torch.tensor([[place]])
            found = model(ids[:, place:place + 1], past_key_values=found.past_key_values, position_ids=position)
            rows.append(found.logits)
    gap = (torch.cat(rows, dim=1).log_softmax(-1) - whole).abs().max().item()
    print(family, f"{gap:.1e}", "differs" if gap > 1e-4 else "equal")
PYTHON
)
echo "seen: $seen"
[ "$(cut -d' ' -f1,3 <<<"$seen" | tr '\n' ' ')" = "nemotron_h differs bamba equal " ] || exit 1
