"""The stand-in for SGLang's kernels, whose wheels are for CUDA only; and, since every SGLang process imports it
first, switches off pinned memory, which SGLang asks for with LoRA adapters though a machine without GPU has none."""

import torch
from areal_absent import lookup, open_submodules

from sgl_kernel._pinning import switch_off_pinned_memory

__version__ = "0.0.0"
__getattr__ = lookup("sgl_kernel")
open_submodules("sgl_kernel")
switch_off_pinned_memory()
for name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_gdn_gating_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):  # the processors of images import modules that look these operators up and do not call them
    torch.library.define(f"sgl_kernel::{name}", "() -> ()")
