"""New weights reach a real server exactly, over either channel and in either type; bad folders never do."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal.api.data import WeightUpdate
from areal.api.errors import RequestError, WeightSyncError
from areal.fleet.fleet import Fleet
from tests.expect import serve
from tests.fixed_trainer import FixedTrainer
from tests.servers.checkpoints import Scorer, build_model
from tests.servers.real_server import RealServer
from tests.servers.server_kit import PROMPT, TOLERANCE, Kit, a_request, gap, largest_gap


async def greedy(fleet: Fleet, version: int) -> tuple[list[int], list[float]]:
    response = await fleet.agenerate(a_request(60, greedy=True))
    assert response.output_versions == [version] * 60
    return response.output_ids, response.output_logprobs


async def checksum(server: RealServer) -> object:
    """SGLang's own view of the weights it holds."""

    def ask() -> object:
        body = json.dumps({"action": "checksum"}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.address}/weights_checker", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    return await asyncio.to_thread(ask) if server.backend == "sglang" else None


async def test_disk_and_collective_bring_the_same_weights(
    server: RealServer, kit: Kit, old: Scorer, new: Scorer
) -> None:
    fleet = await kit.fleet(server)
    trainer = FixedTrainer(build_model(2))
    disk, collective = kit.disk(fleet, trainer), kit.collective(fleet, trainer)
    first, first_sum = await greedy(fleet, 0), await checksum(server)
    for version in range(1, 5):
        trainer.model = build_model(2 if version % 2 else 1)
        await asyncio.to_thread(serve, disk if version in (1, 4) else collective, version)
        response = await fleet.agenerate(a_request(60))
        assert response.output_versions == [version] * 60
        assert gap(response, new if version % 2 else old) < TOLERANCE
        if version == 1:
            second, second_sum = await greedy(fleet, 1), await checksum(server)
        tokens, logprobs = await greedy(fleet, version)
        assert tokens == (second if version % 2 else first)[0]
        assert largest_gap(logprobs, (second if version % 2 else first)[1]) < 1e-5
        assert await checksum(server) == (second_sum if version % 2 else first_sum)
    assert first[0] != second[0]
    info = await kit.replica(server).info()
    assert info.version == 4


@pytest.mark.parametrize("dtypes", ["bfloat16", "mixed"])
async def test_weights_in_other_types_arrive(server: RealServer, kit: Kit, tmp_path: Path, dtypes: str) -> None:
    """What a trainer with actor.dtype=bfloat16 holds; mixed: its norms and biases stay float32."""
    fleet = await kit.fleet(server)
    model = build_model(2)
    rounded = build_model(2)
    for item, same in zip(model.parameters(), rounded.parameters(), strict=True):
        if dtypes == "bfloat16" or item.dim() > 1:
            same.data = item.data.bfloat16().float()
            item.data = item.data.bfloat16()
    await asyncio.to_thread(serve, kit.collective(fleet, FixedTrainer(model)), 1)
    rounded.save_pretrained(tmp_path / "rounded")
    response = await fleet.agenerate(a_request(60))
    assert response.output_versions == [1] * 60
    assert gap(response, Scorer(tmp_path / "rounded")) < TOLERANCE


def spoil(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "absent":
        shutil.rmtree(folder)
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        tensors = load_file(weights)
        name = "model.layers.1.mlp.down_proj.weight"
        if how == "a weight is missing":
            del tensors[name]
        else:
            tensors[name] = torch.zeros(3, 3)
        save_file(tensors, weights, metadata={"format": "pt"})


BAD = ["absent", "no config", "no weights", "cut short", "a weight is missing", "a weight has another shape"]


@pytest.mark.parametrize("how", BAD)
async def test_a_bad_folder_is_refused_and_changes_nothing(
    server: RealServer, kit: Kit, old: Scorer, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(kit.models["new"], folder)
    spoil(folder, how)
    fleet, replica = await kit.fleet(server), kit.replica(server)
    with pytest.raises(RequestError):
        await replica.update_weights(WeightUpdate(version=9, kind="disk", path=str(folder)), rank=1, mode="abort")
    assert (await replica.info()).version == 0
    response = await fleet.agenerate(a_request(30))
    assert response.output_versions == [0] * 30
    assert gap(response, old) < TOLERANCE
    assert server.is_alive


async def test_an_update_that_the_trainer_leaves_ends_and_the_next_one_arrives(
    server: RealServer, kit: Kit, new: Scorer
) -> None:
    """A trainer that dies between two buckets: the server stops waiting and takes part in a new group."""
    fleet = await kit.fleet(server, weight_update_timeout_s=60.0)

    class Dying(FixedTrainer):
        def named_weights(self):  # type: ignore[no-untyped-def]
            for count, pair in enumerate(super().named_weights()):
                if self.is_dying and count == 10:
                    raise LookupError("the trainer dies")
                yield pair

        is_dying = False

    trainer = Dying(build_model(1))
    channel = kit.collective(fleet, trainer)
    await asyncio.to_thread(serve, channel, 1)
    trainer.is_dying, trainer.model = True, build_model(2)
    with pytest.raises((LookupError, WeightSyncError)):
        await asyncio.to_thread(serve, channel, 2)
    trainer.is_dying = False
    await asyncio.to_thread(serve, channel, 2)
    response = await fleet.agenerate(a_request(30, prompt=PROMPT))
    assert response.output_versions == [2] * 30
    assert gap(response, new) < TOLERANCE
