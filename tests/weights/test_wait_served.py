"""The trainer continues once its weights are sent; those that no replica installs are sent again before they change."""

from __future__ import annotations

import threading

import pytest
from torch import nn

from areal.api.data import WeightUpdate
from areal.api.errors import WeightSyncError
from areal.weights import collective as collective_module
from tests.expect import raises_code, serve
from tests.fixed_trainer import FixedTrainer
from tests.weights.test_weight_channels import Replicas, assert_same, channel_of, make_model


class Installing(Replicas):
    """Its update ends when `may_end` is set, after `failures` failures of updates that the replicas received."""

    def __init__(self, *models: nn.Module, failures: list[Exception]) -> None:
        super().__init__(*models)
        self.may_end, self.failures = threading.Event(), failures

    def publish(self, update: WeightUpdate) -> None:
        super().publish(update)
        if update.replicas:
            assert self.may_end.wait(200)
            if self.failures:
                raise self.failures.pop(0)


def test_the_trainer_continues_while_the_replicas_install_the_weights() -> None:
    control = Installing(make_model(1), failures=[])
    channel = channel_of(FixedTrainer(make_model(2)), control)
    channel.publish(1)  # returns although the update cannot end
    control.may_end.set()
    channel.wait_served()
    channel.wait_served()  # it was waited for
    assert [update.version for update in control.updates] == [1]
    channel.close()


@pytest.mark.parametrize(("num_failures", "code"), [(2, ""), (3, "fleet.update_failed")])
def test_weights_that_no_replica_installs_are_sent_again(
    num_failures: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_module, "SETTLE_S", 0.0)
    model = make_model(1)
    failures = [WeightSyncError("not installed", code="fleet.update_failed") for _ in range(num_failures)]
    control = Installing(model, failures=list(failures))
    engine = FixedTrainer(make_model(2))
    channel = channel_of(engine, control)
    channel.publish(1)
    control.may_end.set()
    if code:
        with raises_code(code):
            channel.wait_served()
    else:
        channel.wait_served()
        assert_same(engine.model, model)
    assert [update.version for update in control.updates] == [1, 1, 1]
    assert len({update.group_name for update in control.updates}) == 3
    channel.close()


def test_weights_are_sent_again_before_they_were_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller asks for it when its servers lost them."""
    monkeypatch.setattr(collective_module, "SETTLE_S", 0.0)
    control = Installing(make_model(1), failures=[WeightSyncError("lost", code="fleet.update_failed")])
    control.may_end.set()
    channel = channel_of(FixedTrainer(make_model(2)), control)
    channel.publish(1)
    serve(channel, 1)
    assert [update.version for update in control.updates] == [1, 1]
    channel.close()
