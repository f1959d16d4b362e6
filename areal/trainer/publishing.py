"""How the trainer publishes its weights: choice of the channel, and publishing again what the servers have lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from areal.api.config import PPOConfig
from areal.api.engine import Ranks, WeightChannel, WeightSource
from areal.engine.hf_model import resolve_model_folder
from areal.observe.log import get_logger
from areal.rollout.client import RolloutClient, WeightsNeeded
from areal.system.device import pick_device
from areal.system.network import Host
from areal.system.run_paths import RunPaths
from areal.weights.collective import CollectiveChannel
from areal.weights.disk import DiskChannel

Answer = TypeVar("Answer")


def build_weight_channel(
    config: PPOConfig, engine: WeightSource, ranks: Ranks, client: RolloutClient, host: Host
) -> WeightChannel:
    """The channel that actor.weight_update_mode names: disk, or xccl (NCCL on CUDA, gloo on CPU)."""
    if config.actor.weight_update_mode == "disk":
        folder = resolve_model_folder(config.actor.path)
        return DiskChannel(engine, ranks, client, RunPaths.of(config), model_folder=folder)
    servers = config.allocation.inference
    return CollectiveChannel(
        engine,
        ranks,
        client,
        bucket_bytes=config.actor.weight_chunked_mem_mb * 2**20,
        backend="nccl" if pick_device("auto") == "cuda" else "gloo",
        host=host,
        ranks_per_replica=servers.instance_size if servers else 1,
    )


def ask_controller(question: Callable[[], Answer], *, channel: WeightChannel, ranks: Ranks, version: int) -> Answer:
    """Return the controller's answer to this rank, which holds the weights of `version`; a collective.

    A controller whose servers lost that version raises WeightsNeeded, on some ranks at least. Then all ranks publish it
    again, and those without an answer repeat the question.
    """
    answers: list[Answer] = []
    while True:
        try:
            if not answers:
                answers.append(question())
        except WeightsNeeded as reason:
            get_logger("trainer").warning("%s: publishing version %d again", reason, version)
        has_answer = torch.tensor([float(bool(answers))], dtype=torch.float64)
        if ranks.all_reduce(has_answer, "min").item():
            return answers[0]
        channel.publish(version)
