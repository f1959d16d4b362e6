"""The collective channel brings every replica exactly the trainer's weights, and ends when something fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from areal.api.data import WeightSpec, WeightUpdate
from areal.api.errors import RequestError, WeightSyncError
from areal.inference.weight_update import ServedWeights
from areal.weights import collective as collective_module
from areal.weights.collective import CollectiveChannel, plan_buckets
from areal.weights.weight_files import checksum_of
from tests.expect import serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer


def make_model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7, bias=False)).to(dtype)
    model[2].weight = model[0].weight
    return model


class Threads:
    """Ranks that are threads, which reduce a flag."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=200)
        self._values: list[Tensor] = []

    def all_reduce(self, rank: int, value: Tensor, op: str) -> Tensor:
        assert op == "min"
        self._values.append(value)
        self._barrier.wait()
        result = torch.stack(self._values).amin(0)
        if self._barrier.wait() == 0:
            self._values.clear()
        self._barrier.wait()
        return result


class Replicas:
    """The controller and its replicas, without HTTP: each replica takes in an update in a thread of its own."""

    def __init__(self, *models: nn.Module) -> None:
        self.receivers = {f"r{i}": ServedWeights(model) for i, model in enumerate(models)}
        self.live = list(self.receivers)
        self.updates: list[WeightUpdate] = []
        self.fail: Exception | None = None
        self.served: int | None = None
        self.die_at: int | None = None
        """The last replica leaves before it takes in this bucket of the next update."""

    def live_replicas(self, version: int) -> list[str]:
        return list(self.live)

    def publish(self, update: WeightUpdate) -> None:
        if not update.replicas:
            if self.served != update.version:
                raise WeightSyncError(f"version {update.version} is not served")
            return
        self.updates.append(update)
        if self.fail is not None:
            raise self.fail
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=self._take_in, args=(name, 1 + index * update.ranks_per_replica, update, errors))
            for index, name in enumerate(update.replicas)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(errors) == len(threads):
            raise WeightSyncError(f"no replica took in version {update.version}: {errors[0]}")
        self.served = update.version

    def _take_in(self, name: str, rank: int, update: WeightUpdate, errors: list[Exception]) -> None:
        receiver = self.receivers[name]
        try:
            if receiver.group_name != update.group_name:
                address = update.master_address, update.master_port
                receiver.join(*address, rank, update.world_size, update.group_name, update.backend, 60.0)
            if update.published:
                receiver.receive_published(update.buckets[0], update.published, update.delta_bytes)
            for index, bucket in enumerate([] if update.published else update.buckets):
                if index == self.die_at and name == self.live[-1]:
                    self.live.remove(name)
                    self.die_at = None
                    receiver.leave()
                receiver.receive(bucket)
            receiver.check_complete("")
            receiver.install()
        except Exception as error:  # noqa: BLE001 - a replica that fails is the point of some tests
            errors.append(error)


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value.to(second.state_dict()[name].dtype)), name


def test_buckets_hold_no_more_than_their_bytes() -> None:
    sizes = [10, 10, 100, 5, 30]
    specs = [WeightSpec(name=f"w{i}", shape=[size], dtype="float32") for i, size in enumerate(sizes)]
    plan = plan_buckets(specs, 100)
    assert [[spec.name for spec in bucket] for bucket in plan] == [["w0", "w1"], ["w2"], ["w3"], ["w4"]]
    assert plan[0][0] == specs[0]


def test_within_a_bucket_the_widest_dtypes_come_first() -> None:
    dtypes = ["bfloat16", "float32", "uint8", "int64", "float16", "float32"]
    specs = [WeightSpec(name=f"w{i}", shape=[3], dtype=dtype) for i, dtype in enumerate(dtypes)]
    plan = plan_buckets(specs, 60)
    assert [[spec.name for spec in bucket] for bucket in plan] == [["w3", "w1", "w0", "w4", "w2"], ["w5"]]


