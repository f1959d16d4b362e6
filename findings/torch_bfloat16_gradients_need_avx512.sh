#!/usr/bin/env bash
# On a CPU without AVX-512 the input gradient of a bfloat16 nn.Linear takes many times its forward pass.
#
# Version: torch 2.13.0 (CPU) with numpy 2.3.5, Python 3.11, Linux x86-64. Seen on a processor with AVX2 and without
# AVX-512. The script switches oneDNN off, which multiplies bfloat16 matrices fast, but only with AVX-512.
#
# Assumption: a processor without bfloat16 instructions costs a constant factor, that of a conversion to float32. The
# input gradient has as many multiplications as the forward pass and takes about as long, as it does in float32.
#
# Behaviour: the time of torch's own product depends on the storage order. The forward pass, by the transposed weight,
# takes 8 times as long as in float32. The input gradient multiplies two matrices that are stored by rows and takes more
# than 100 times as long as in float32, so the time of a forward pass does not predict that of a train step.
#
# Output seen (milliseconds):
#   float32: forward 26, input gradient 33
#   bfloat16: forward 200, input gradient 5502
#
# Why it matters: `dtype: bfloat16` is the usual setting of a training. On a laptop of this kind a train step of a 135M
# model took 186 s instead of 9 s in float32, and most of it was spent in the gradient of the output head.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cat > "$folder/measure.py" <<'PYTHON'
import time

import torch

torch.set_num_threads(1)


def milliseconds(call):
    times = []
    for _ in range(4):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return min(times)


def passes(dtype):
    """Of the product and of the gradient of its input: 256 tokens, 4096 inputs, 1024 outputs."""
    tokens, weight = torch.randn(256, 4096, dtype=dtype), torch.randn(1024, 4096, dtype=dtype)
    gradient = torch.randn(256, 1024, dtype=dtype)
    forward = milliseconds(lambda: torch.nn.functional.linear(tokens, weight))
    backward = milliseconds(lambda: torch.mm(gradient, weight))
    print(f"{str(dtype)[6:]}: forward {forward:.0f}, input gradient {backward:.0f}")
    return backward / forward


with torch.backends.mkldnn.flags(enabled=False):
    exact, reduced = passes(torch.float32), passes(torch.bfloat16)
raise SystemExit(0 if exact < 2 and reduced > 4 else 1)
PYTHON
"$folder/env/bin/python" -W ignore "$folder/measure.py"
