"""Owns the choice of the way weights travel to the servers."""

from __future__ import annotations

from areal.api.config import PPOConfig
from areal.api.engine import TrainEngine, WeightChannel
from areal.engine.hf_model import resolve_model_folder
from areal.engine.weight_sync.collective import CollectiveChannel
from areal.engine.weight_sync.disk import DiskChannel
from areal.rollout.client import RolloutClient
from areal.system.device import pick_device
from areal.system.run_paths import RunPaths


def build_weight_channel(
    config: PPOConfig, engine: TrainEngine, client: RolloutClient, paths: RunPaths, *, is_rank0: bool
) -> WeightChannel:
    """actor.weight_update_mode: disk or xccl (NCCL on CUDA, gloo on CPU)."""
    if config.actor.weight_update_mode == "disk":
        folder = resolve_model_folder(config.actor.path)
        return DiskChannel(engine, client, paths, is_rank0=is_rank0, model_folder=folder)
    backend = "nccl" if pick_device("auto") == "cuda" else "gloo"
    bucket_bytes = config.actor.weight_chunked_mem_mb * 2**20
    return CollectiveChannel(engine, client, bucket_bytes=bucket_bytes, backend=backend, is_rank0=is_rank0)
