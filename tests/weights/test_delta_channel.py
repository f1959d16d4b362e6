"""Servers get small differences where they have an earlier version, else whole weights, and always the trainer's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from areal.api.data import WeightUpdate
from areal.api.engine import WeightChannel
from areal.api.errors import RequestError, WeightSyncError
from areal.inference.weight_update import ServedWeights
from areal.system.folder_delta import write_delta
from areal.system.folders import FolderPuller
from areal.system.network import TOKEN_VARIABLE, Host
from areal.weights import disk, published_weights
from areal.weights.disk import DeltaChannel, DiskChannel, DiskDeltaChannel, HttpDeltaChannel
from areal.weights.published_weights import PublishedWeights
from areal.weights.weight_files import checksum_of
from tests.expect import raises_code, serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer
from tests.system.test_delta_transfer import copied
from tests.weights.test_weight_channels import assert_same

__all__ = ("copied",)


def large_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 100, bias=False)).to(torch.bfloat16)


def step(model: nn.Module, share: float = 0.02) -> None:
    """Change some numbers by one unit in the last place."""
    with torch.no_grad():
        for value in model.parameters():
            bits = value.data.view(torch.int16)
            bits += (torch.rand(value.shape) < share).to(torch.int16)


class Machine:
    """One server with a folder of copies."""

    def __init__(self, folder: Path, *, in_memory: bool = False) -> None:
        """`in_memory`: what differences make stays in memory, as in a native server."""
        folder.mkdir()
        self.folder, self.in_memory = folder, in_memory
        self.problems: list[str] = []
        self.start()

    def start(self) -> None:
        """A new process finds the copies of the one before, if that was killed."""
        self.puller = FolderPuller("secret", {}, in_memory=self.in_memory)
        self.model = large_model()

    def take(self, update: WeightUpdate) -> None:
        before, tempfile.tempdir = tempfile.tempdir, str(self.folder)
        try:
            pulled = self.puller.pull(update.path, update.mirrors, update.deltas)
        finally:
            tempfile.tempdir = before
        self.problems.append(pulled.problem)
        served = ServedWeights(self.model)
        with self.puller.reading(pulled.path) as contents:
            if contents is None:
                served.receive_folder(pulled.path)
            else:
                served.receive_contents(contents)
        served.check_complete("")
        served.install()


@dataclass
class Machines:
    """The controller with its servers."""

    all: list[Machine]
    away: set[int] = field(default_factory=set[int])
    """Servers that miss updates."""
    updates: list[WeightUpdate] = field(default_factory=list[WeightUpdate])

    def live_replicas(self, version: int) -> list[str]:
        return []

    def start_update(self, update: WeightUpdate) -> None:
        self.updates.append(update)

    def publish(self, update: WeightUpdate) -> None:
        for index, machine in enumerate(self.all):
            if index not in self.away:
                try:
                    machine.take(update)
                except RequestError as error:  # as the controller answers when all fail
                    raise WeightSyncError(str(error), code=error.code) from error


@dataclass
class Setup:
    engine: FixedTrainer
    channel: DeltaChannel
    machines: Machines
    copied: list[tuple[str, int]]

    def update(self, version: int) -> list[str]:
        """Publish; returns what the servers received: "whole", or the names of the differences."""
        self.copied.clear()
        serve(self.channel, version)
        for index, machine in enumerate(self.machines.all):
            if index not in self.machines.away:
                assert_same(self.engine.model, machine.model)
        return [("whole" if name.startswith("v") else name) for name, size in self.copied if size]


@pytest.fixture(params=["http", "disk", "http in memory", "disk in memory"])
def setup(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[tuple[str, int]]
) -> Iterator[Setup]:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(3)
    engine = FixedTrainer(large_model())
    kind, _, place = request.param.partition(" ")
    machines = Machines([Machine(tmp_path / "one", in_memory=bool(place))])
    made = Setup(engine, new_channel(engine, machines, kind), machines, copied)
    yield made
    made.channel.close()
    for machine in machines.all:
        machine.puller.close()


def new_channel(engine: FixedTrainer, machines: Machines, kind: str = "http", rank: int = 0) -> DeltaChannel:
    if kind == "http":
        return HttpDeltaChannel(engine, FakeRanks(rank), machines, host=Host())  # type: ignore[arg-type]
    return DiskDeltaChannel(engine, FakeRanks(rank), machines, machines.all[0].folder.parent / "shared", host=Host())  # type: ignore[arg-type]


over_http = pytest.mark.parametrize("setup", ["http", "http in memory"], indirect=True)
over_disk = pytest.mark.parametrize("setup", ["disk", "disk in memory"], indirect=True)


def values(channel: WeightChannel) -> dict[str, float]:
    return {name.removeprefix("update_weights/"): metric.value for name, metric in channel.metrics().items()}


def test_after_the_first_version_differences_are_sent(setup: Setup) -> None:
    assert setup.update(1) == ["whole"]
    full = values(setup.channel)["bytes"]
    assert full > 2 * 90_300
    assert values(setup.channel)["share_of_full"] == 1.0
    for version in (2, 3, 4):
        step(setup.engine.model)
        assert setup.update(version) == [f"delta_v{version:06d}"]
        result = values(setup.channel)
        assert result["bytes"] == setup.copied[0][1]
        assert result["share_of_full"] == result["bytes"] / full < 0.02
    assert setup.machines.all[0].problems == [""] * 4
    assert setup.channel.publish(4) == checksum_of(setup.engine, FakeRanks())
    deltas = {path.name.partition("-")[0] for path in setup.channel._folder.glob("delta_*")}
    whole = {path.parent.name.partition("-")[0] for path in setup.channel._folder.glob("v*/*.safetensors")}
    is_shared = isinstance(setup.channel, DiskDeltaChannel)
    assert deltas == {"delta_v000002", "delta_v000003", "delta_v000004"}
    assert whole == ({"v000001", "v000004"} if is_shared else {"v000001"}), "a version that is published again is whole"


def test_ranks_that_send_nothing_have_metrics_without_a_value(setup: Setup) -> None:
    other = new_channel(setup.engine, setup.machines, "disk", rank=1)
    assert {name: metric.count for name, metric in other.metrics().items()} == dict.fromkeys(setup.channel.metrics(), 0)


@over_http
def test_a_server_that_missed_versions_takes_their_differences_and_one_that_joins_takes_whole_weights(
    setup: Setup, tmp_path: Path
) -> None:
    setup.update(1)
    setup.machines.away = {0}
    for version in (2, 3):
        step(setup.engine.model)
        assert setup.update(version) == []
    setup.machines.away = set()
    setup.machines.all.append(Machine(tmp_path / "two", in_memory=setup.machines.all[0].in_memory))
    step(setup.engine.model)
    assert setup.update(4) == ["delta_v000002", "delta_v000003", "delta_v000004", "whole"]
    step(setup.engine.model)
    assert setup.update(5) == ["delta_v000005"] * 2


def test_a_server_process_that_starts_again_uses_the_copies_of_the_one_before(setup: Setup) -> None:
    setup.update(1)
    setup.machines.all[0].start()
    step(setup.engine.model)
    assert setup.update(2) == ["delta_v000002"]


def test_every_fiftieth_version_is_copied_whole(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_weights, "FULL_EVERY", 4)
    result: list[str] = []
    for version in range(3, 10):
        step(setup.engine.model)
        result += setup.update(version)
    kinds = [name.partition("_")[0] for name in result]
    assert kinds == ["whole", "whole", "delta", "delta", "delta", "whole", "delta"]


def test_differences_as_large_as_the_weights_are_not_sent(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.update(1)
    step(setup.engine.model)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_delta", lambda *args: write_delta(*args) + 200_000)
        assert setup.update(2) == ["whole"]
    assert (setup.machines.updates[-1].deltas, values(setup.channel)["share_of_full"]) == ({}, 1.0)
    step(setup.engine.model)
    assert setup.update(3) == ["delta_v000003"]


def test_after_an_update_that_failed_whole_weights_are_sent(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the bits in memory are those of the version that failed."""
    setup.update(1)
    step(setup.engine.model)
    specs = setup.engine.named_weights

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield next(specs())
        yield "other", torch.zeros(3)

    with monkeypatch.context() as patch:
        patch.setattr(setup.engine, "named_weights", broken)
        with raises_code("weights.unexpected"):
            setup.update(2)
    with monkeypatch.context() as patch:
        patch.setattr(setup.engine, "named_weights", lambda: iter([next(specs())]))
        with raises_code("weights.unexpected"):
            setup.update(2)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_delta", lambda *args: tmp_path.read_bytes())
        assert setup.update(2) == ["whole"]
        step(setup.engine.model)
        with raises_code("weights.not_written"):
            setup.update(3)
    assert setup.update(3) == ["whole"]
    step(setup.engine.model)
    assert setup.update(4) == ["delta_v000004"]


