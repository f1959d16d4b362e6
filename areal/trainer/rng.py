"""The random number generators of a process: seeds, and their state for recovery checkpoints, one file per rank."""

import random
from typing import Any

import numpy as np
import orjson
import torch


def seed_process(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> bytes:
    """Return the state of the global generators of Python, numpy, torch and the GPU."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, words, gauss],
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return orjson.dumps(state)


def set_rng_state(data: bytes) -> None:
    """Restore the result of `rng_state`. Raises ValueError, KeyError or TypeError for other data."""
    state = orjson.loads(data)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _numpy_state() -> list[Any]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    inner = state["state"]
    return [state["bit_generator"], inner["key"].tolist(), inner["pos"], state["has_gauss"], state["gauss"]]


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
