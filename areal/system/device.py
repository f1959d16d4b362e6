"""Cores and GPUs of this machine. Imports torch only inside functions."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal.api.errors import ConfigError

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def pick_device(name: str) -> str:
    """The torch device for a configured one; auto = CUDA when there is a GPU. ConfigError when CUDA is absent."""
    if name == "cpu":
        return "cpu"
    import torch

    available = torch.cuda.is_available()
    if name == "auto" and not available:
        return "cpu"
    if not available:
        raise ConfigError(f"device={name!r}, but torch finds no CUDA device: use auto or cpu", code="launch.no_gpu")
    return f"cuda:{torch.cuda.current_device()}"  # torch.cuda.set_device refuses a device without an index


def has_bfloat16_products(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether oneDNN multiplies bfloat16 matrices on this processor: not on an x86 processor without AVX-512.

    There a product of torch takes 7 times as long as in float32, and that of a gradient up to 120 times. True where the
    features of the processor are not known.
    """
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return True
    features = next((line.split() for line in lines if line.startswith("flags")), None)
    return features is None or {"avx512bw", "avx512dq", "avx512vl"} <= {*features}


def bind_to_gpu_node(devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Run this process on the cores nearest to its GPU, the first in CUDA_VISIBLE_DEVICES, where they are known.

    Call it before other threads start. `devices`: Linux's folder of PCI devices.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if not gpu or not hasattr(os, "sched_setaffinity"):
        return
    lines = _nvidia_smi("--query-gpu=pci.bus_id", "--format=csv,noheader", "-i", gpu)
    try:
        bus = lines[0].strip().lower()[-len("0000:00:00.0") :]  # nvidia-smi has 8 digits of the domain, Linux 4
        near = _cores_in((devices / bus / "local_cpulist").read_text())
    except (OSError, ValueError, IndexError):
        return
    if usable := near & set(core_ids()):
        os.sched_setaffinity(0, usable)


def _cores_in(text: str) -> set[int]:
    """The cores of a list such as 0-3,8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


class CudaClock:
    """Times work in the current stream of the current CUDA device by events. See `areal.observe.phase.DeviceClock`."""

    def mark(self) -> object:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def core_ids() -> list[int]:
    """Numbers of the cores that this process may use; in a container they need not start at 0."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cpu_count(groups: Path = _GROUPS, process_groups: Path = _OWN_GROUPS) -> int:
    """Number of cores that this process may use: the smaller of its affinity and its container's quotas.

    `groups`: where control groups are mounted; `own`: Linux's list of those of this process.
    """
    cores = len(core_ids())
    for text in _group_values({"": "cpu.max"}, groups, process_groups):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def host_memory_bytes(groups: Path = _GROUPS, process_groups: Path = _OWN_GROUPS) -> int:
    """Memory that this process may use: that of the machine, or less where a control group limits it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = _group_values({"": "memory.max", "memory": "memory.limit_in_bytes"}, groups, process_groups)
    return min([total, *(int(text) for text in limits if text.isdigit())])


def _group_values(files: Mapping[str, str], groups: Path, process_groups: Path) -> Iterator[str]:
    """The texts of a file in the control groups of this process, also the outer ones. `files`: controllers of a
    hierarchy of version 1 ("" for version 2) -> name of the file. Source: cgroup-v1/memory.rst, cgroup-v2.rst."""
    try:
        lines = process_groups.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in files:
            folder = groups / controllers / path[1:]
            for each in (folder, *folder.parents):
                if each.is_relative_to(groups / controllers) and (each / files[controllers]).is_file():
                    yield (each / files[controllers]).read_text().strip()


def visible_gpus() -> list[str]:
    """Ids of the usable NVIDIA GPUs in the form of CUDA_VISIBLE_DEVICES, found without torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [part.strip() for part in chosen.split(",") if part.strip() and part.strip() != "-1"]
    return [str(index) for index, _ in enumerate(line for line in _nvidia_smi("-L") if line.startswith("GPU "))]


def gpu_memory_bytes() -> int | None:
    """Memory of the smallest NVIDIA GPU of this machine; None without one."""
    lines = _nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return min((int(line) * 2**20 for line in lines if line.strip().isdigit()), default=None)


def _nvidia_smi(*arguments: str) -> list[str]:
    """Lines that it prints; none when it is absent or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
