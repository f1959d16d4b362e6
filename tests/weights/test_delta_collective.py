"""Over a collective, servers get small differences where all have an earlier version, else whole weights, and always
the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from areal.api.data import WeightSpec, WeightUpdate
from areal.api.errors import ArealError
from areal.inference.weight_update import ServedWeights
from areal.weights import published_weights
from areal.weights.collective import DeltaCollectiveChannel
from areal.weights.weight_files import checksum_of
from tests.expect import raises_code, serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer
from tests.weights.test_delta_channel import large_model, step, values
from tests.weights.test_weight_channels import Replicas, assert_same


class Fleet(Replicas):
    """Notes which version each replica has."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__(*models)
        self.versions = dict.fromkeys(self.receivers, 0)
        self.away: set[str] = set()
        self.codes: list[str] = []

    def live_replicas(self, version: int) -> list[str]:
        return [name for name in self.live if self.versions[name] != version and name not in self.away]

    def _take_in(self, name: str, rank: int, update: WeightUpdate, errors: list[Exception]) -> None:
        ours = list[Exception]()
        super()._take_in(name, rank, update, ours)
        self.codes += [error.code for error in ours if isinstance(error, ArealError)]
        errors += ours
        if not ours:
            self.versions[name] = update.version

    def join(self, name: str, model: nn.Module) -> None:
        self.receivers[name] = ServedWeights(model)
        self.versions[name] = 0
        self.live.append(name)


@dataclass
class Setup:
    engine: FixedTrainer
    fleet: Fleet
    models: list[nn.Module]
    channel: DeltaCollectiveChannel

    def update(self, version: int) -> tuple[int, bool]:
        """Publish; returns the number of differences in the last update, and whether all weights were sent."""
        assert serve(self.channel, version) == checksum_of(self.engine, FakeRanks())
        for name, model in zip(self.fleet.receivers, self.models, strict=True):
            if name not in self.fleet.away:
                assert self.fleet.versions[name] == version
                assert_same(self.engine.model, model)
        last = self.fleet.updates[-1]
        return len(last.delta_bytes), values(self.channel)["share_of_full"] == 1.0


@pytest.fixture
def setup() -> Iterator[Setup]:
    torch.manual_seed(3)
    models = [large_model().to(torch.float32), large_model()]
    fleet = Fleet(*models)
    engine = FixedTrainer(large_model())
    channel = DeltaCollectiveChannel(engine, FakeRanks(), fleet, bucket_bytes=0, backend="gloo", timeout_s=60.0)  # type: ignore[arg-type]
    yield Setup(engine, fleet, models, channel)
    channel.close()
    for receiver in fleet.receivers.values():
        receiver.leave()


def damage(fleet: Fleet, name: str) -> None:
    """Change one bit of the weights that a server keeps for differences."""
    image = fleet.receivers[name]._image
    assert image is not None
    next(iter(image[0].contents.values()))[-1] ^= 1


def test_after_the_first_version_differences_are_broadcast(setup: Setup) -> None:
    assert setup.update(1) == (0, True)
    full = values(setup.channel)["bytes"]
    assert full > 2 * 90_300
    for version in (2, 3, 4):
        step(setup.engine.model)
        assert setup.update(version) == (1, False)
        assert values(setup.channel)["bytes"] == sum(setup.fleet.updates[-1].delta_bytes.values()) < 0.02 * full
    assert len({update.group_name for update in setup.fleet.updates}) == 1
    assert setup.fleet.codes == []


def test_a_replica_that_joins_gets_whole_weights_with_the_others(setup: Setup) -> None:
    setup.update(1)
    step(setup.engine.model)
    setup.update(2)
    setup.models.append(large_model())
    setup.fleet.join("late", setup.models[-1])
    step(setup.engine.model)
    assert setup.update(3) == (0, True)
    step(setup.engine.model)
    assert setup.update(4) == (1, False)


def test_replicas_that_missed_versions_get_their_differences_together(setup: Setup) -> None:
    setup.update(1)
    setup.fleet.away = {"r1"}
    for version in (2, 3):
        step(setup.engine.model)
        assert setup.update(version) == (1, False)
    setup.fleet.away = set()
    step(setup.engine.model)
    assert setup.update(4) == (3, False)
    assert setup.fleet.codes == []