def channel_of(
    engine: FixedTrainer, control: object, ranks: FakeRanks | None = None, **options: object
) -> CollectiveChannel:
    settings = {"bucket_bytes": 300, "backend": "gloo", "timeout_s": 60.0} | options
    return CollectiveChannel(engine, ranks or FakeRanks(), control, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sent", ["float32", "of several widths"])
def test_collective_weights_arrive_at_all_replicas(dtype: torch.dtype, sent: str) -> None:
    models = [make_model(1, dtype), make_model(2, dtype)]
    control = Replicas(*models)
    engine = FixedTrainer(make_model(3))
    if sent != "float32":
        engine.model = with_narrow_bias(engine.model)
    channel = channel_of(engine, control, bucket_bytes=300 if sent == "float32" else 600)
    for version in (1, 2):
        engine.model = make_model(10 + version)
        if sent != "float32":
            engine.model = with_narrow_bias(engine.model)
        serve(channel, version)
        for model in models:
            assert_same(engine.model, model)
    assert engine.num_gathered == 2 * len(engine.weight_specs()), "once a publication, the first too"
    assert len(control.updates[0].buckets) == (2 if sent == "float32" else 1)
    assert control.updates[0].group_name == control.updates[1].group_name  # the group lasts
    channel.close()


def with_narrow_bias(model: nn.Sequential) -> nn.Sequential:
    """Its bias is bfloat16 and comes between float32 weights."""
    linear = model[1]
    assert isinstance(linear, nn.Linear)
    weight = linear._parameters.pop("weight")
    linear.bias = nn.Parameter(linear.bias.to(torch.bfloat16))
    linear.register_parameter("weight", weight)
    return model


class TwoRanks:
    """Each replica is two ranks, with a whole model each."""

    def __init__(self, control: Replicas, *others: nn.Module) -> None:
        self.control = control
        self.others = [ServedWeights(model) for model in others]

    def live_replicas(self, version: int) -> list[str]:
        return self.control.live_replicas(version)

    def publish(self, update: WeightUpdate) -> None:
        threads = [
            threading.Thread(target=self._take_in, args=(receiver, 2 + 2 * index, update))
            for index, receiver in enumerate(self.others)
        ]
        for thread in threads:
            thread.start()
        self.control.publish(update)
        for thread in threads:
            thread.join()

    def _take_in(self, receiver: ServedWeights, rank: int, update: WeightUpdate) -> None:
        address = update.master_address, update.master_port
        receiver.join(*address, rank, update.world_size, update.group_name, update.backend, 60.0)
        for bucket in update.buckets:
            receiver.receive(bucket)
        receiver.check_complete("")
        receiver.install()


def test_a_replica_of_two_ranks_has_two_ranks_of_the_group() -> None:
    models = [make_model(seed) for seed in (1, 2, 3, 4)]
    control = TwoRanks(Replicas(*models[:2]), *models[2:])
    engine = FixedTrainer(make_model(5))
    channel = channel_of(engine, control, ranks_per_replica=2)
    serve(channel, 1)
    for model in models:
        assert_same(engine.model, model)
    channel.close()


def test_weights_without_a_spec_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_module, "SETTLE_S", 0.0)
    engine = FixedTrainer(make_model(3))
    announced = engine.weight_specs()
    engine.weight_specs = lambda: announced  # type: ignore[method-assign]
    engine.model = make_model(3, torch.bfloat16)
    channel = channel_of(engine, Replicas(make_model(1)))
    with pytest.raises(WeightSyncError):
        serve(channel, 1)
    channel.close()


def test_a_trainer_that_fails_between_buckets_is_not_retried() -> None:
    class Failing(FixedTrainer):
        def named_weights(self) -> Iterator[tuple[str, Tensor]]:
            for name, value in super().named_weights():
                if name == "1.bias":
                    raise LookupError("the trainer fails")
                yield name, value

    control = Replicas(make_model(1))
    channel = channel_of(Failing(make_model(2)), control)
    with pytest.raises(LookupError):
        serve(channel, 1)
    assert len(control.updates) == 1
    channel.close()


