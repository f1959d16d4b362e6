"""Cores and GPUs of this machine. Imports torch only inside functions."""

import os
import subprocess
from pathlib import Path

from areal.api.errors import ConfigError


def pick_device(name: str) -> str:
    """The torch device for a configured one; auto = CUDA when there is a GPU. ConfigError when CUDA is absent."""
    if name == "cpu":
        return "cpu"
    import torch

    available = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if available else "cpu"
    if not available:
        raise ConfigError(f"device={name!r}, but torch finds no CUDA device: use auto or cpu", code="launch.no_gpu")
    return name


def core_ids() -> list[int]:
    """Numbers of the cores that this process may use; in a container they need not start at 0."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cpu_count() -> int:
    """Number of cores that this process may use: the smaller of its affinity and the container's quota."""
    cores = len(core_ids())
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2: only the affinity counts
    return max(1, cores)


def visible_gpus() -> list[str]:
    """Ids of the usable NVIDIA GPUs in the form of CUDA_VISIBLE_DEVICES, found without torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [part.strip() for part in chosen.split(",") if part.strip() and part.strip() != "-1"]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index, _ in enumerate(line for line in listing.splitlines() if line.startswith("GPU "))]
