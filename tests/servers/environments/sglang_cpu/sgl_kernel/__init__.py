"""The stand-in for SGLang's kernels, whose wheels are for CUDA only; and, since every SGLang process imports it
first, switches off pinned memory, which SGLang asks for with LoRA adapters though a machine without GPU has none."""

from areal_absent import lookup, open_submodules

from sgl_kernel._pinning import switch_off_pinned_memory

__version__ = "0.0.0"
__getattr__ = lookup("sgl_kernel")
open_submodules("sgl_kernel")
switch_off_pinned_memory()