def test_a_new_replica_makes_a_new_group() -> None:
    models = [make_model(1), make_model(2)]
    control = Replicas(*models)
    control.live = ["r0"]
    engine = FixedTrainer(make_model(3))
    channel = channel_of(engine, control)
    serve(channel, 1)
    control.live = ["r0", "r1"]
    serve(channel, 2)
    for model in models:
        assert_same(engine.model, model)
    assert control.updates[0].group_name != control.updates[1].group_name
    channel.close()


def test_a_replica_that_dies_during_a_broadcast_costs_at_most_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_module, "SETTLE_S", 0.1)
    monkeypatch.setattr(collective_module, "JOIN_TIMEOUT_S", 1e4)  # longer than the test may take
    models = [make_model(1), make_model(2)]
    control = Replicas(*models)
    engine = FixedTrainer(make_model(3))
    channel = channel_of(engine, control, timeout_s=1e4)
    serve(channel, 1)
    control.die_at = 1
    engine.model = make_model(4)
    serve(channel, 2)
    assert_same(engine.model, models[0])
    # r0 may have had all buckets already: then the version is served, and the attempt was none
    assert [update.replicas for update in control.updates[1:]] in ([["r0", "r1"]], [["r0", "r1"], ["r0"]])
    serve(channel, 3)
    assert control.updates[-1].replicas == ["r0"]
    channel.close()


def test_nothing_is_sent_when_every_replica_serves_the_version() -> None:
    control = Replicas(make_model(1))
    channel = channel_of(FixedTrainer(make_model(3)), control, timeout_s=5.0)
    control.live = []
    control.served = 4
    serve(channel, 4)
    assert control.updates == []
    control.live = ["r0"]
    serve(channel, 5)
    assert [update.version for update in control.updates] == [5]
    channel.close()


def test_a_refused_publication_ends_the_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(collective_module, "JOIN_TIMEOUT_S", 1e4)  # longer than the test may take
    model = make_model(1)
    control = Replicas(model)
    engine = FixedTrainer(make_model(3))
    channel = channel_of(engine, control, timeout_s=1e4)
    for error, num_attempts in ((WeightSyncError("no replica took it"), 3), (RequestError("no such fleet"), 1)):
        control.fail = error
        control.updates.clear()
        with pytest.raises(type(error), match=str(error)):
            serve(channel, 1)
        assert len(control.updates) == num_attempts
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("join")]
    control.fail = None
    serve(channel, 1)
    assert_same(engine.model, model)
    channel.close()


def test_a_publication_without_replicas_ends() -> None:
    control = Replicas()
    channel = channel_of(FixedTrainer(make_model(3)), control, timeout_s=0.1)
    with pytest.raises(WeightSyncError) as error:
        serve(channel, 1)
    assert error.value.code == "weights.no_replica"


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_gather_the_same_weights_and_fail_together(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_module, "SETTLE_S", 0.0)
    group = Threads(2)
    control = Replicas(make_model(1))
    control.fail = WeightSyncError("refused") if fails else None
    engines = [FixedTrainer(make_model(3)) for _ in range(2)]
    channels = [channel_of(engine, control, FakeRanks(rank, group)) for rank, engine in enumerate(engines)]
    errors: list[Exception] = []
    checksums: list[str] = []

    def publish(channel: CollectiveChannel) -> None:
        try:
            checksums.append(serve(channel, 1))
        except WeightSyncError as error:
            errors.append(error)

    threads = [threading.Thread(target=publish, args=(channel,)) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engines[0].num_gathered == engines[1].num_gathered
    assert len(errors) == (2 if fails else 0)
    assert sorted(checksums) == ([] if fails else ["", checksum_of(engines[0], FakeRanks())])
    assert not fails or "weights.not_published" in [error.code for error in errors]
    channels[0].close()
