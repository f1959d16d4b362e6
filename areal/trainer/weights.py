"""Owns how a trainer rank gets its weights to the servers: over which channel, with which checksum, and when again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import torch
from torch import Tensor

from areal.api.config import PPOConfig
from areal.api.data import WeightSpec
from areal.api.engine import WeightChannel, WeightSource
from areal.engine.hf_model import resolve_model_folder
from areal.observe.log import get_logger
from areal.rollout.client import RolloutClient, WeightsNeeded
from areal.system.device import pick_device
from areal.system.network import Host
from areal.system.run_paths import RunPaths
from areal.trainer.checksum import WeightsChecksum
from areal.weights.collective import CollectiveChannel
from areal.weights.disk import DiskChannel

Answer = TypeVar("Answer")


class ChecksummedWeights:
    """The weights of a train engine as channels see them; rank 0 takes their checksum whenever they pass by."""

    def __init__(self, engine: WeightSource, *, is_rank0: bool) -> None:
        self._engine = engine
        self._is_rank0 = is_rank0
        self.checksum = ""
        """Of the last whole pass; stays empty on ranks above 0."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `WeightSource.named_weights`."""
        checksum = WeightsChecksum()
        for name, weight in self._engine.named_weights():
            if self._is_rank0:
                checksum.add(name, weight)
            yield name, weight
        if self._is_rank0:
            self.checksum = checksum.hexdigest()

    def weight_specs(self) -> list[WeightSpec]:
        """As `WeightSource.weight_specs`."""
        return self._engine.weight_specs()

    def all_reduce(self, values: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """As `WeightSource.all_reduce`."""
        return self._engine.all_reduce(values, op)


def checksum_of(engine: WeightSource, *, is_rank0: bool) -> str:
    """The checksum of a model as it is now, on rank 0; a collective."""
    weights = ChecksummedWeights(engine, is_rank0=is_rank0)
    for _ in weights.named_weights():
        pass
    return weights.checksum


class WeightPublisher:
    """Publications of one rank; all ranks call every method together."""

    def __init__(self, channel: WeightChannel, weights: ChecksummedWeights) -> None:
        """`channel` sends `weights`."""
        self._channel = channel
        self._weights = weights

    def publish(self, version: int) -> str:
        """Make the current weights policy `version` on every serving replica. Returns their checksum on rank 0."""
        self._channel.publish(version)
        return self._weights.checksum

    def ask(self, question: Callable[[], Answer], *, version: int) -> Answer:
        """What the controller answers this rank, which must hold `version`.

        A controller whose servers lost that version answers WeightsNeeded, at least to some ranks: then all ranks
        publish it again and those without an answer ask again.
        """
        answers: list[Answer] = []
        while True:
            try:
                if not answers:
                    answers.append(question())
            except WeightsNeeded as reason:
                get_logger("trainer").warning("%s: publishing version %d again", reason, version)
            has_answer = torch.tensor([float(bool(answers))], dtype=torch.float64)
            if self._weights.all_reduce(has_answer, "min").item():
                return answers[0]
            self._channel.publish(version)

    def close(self) -> None:
        self._channel.close()


def build_weight_publisher(
    config: PPOConfig,
    engine: WeightSource,
    client: RolloutClient,
    paths: RunPaths,
    host: Host | None = None,
    *,
    is_rank0: bool,
) -> WeightPublisher:
    """actor.weight_update_mode: disk or xccl (NCCL on CUDA, gloo on CPU)."""
    weights = ChecksummedWeights(engine, is_rank0=is_rank0)
    if config.actor.weight_update_mode == "disk":
        folder = resolve_model_folder(config.actor.path)
        channel = DiskChannel(weights, client, paths, is_rank0=is_rank0, model_folder=folder)
    else:
        backend = "nccl" if pick_device("auto") == "cuda" else "gloo"
        bucket_bytes = config.actor.weight_chunked_mem_mb * 2**20
        servers = config.allocation.inference
        channel = CollectiveChannel(
            weights,
            client,
            bucket_bytes=bucket_bytes,
            backend=backend,
            is_rank0=is_rank0,
            host=host,
            ranks_per_replica=servers.instance_size if servers else 1,
        )
    return WeightPublisher(channel, weights)