def test_differences_are_kept_up_to_a_share_of_the_weights(setup: Setup) -> None:
    """Each is about a tenth of the weights, so two are kept."""
    setup.update(1)
    setup.fleet.away = {"r1"}
    for version in (2, 3, 4):
        step(setup.engine.model, share=0.6)
        assert setup.update(version) == (1, False)
    assert len(setup.channel._deltas) == 2
    setup.fleet.away = set()
    step(setup.engine.model)
    assert setup.update(5) == (0, True), "r1 has a version that is too old"


def test_a_replica_whose_weights_differ_gets_whole_weights_and_the_others_serve_meanwhile(setup: Setup) -> None:
    setup.update(1)
    damage(setup.fleet, "r0")
    step(setup.engine.model)
    serve(setup.channel, 2)
    assert (setup.fleet.codes, setup.fleet.versions) == (["weights.bad_delta"], {"r0": 1, "r1": 2})
    assert setup.update(2) == (0, True)
    assert setup.fleet.updates[-1].replicas == ["r0"]
    step(setup.engine.model)
    assert setup.update(3) == (1, False)


def test_when_all_differ_the_second_attempt_has_whole_weights(setup: Setup) -> None:
    setup.update(1)
    for name in ("r0", "r1"):
        damage(setup.fleet, name)
    step(setup.engine.model)
    assert setup.update(2) == (0, True)
    assert setup.fleet.codes == ["weights.bad_delta"] * 2
    assert [len(update.delta_bytes) for update in setup.fleet.updates] == [0, 1, 0]


def test_every_fiftieth_version_and_changed_weights_of_the_same_one_are_whole(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_weights, "FULL_EVERY", 4)
    result: list[bool] = []
    for version in (3, 4, 5, 6, 6, 7):
        step(setup.engine.model)
        setup.fleet.versions = dict.fromkeys(setup.fleet.versions, 0)
        result.append(setup.update(version)[1])
    assert result == [True, True, False, False, True, False]


def test_after_a_trainer_that_failed_while_it_took_weights_all_are_sent(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.update(1)
    step(setup.engine.model)
    with monkeypatch.context() as patch:
        patch.setattr(setup.engine, "named_weights", lambda: iter(()))
        with raises_code("weights.unexpected"):
            serve(setup.channel, 2)
    assert setup.update(2) == (0, True)


class Reversed(FixedTrainer):
    """Has the weights of its model in the opposite order."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter([*super().named_weights()][::-1])

    def weight_specs(self) -> list[WeightSpec]:
        return super().weight_specs()[::-1]


@pytest.mark.parametrize("trainer", [FixedTrainer, Reversed])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_server_stores_weights_as_the_trainer_lists_them_that_sends_them(
    trainer: type[FixedTrainer], dtype: torch.dtype
) -> None:
    """Two weights of one shape: with wrong places they would be exchanged."""

    def square() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))

    model = square()
    fleet = Fleet(model)
    for version, engine in enumerate((FixedTrainer(square().to(torch.bfloat16)), trainer(square().to(dtype))), 1):
        channel = DeltaCollectiveChannel(engine, FakeRanks(), fleet, bucket_bytes=0, backend="gloo", timeout_s=20.0)  # type: ignore[arg-type]
        serve(channel, version)
        channel.close()
        assert_same(engine.model, model)
    assert fleet.codes == []


def test_a_server_that_leaves_while_it_copies_answers_with_an_error(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would say that it has all weights, of which it forgot some."""
    receive = ServedWeights.receive_value

    def left(served: ServedWeights, name: str, value: Tensor) -> None:
        receive(served, name, value)
        if served is setup.fleet.receivers["r0"] and served.group_name:
            served.leave()

    with monkeypatch.context() as patch:
        patch.setattr(ServedWeights, "receive_value", left)
        serve(setup.channel, 1)
    assert (setup.fleet.codes, setup.fleet.versions) == (["weights.transfer_failed"], {"r0": 0, "r1": 1})
    assert setup.update(1) == (0, True)
