"""Code that runs in the environment of a foreign inference server. It does not import areal, which is not installed
there.

The launcher adds this folder to PYTHONPATH of vLLM processes. `areal_transfer` and `areal_vllm` are imported there by
these names.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
"""What to put on PYTHONPATH."""
