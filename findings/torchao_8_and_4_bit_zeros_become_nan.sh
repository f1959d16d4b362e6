#!/usr/bin/env bash
# torchao's float8 weight-only quantization turns an output whose weights are zero into NaN; its NVFP4 does so for layers.
#
# Version: torchao 0.18.0 (NVFP4: torchao.prototype.mx_formats), torch 2.13.0 (CPU), Python 3.11, Linux.
#
# Assumption: zero is a number of every format: an output with a row of zeros is zero after quantize_, as it was before,
# and as int8 and NVFP4 without a scale of the tensor give it.
#
# Behaviour: the scale of a row in float8 is its largest size / 448 = 0, without a lower limit (_choose_scale_float8); so
# is that of a tensor in NVFP4 by default (per_tensor_amax_to_scale). Weights are divided by it: 0 / 0 is stored as NaN,
# and the output is NaN for every input. No error, no warning.
#
# Output seen: as in `expected` below: outputs of 32 that are not finite
#
# Why it matters: rows and layers of zeros are usual (pruned channels; output projections of residual blocks, factors of
# adapters and new experts at the start), and one NaN in a block makes all logits NaN: every answer of a server that
# quantizes the weights of a trainer is then lost.
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
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

configs = {
    "int8": Int8WeightOnlyConfig(),
    "nvfp4 without a scale of the tensor": NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False),
    "nvfp4": NVFP4WeightOnlyConfig(),
    "float8": Float8WeightOnlyConfig(),
}
for name, config in configs.items():
    for zeros in (1, 32):
        model = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)).requires_grad_(False)
        model[0].weight.fill_(0.5)[:zeros] = 0
        quantize_(model, config)
        lost = ~model(torch.ones(1, 64, dtype=torch.bfloat16)).isfinite()
        print(f"{name}, {zeros} rows of zeros: {lost.sum().item()}")
PYTHON
)
expected='int8, 1 rows of zeros: 0
int8, 32 rows of zeros: 0
nvfp4 without a scale of the tensor, 1 rows of zeros: 0
nvfp4 without a scale of the tensor, 32 rows of zeros: 0
nvfp4, 1 rows of zeros: 0
nvfp4, 32 rows of zeros: 32
float8, 1 rows of zeros: 1
float8, 32 rows of zeros: 32'
echo "$seen"
[ "$seen" = "$expected" ]
