"""Owns what runs in the environment of a foreign inference server. Nothing here imports areal: it is not there.

The launcher puts this folder on PYTHONPATH of vLLM processes, so that `areal_transfer` and `areal_vllm` can be imported
there by these names; inside they import each other relatively or by them.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
"""What to put on PYTHONPATH."""
