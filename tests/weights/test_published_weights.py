"""Three trainer ranks keep the published weights together, and the servers get them whole and as differences."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from areal.api.engine import Ranks, WeightChannel
from areal.api.errors import WeightSyncError
from areal.engine.mesh import TrainerMesh
from areal.system import folders
from areal.system.network import TOKEN_VARIABLE, Host
from areal.weights import disk, weight_image
from areal.weights.collective import DeltaCollectiveChannel
from areal.weights.disk import DiskDeltaChannel, HttpDeltaChannel
from areal.weights.published_weights import PublishedWeights
from areal.weights.weight_files import checksum_of
from tests.expect import raises_code, serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer
from tests.rank_processes import run_ranks
from tests.trainer.conftest import RankGroup
from tests.weights.test_delta_channel import Machine, Machines, large_model, step, values
from tests.weights.test_delta_collective import Fleet
from tests.weights.test_weight_channels import assert_same

SIZE = 3


class Ranked:
    """One channel for each rank."""

    def __init__(self, make: Callable[[Ranks], WeightChannel]) -> None:
        self.group = RankGroup(SIZE)
        self.channels = self.group.run(lambda rank: make(FakeRanks(rank, self.group)))

    def serve(self, version: int) -> str:
        checksums = self.group.run(lambda rank: serve(self.channels[rank], version))
        assert checksums[1:] == [""] * (SIZE - 1)
        return checksums[0]

    def errors(self, version: int) -> list[str]:
        """What each rank raises when it publishes."""

        def code(rank: int) -> str:
            with pytest.raises(WeightSyncError) as error:
                self.channels[rank].publish(version)
            return error.value.code

        return self.group.run(code)

    def kept(self, rank: int) -> PublishedWeights:
        published = self.channels[rank]._published
        assert published is not None
        return published

    def assert_rank_0_counts(self) -> None:
        """The metrics of all ranks are added."""
        for channel in self.channels[1:]:
            assert {(metric.total, metric.count) for metric in channel.metrics().values()} == {(0.0, 0.0)}

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


@dataclass
class Setup:
    engine: FixedTrainer
    ranked: Ranked
    machines: Machines
    folder: Path = field(default=Path())

    def update(self, version: int) -> float:
        """Publish; returns the share of the bytes that were sent."""
        assert self.ranked.serve(version) == checksum_of(self.engine, FakeRanks())
        for machine in self.machines.all:
            assert_same(self.engine.model, machine.model)
        return values(self.ranked.channels[0])["share_of_full"]


@pytest.fixture
def small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight of the model is in another file."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(weight_image, "PUBLISHED_FILE_BYTES", 1)
    monkeypatch.setattr(folders, "_FIRST_PAUSE_S", 0.0)


@pytest.fixture(params=["http", "disk"])
def setup(request: pytest.FixtureRequest, tmp_path: Path, small_files: None) -> Iterator[Setup]:
    torch.manual_seed(3)
    engine, machines = FixedTrainer(large_model()), Machines([Machine(tmp_path / "one")])

    def make(ranks: Ranks) -> WeightChannel:
        if request.param == "http":
            return HttpDeltaChannel(engine, ranks, machines, host=Host())
        return DiskDeltaChannel(engine, ranks, machines, tmp_path / "shared", host=Host())

    made = Setup(engine, Ranked(make), machines, tmp_path)
    yield made
    for _ in range(2):
        made.ranked.close()
    for machine in machines.all:
        machine.puller.close()


def test_each_rank_keeps_a_part_and_servers_get_all(setup: Setup) -> None:
    assert setup.update(1) == 1.0
    for version in (2, 3, 4):
        step(setup.engine.model)
        assert 0.0 < setup.update(version) < 0.02
    assert setup.machines.all[0].problems == [""] * 4
    parts = [dict(setup.ranked.kept(rank)._image.weights()) for rank in range(SIZE)]
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted(spec.name for spec in setup.engine.weight_specs())
    assert all(parts)
    setup.ranked.assert_rank_0_counts()


def test_a_server_that_joins_gets_the_files_of_all_ranks(setup: Setup) -> None:
    setup.update(1)
    step(setup.engine.model)
    setup.update(2)
    setup.machines.all.append(Machine(setup.folder / "two"))
    step(setup.engine.model)
    setup.update(3)
    step(setup.engine.model)
    assert setup.update(4) < 0.02
    assert [machine.problems for machine in setup.machines.all] == [[""] * 4, [""] * 2]
    assert not list(setup.folder.glob("areal-*/*/*part_*")), "no files of parts stay after the next version"


def test_changes_of_one_rank_alone_are_sent(setup: Setup) -> None:
    """The last weight is not in the part of rank 0."""
    setup.update(1)
    last = list(setup.engine.model.parameters())[-1]
    assert setup.engine.weight_specs()[-1].name not in dict(setup.ranked.kept(0)._image.weights())
    with torch.no_grad():
        last[0, 0] += 1
    assert 0.0 < setup.update(2) < 0.01


def test_all_ranks_raise_when_rank_0_cannot_write_and_then_send_whole_weights(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.update(1)
    step(setup.engine.model)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_delta", lambda _, changes: next(changes) and tmp_path.read_bytes())
        assert setup.ranked.errors(2) == ["weights.not_written", *["weights.not_published"] * (SIZE - 1)]
    assert setup.update(2) == 1.0
    step(setup.engine.model)
    assert setup.update(3) < 0.02


def test_all_ranks_raise_for_other_weights_and_then_send_whole_ones(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.update(1)
    step(setup.engine.model)
    with monkeypatch.context() as patch:
        patch.setattr(setup.engine, "named_weights", lambda: iter([("other", torch.zeros(3))]))
        assert setup.ranked.errors(2) == ["weights.unexpected"] * SIZE
    assert setup.update(2) == 1.0


def test_a_part_that_another_rank_no_longer_has_is_an_error(setup: Setup, tmp_path: Path) -> None:
    setup.update(1)
    step(setup.engine.model)
    setup.update(2)  # the part of the first version stays where it was written
    published = setup.ranked.kept(0)
    listed = published._listed
    assert listed is not None
    setup.ranked.kept(1)._listed = None  # it takes newer weights
    with raises_code("weights.pull_failed"):
        published.write(listed, tmp_path / "version")
    published.write(folders.FolderList(1, []), tmp_path / "version")
    assert not (tmp_path / "version").exists(), "newer weights were taken"
    step(setup.engine.model)
    setup.update(3)
    assert not list(tmp_path.glob("areal-*/*/*part_*")), "nor what was not copied to its end"


def test_three_ranks_broadcast_all_weights_and_then_differences(small_files: None) -> None:
    torch.manual_seed(3)
    models = [large_model(), large_model()]
    fleet, engine = Fleet(models[0]), FixedTrainer(large_model())
    engines = [FixedTrainer(engine.model) for _ in range(SIZE)]
    ranked = Ranked(partial(_collective, engines, fleet))
    shares: list[float] = []
    for version in range(1, 6):
        if version == 4:
            fleet.join("late", models[1])
        assert ranked.serve(version) == checksum_of(engine, FakeRanks())
        shares.append(values(ranked.channels[0])["share_of_full"])
        for model in models[: len(fleet.live)]:
            assert_same(engine.model, model)
        step(engine.model)
    assert [share == 1.0 for share in shares] == [True, False, False, True, False]
    assert fleet.codes == []
    ranked.assert_rank_0_counts()
    assert {each.num_gathered for each in engines} == {5 * len(engine.weight_specs())}, "once for each version"
    ranked.close()
    for receiver in fleet.receivers.values():
        receiver.leave()


def _collective(engines: list[FixedTrainer], fleet: Fleet, ranks: Ranks) -> WeightChannel:
    return DeltaCollectiveChannel(engines[ranks.rank], ranks, fleet, bucket_bytes=0, backend="gloo", timeout_s=60.0)


def test_a_broadcast_that_fails_is_tried_again_without_another_pass_over_the_weights(
    small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    model = large_model()
    fleet, trained = Fleet(model), large_model()
    engines = [FixedTrainer(trained) for _ in range(SIZE)]
    ranked = Ranked(partial(_collective, engines, fleet))
    failures = [WeightSyncError("the first copy fails", code="weights.pull_failed")]
    contents = PublishedWeights.contents

    def failing(published: PublishedWeights) -> Iterator[Tensor]:
        if failures:
            raise failures.pop()
        return contents(published)

    monkeypatch.setattr(PublishedWeights, "contents", failing)
    ranked.serve(1)
    assert failures == []
    assert_same(trained, model)
    assert {each.num_gathered for each in engines} == {len(engines[0].weight_specs())}
    ranked.close()
    for receiver in fleet.receivers.values():
        receiver.leave()


def publish_on(mesh: TrainerMesh, folder: Path) -> list[float]:
    """What each of two processes does: five versions, and a server that joins before the fourth."""
    os.environ[TOKEN_VARIABLE] = "secret"
    tempfile.tempdir, weight_image.PUBLISHED_FILE_BYTES = str(folder), 1
    engine = FixedTrainer(large_model())
    machines = Machines([Machine(folder / "one")] if mesh.rank == 0 else [])
    channel = HttpDeltaChannel(engine, mesh, machines, host=Host())
    shares: list[float] = []
    for version in range(1, 6):
        if version == 4 and mesh.rank == 0:
            machines.all.append(Machine(folder / "two"))
        checksum = serve(channel, version)
        assert checksum == ("" if mesh.rank else checksum_of(engine, FakeRanks()))
        for machine in machines.all:
            assert_same(engine.model, machine.model)
        shares.append(values(channel)["share_of_full"])
        torch.manual_seed(version)  # both processes take the same step
        step(engine.model)
    channel.close()
    for machine in machines.all:
        machine.puller.close()
    return shares


def test_two_processes_publish_together(tmp_path: Path) -> None:
    """Over gloo and HTTP."""
    first, second = run_ranks(publish_on, tmp_path, imported=("tests.weights.test_published_weights",))
    assert first[0] == 1.0
    assert all(0.0 < share < 0.02 for share in first[1:])
    assert all(map(math.isnan, second)), "rank 0 alone counts"