@over_http
def test_a_version_is_written_whole_when_a_server_asks_and_only_as_the_last_one(setup: Setup, tmp_path: Path) -> None:
    late = Machine(tmp_path / "two", in_memory=setup.machines.all[0].in_memory)
    setup.machines.all = []
    setup.update(1)
    step(setup.engine.model)
    setup.update(2)
    with raises_code("weights.not_served"):
        late.take(setup.machines.updates[0])
    assert not list(setup.channel._folder.glob("v*"))
    for _ in range(2):
        late.take(setup.machines.updates[1])
    assert_same(setup.engine.model, late.model)
    assert [path.name for path in setup.channel._folder.glob("v*")] == ["v000002"]
    late.puller.close()


@over_http
def test_a_long_chain_of_differences_loses_its_oldest(setup: Setup) -> None:
    """Each is about a tenth of the weights."""
    setup.update(1)
    for version in range(2, 16):
        step(setup.engine.model, share=0.6)
        setup.update(version)
    bases = [name.partition("-")[0] for name in setup.machines.updates[-1].deltas]
    sizes = [path.stat().st_size for path in setup.channel._folder.glob("delta_*/delta")]
    full = values(setup.channel)["bytes"] / values(setup.channel)["share_of_full"]
    assert bases == [f"v{version:06d}" for version in range(15 - len(bases), 15)]
    assert len(sizes) == len(bases)
    assert full - max(sizes) <= sum(sizes) < full


