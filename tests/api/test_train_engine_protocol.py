"""The protocol of train engines is small, and the table of backends agrees with what can be launched."""

import pytest

from areal.api.allocation import TRAIN_BACKENDS, AllocationMode, check_supported
from areal.api.engine import TrainEngine
from areal.api.errors import ConfigError
from areal.engine.build import TRAIN_ENGINES
from areal.engine.fsdp import FSDPEngine


def members() -> set[str]:
    return {name for name in dir(TrainEngine) if not name.startswith("_")}


def test_a_train_engine_has_at_most_thirteen_members():
    assert len(members()) <= 13, sorted(members())
    assert members() <= set(dir(FSDPEngine))


@pytest.mark.parametrize("backend", TRAIN_BACKENDS)
def test_a_backend_can_be_launched_when_it_has_a_factory(backend):
    mode = AllocationMode.parse(f"{backend}:d2")
    if backend in TRAIN_ENGINES:
        check_supported(mode)
    else:
        with pytest.raises(ConfigError):
            check_supported(mode)
