"""The disk channel brings every replica exactly the trainer's weights, and keeps no more folders than it should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn

from areal.api.data import WeightUpdate
from areal.api.errors import WeightSyncError
from areal.inference.weight_update import ServedWeights
from areal.system.durable import is_complete
from areal.system.run_paths import RunPaths
from areal.weights import disk as disk_module
from areal.weights.disk import DiskChannel
from tests.expect import raises_code, serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer
from tests.weights.test_weight_channels import assert_same, make_model


def disk_channel(engine: FixedTrainer, control: object, folder: Path, **options: object) -> DiskChannel:
    return DiskChannel(engine, FakeRanks(), control, RunPaths(folder).weights, **options)  # type: ignore[arg-type]


class DiskReplica:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths: list[str] = []
        self.started: list[int] = []

    def live_replicas(self, version: int) -> list[str]:
        return ["r0"]

    def start_update(self, update: WeightUpdate) -> None:
        self.started.append(update.version)  # `publish` does all of it

    def publish(self, update: WeightUpdate) -> None:
        assert is_complete(Path(update.path))
        self.paths.append(update.path)
        served = ServedWeights(self.model)
        served.receive_folder(Path(update.path))
        served.check_complete("")
        served.install()


@pytest.mark.parametrize("shard_bytes", [2**30, 300])
def test_disk_weights_arrive_and_old_versions_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(disk_module, "MAX_FILE_BYTES", shard_bytes)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    replica = DiskReplica(make_model(1))
    engine = FixedTrainer(make_model(2))
    channel = disk_channel(engine, replica, tmp_path, model_folder=tmp_path / "model")
    stale = tmp_path / "weights" / "v000099"  # from before a recovery
    stale.mkdir(parents=True)
    for leftover in (".v000098.writing", ".v000001.old", ".v000097.removed"):  # of a trainer that was killed
        (tmp_path / "weights" / leftover).mkdir()
    for version in (1, 2, 3):
        engine.model = make_model(10 + version)
        serve(channel, version)
        assert_same(engine.model, replica.model)
    folder = tmp_path / "weights"
    assert sorted(path.name for path in folder.iterdir()) == ["v000002", "v000003"]
    marker = json.loads((folder / "v000003" / "COMPLETE").read_text())
    assert marker["crc32"] == {}, "checksums were computed though no reader compares them"
    files = {path.name for path in (folder / "v000003").iterdir()}
    assert {"config.json", "COMPLETE"} < files
    assert ("model.safetensors.index.json" in files) == (shard_bytes == 300)


def test_the_trainer_continues_while_the_servers_read_the_folder(tmp_path: Path) -> None:
    replica = DiskReplica(make_model(1))
    channel = disk_channel(FixedTrainer(make_model(2)), replica, tmp_path)
    for version in (1, 2, 3):
        channel.publish(version)
        assert (replica.started, len(replica.paths)) == (list(range(1, version + 1)), version - 1)
        channel.wait_served()
        channel.wait_served()  # it was waited for
        assert len(replica.paths) == version


def test_a_failed_disk_publication_gathers_all_weights(tmp_path: Path) -> None:
    class Refusing(DiskReplica):
        def publish(self, update: WeightUpdate) -> None:
            raise WeightSyncError("refused", code="fleet.update_failed")

    engine = FixedTrainer(make_model(1))
    with raises_code("fleet.update_failed"):
        serve(disk_channel(engine, Refusing(make_model(2)), tmp_path), 1)
    assert engine.num_gathered == 3
    (tmp_path / "weights2").write_text("in the way")
    blocked = disk_channel(engine, Refusing(make_model(2)), tmp_path / "weights2")
    with pytest.raises(WeightSyncError) as error:
        blocked.publish(1)
    assert error.value.code == "weights.not_written"
    assert engine.num_gathered == 6


def test_the_same_memory_under_two_names_is_written_twice(tmp_path: Path) -> None:
    class Tied(FixedTrainer):
        def named_weights(self) -> Iterator[tuple[str, Tensor]]:
            yield from self.model.named_parameters(remove_duplicate=False)

    replica = DiskReplica(make_model(1))
    engine = Tied(make_model(2))
    serve(disk_channel(engine, replica, tmp_path), 1)
    assert_same(engine.model, replica.model)