def test_the_same_version_again_is_not_copied_again_and_changed_weights_are_copied_whole(setup: Setup) -> None:
    setup.update(1)
    step(setup.engine.model)
    setup.update(2)
    assert setup.update(2) == []
    assert (len(setup.machines.updates[-1].deltas), values(setup.channel)["bytes"]) == (1, 0.0)
    step(setup.engine.model)
    assert setup.update(2) == ["whole"], "the folder of the version before is overwritten"
    step(setup.engine.model)
    assert setup.update(3) == ["delta_v000003"]


def test_only_the_first_version_removes_folders_that_are_not_finished(setup: Setup) -> None:
    """Later a server may wait for one that is being written."""
    folder = setup.channel._folder / ".v000009.writing"
    folder.mkdir(parents=True)
    setup.update(1)
    assert not folder.exists(), "it was left by a killed process"
    folder.mkdir()
    step(setup.engine.model)
    setup.update(2)
    assert folder.exists()


def test_a_trainer_that_starts_again_sends_whole_weights_first(setup: Setup) -> None:
    setup.update(1)
    step(setup.engine.model)
    setup.update(2)
    kind = "disk"
    if isinstance(setup.channel, HttpDeltaChannel):
        kind = "http"
        setup.channel._server.close()  # type: ignore[union-attr]  # killed: its folder stays
    setup.channel = new_channel(setup.engine, setup.machines, kind)
    assert setup.update(2) == [], "the server has these weights"
    step(setup.engine.model)
    assert setup.update(3) == ["delta_v000003"]


@over_disk
def test_servers_that_join_change_the_last_whole_version_on_the_shared_disk(setup: Setup, tmp_path: Path) -> None:
    setup.update(1)
    for version in (2, 3):
        step(setup.engine.model)
        setup.update(version)
    setup.machines.all.append(Machine(tmp_path / "two", in_memory=setup.machines.all[0].in_memory))
    step(setup.engine.model)
    assert setup.update(4) == ["delta_v000004", "delta_v000002", "delta_v000003", "delta_v000004"]
    step(setup.engine.model)
    assert setup.update(5) == ["delta_v000005"] * 2
    assert [machine.problems for machine in setup.machines.all] == [[""] * 5, [""] * 2]


