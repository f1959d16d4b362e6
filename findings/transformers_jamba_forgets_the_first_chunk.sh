#!/usr/bin/env bash
# A prompt of Jamba that is computed in two parts forgets the first part in its Mamba layers.
#
# Version: transformers 5.23.0 with torch 2.13.0, Python 3.11, Linux, on a CPU without the kernels of other packages.
#
# Assumption: `model(second, past_key_values=cache)` continues from the cache, however many tokens `second` has. That is
# so for the attention layers of every model, and for the Mamba layers of Bamba.
#
# Behaviour: the Mamba layers of Jamba read the recurrent state only where they get one token. With several tokens they
# begin with zeros and overwrite the state; the convolution does continue. There is no error and no warning.
#
# Output seen:
#   jamba whole 4.1e+00 differs, jamba one_by_one 3.9e-05 equal, bamba whole 2.9e-06 equal, bamba one_by_one 6.7e-06
#   equal: largest difference of log-probabilities of the second part from a pass over the whole sequence
#
# Why it matters: chunked prefill, a second turn behind a kept cache, and the verification of drafted tokens all
# compute several tokens behind a cache. Give such a layer one token after the other.
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

SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
             num_hidden_layers=2, initializer_range=0.3, pad_token_id=0)
FAMILIES = {
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2),
    "bamba": dict(attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16),
}

def behind(model, ids, sizes):
    """Log-probabilities of the tokens from the 12th on, computed behind the first ones in parts of these sizes."""
    found = model(ids[:, :12], use_cache=True)
    rows, place = [], 12
    for size in sizes:
        positions = torch.arange(place, place + size)[None]
        found = model(ids[:, place:place + size], past_key_values=found.past_key_values, position_ids=positions)
        rows.append(found.logits)
        place += size
    return torch.cat(rows, dim=1).log_softmax(-1)

for family, own in FAMILIES.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **own)).eval()
    ids = torch.randint(1, 50, (1, 30))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits.log_softmax(-1)[:, 12:]
        for name, sizes in (("whole", [18]), ("one_by_one", [1] * 18)):
            gap = (behind(model, ids, sizes) - whole).abs().max().item()
            print(family, name, f"{gap:.1e}", "differs" if gap > 1e-3 else "equal")
PYTHON
)
echo "seen: $seen"
kinds=$(cut -d' ' -f1,2,4 <<<"$seen" | tr '\n' ' ')
[ "$kinds" = "jamba whole differs jamba one_by_one equal bamba whole equal bamba one_by_one equal " ] || exit 1
