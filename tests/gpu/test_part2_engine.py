"""Part 2: the train engine on a GPU against the CPU; FSDP, checkpointing, offload, recovery."""

import pytest

from areal.api.config import FSDPEngineConfig
from tests.gpu import bodies

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True}, {"fsdp": FSDPEngineConfig(offload_params=True)}],
    ids=["plain", "checkpointed", "offloaded"],
)
def test_gradients_are_those_of_the_cpu(gpu, models, model, options):
    assert bodies.gradient_error(gpu, models / model, **options) < 1e-4


def test_a_recovered_engine_continues_with_the_same_bits(gpu, models, tmp_path):
    assert bodies.recovered_equals_unbroken(gpu, models / "qwen3", tmp_path / "state")
