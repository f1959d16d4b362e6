"""Rules of a plan that depend on GPUs: how weights travel, variables of the processes, time limits. Pure functions."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from areal.api.config import BaseExperimentConfig, PPOConfig
from areal.api.config.launcher import LauncherConfig
from areal.api.config.rollout import InferenceEngineConfig
from areal.api.errors import ConfigError
from areal.launcher.placement import Placement
from areal.system.process import WeightTransport

_CONNECT_S = 300
"""Longest wait of NCCL for the ranks of a group, in seconds: the time limit of one weight bucket."""
_GPU_START_S = 1800.0
_BYTES_PER_S = 50e6
"""Assumed speed of reading a checkpoint over a slow shared disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPath:
    """How new weights reach the servers, and why."""

    transport: WeightTransport
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclVersions:
    """Versions of NCCL in the environments of both ends; empty = unknown."""

    trainers: str = ""
    servers: str = ""


def weight_path(config: PPOConfig, placed: Placement, *, is_attached: bool, nccl: NcclVersions) -> WeightPath:
    """What `actor.weight_update_mode` means for these places. ConfigError when xccl cannot work there.

    NCCL needs the same version on all ranks, and refuses two ranks on one GPU.
    """
    mode = config.actor.weight_update_mode
    if config.publishes_adapters:
        return WeightPath(transport="disk", reason="the servers get adapters alone, see actor.adapter_update_mode")
    if mode == "disk" or mode == "http":
        return WeightPath(transport=mode, reason=f"actor.weight_update_mode={mode}")
    trainer_gpu = bool(placed.trainers and placed.trainers[0].gpus)
    servers_gpu = bool(placed.servers and placed.servers[0][0].gpus)
    both: Literal["nccl", "gloo"] = "nccl" if trainer_gpu else "gloo"
    if is_attached:
        if mode == "auto":
            return WeightPath(transport="disk", reason="devices and libraries of attached servers are not known")
        return WeightPath(transport=both, reason="actor.weight_update_mode=xccl")
    is_native = config.server_backend == "native"
    problem, reason = "", "trainers and servers run on the CPU"
    if trainer_gpu != servers_gpu:
        problem = "only the servers have GPUs" if servers_gpu else "only the trainers have GPUs"
        if mode == "xccl" and (is_native or not servers_gpu):
            return WeightPath(transport="gloo", reason=problem)
    elif trainer_gpu:
        ends = [placed.trainers[0], *(place for members in placed.servers for place in members)]
        used = [(place.machine.host.node, gpu) for place in ends for gpu in place.gpus]
        ours, theirs = _numbers(nccl.trainers), _numbers(nccl.servers)
        reason = "trainers and servers have GPUs and one NCCL"
        if len(set(used)) < len(used):
            problem = "trainer-0 or a server shares a GPU with another one, which NCCL refuses"
        elif not is_native and ours and theirs and ours != theirs:
            problem = f"NCCL is {nccl.trainers} in the trainers and {nccl.servers} in the servers (server_python)"
        elif not is_native and not (ours and theirs) and mode == "auto":
            problem = "the NCCL versions of trainers and servers are not known"
    if problem and mode == "auto":
        return WeightPath(transport="disk", reason=problem)
    if problem:
        message = f"actor.weight_update_mode=xccl: {problem}: use disk or auto"
        raise ConfigError(message, code="launch.no_common_transport")
    return WeightPath(transport=both, reason=reason)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def gpu_variables(role: str, gpus: Sequence[str], nccl: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process with GPUs. Without GPUs there are none; those of the launcher's environment win.

    `nccl`: variables of NCCL that the trainers share with the servers.
    """
    if not gpus:
        return {}
    # The ids in CUDA_VISIBLE_DEVICES are those of nvidia-smi, which numbers by bus.
    found = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(_CONNECT_S)}
    if role == "trainer":
        # Packed rows differ in length from step to step; without this the allocator fragments the memory.
        found |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **nccl}
    return {name: os.environ.get(name, value) for name, value in found.items()}


def with_time_limits(config: BaseExperimentConfig, *, checkpoint_bytes: int, on_gpu: bool) -> BaseExperimentConfig:
    """The configuration with limits of a start that fit the size of the checkpoint; given values stay.

    A default becomes at least 1800 s on GPUs and a second for each 50 MB of the checkpoint.
    """
    reading_s = checkpoint_bytes / _BYTES_PER_S
    start_s = max(reading_s, _GPU_START_S if on_gpu else 0.0)
    ready_s, default = config.launcher.ready_timeout_s, LauncherConfig()
    if ready_s == default.ready_timeout_s:
        launcher = dataclasses.replace(config.launcher, ready_timeout_s=max(ready_s, start_s))
        config = dataclasses.replace(config, launcher=launcher)
    if isinstance(config, PPOConfig):
        rollout, usual = config.rollout, InferenceEngineConfig()
        if rollout.setup_timeout == usual.setup_timeout:
            rollout = dataclasses.replace(rollout, setup_timeout=max(rollout.setup_timeout, start_s))
        if rollout.weight_update_timeout_s == usual.weight_update_timeout_s:
            limit_s = max(rollout.weight_update_timeout_s, reading_s)
            rollout = dataclasses.replace(rollout, weight_update_timeout_s=limit_s)
        config = dataclasses.replace(config, rollout=rollout)
    return config