@over_disk
def test_without_a_right_difference_on_the_shared_disk_a_server_takes_whole_weights_when_published_again(
    setup: Setup,
) -> None:
    setup.update(1)
    for version in (2, 3):
        setup.machines.away = {0}
        step(setup.engine.model)
        setup.update(version)
        delta = next(setup.channel._folder.glob(f"delta_v{version:06d}-*")) / "delta"
        content = delta.read_bytes()
        delta.unlink()
        if version == 3:  # the file has its checksum, and another one than the address
            delta.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
        server, update = setup.machines.all[0], setup.machines.updates[-1]
        with raises_code("weights.bad_delta"):
            server.take(update)
        setup.machines.away = set()
        assert setup.update(version) == ["whole"]
    step(setup.engine.model)
    assert setup.update(4) == ["delta_v000004"]


@over_disk
def test_whole_weights_for_a_server_with_a_damaged_copy_that_cannot_be_written_are_an_error(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.update(1)
    copy = next(setup.machines.all[0].folder.rglob("v000001*/model.safetensors"))
    content = copy.read_bytes()
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    step(setup.engine.model)
    with monkeypatch.context() as patch:
        patch.setattr(PublishedWeights, "write", lambda *args: tmp_path.read_bytes())
        with raises_code("weights.not_written", "version 2"):
            setup.update(2)
    assert not copy.exists(), "no second attempt begins with it"
    setup.update(2)
    assert setup.machines.all[0].problems == ["", ""], "made from the whole version on the shared disk"


@over_disk
def test_when_the_differences_since_the_last_whole_version_are_as_large_the_next_is_whole_too(
    setup: Setup, tmp_path: Path
) -> None:
    """Each is about a tenth of the weights."""
    setup.update(1)
    for version in range(2, 16):
        step(setup.engine.model, share=0.6)
        assert setup.update(version) == [f"delta_v{version:06d}"]
        full = values(setup.channel)["bytes"] / values(setup.channel)["share_of_full"]
        kept = sum(path.stat().st_size for path in setup.channel._folder.glob("delta_*/delta"))
        assert kept < 2 * full
    whole = {path.parent.name.partition("-")[0] for path in setup.channel._folder.glob("v*/*.safetensors")}
    assert len(whole) == 1
    assert "v000008" < min(whole) < "v000014"
    setup.machines.all.append(Machine(tmp_path / "two", in_memory=setup.machines.all[0].in_memory))
    step(setup.engine.model)
    result = setup.update(16)
    assert result == ["delta_v000016", *(f"delta_v{number:06d}" for number in range(int(min(whole)[1:]) + 1, 17))]


@over_disk
def test_folders_of_the_last_two_versions_stay_on_the_shared_disk(setup: Setup) -> None:
    (old := setup.channel._folder / "v000900").mkdir(parents=True)
    setup.update(1)
    for version in (49, 50, 51, 52):
        step(setup.engine.model)
        setup.update(version)
    left = sorted(path.name.partition("-")[0] for path in setup.channel._folder.iterdir())
    assert left == ["delta_v000051", "delta_v000052", "v000050", "v000051", "v000052"]
    assert not old.exists(), "of an earlier process"


@over_disk
def test_versions_that_are_published_again_do_not_fill_the_shared_disk(setup: Setup) -> None:
    """Each is written whole."""
    setup.update(1)
    for version in range(2, 8):
        step(setup.engine.model, share=0.6)
        assert setup.update(version) == [f"delta_v{version:06d}"]
        assert setup.update(version) == []
    left = sorted(path.name.partition("-")[0] for path in setup.channel._folder.iterdir())
    assert left == ["delta_v000006", "delta_v000007", "v000006", "v000007"]


@over_disk
def test_a_run_that_sends_whole_versions_after_differences_removes_those(setup: Setup) -> None:
    for version in (1, 2, 3):
        setup.update(version)
        step(setup.engine.model)
    setup.machines.all = []
    channel = DiskChannel(setup.engine, FakeRanks(), setup.machines, setup.channel._folder)
    for version in (4, 5):
        serve(channel, version)
    assert sorted(path.name for path in setup.channel._folder.iterdir()) == ["v000004", "v000005"]
