"""Part 2: the train engine on a GPU against the CPU; FSDP, checkpointing, offload, recovery."""

import pytest
import torch

from areal.api.config import FSDPEngineConfig, MicroBatchSpec
from tests.engine.test_tree import LONG_ROWS, batch_of
from tests.gpu import bodies

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"fsdp": FSDPEngineConfig(offload_params=True)},
        {"mb_spec": MicroBatchSpec(max_tokens_per_mb=14)},
        {"mb_spec": MicroBatchSpec(n_mbs=7)},
        {"role": "critic"},
    ],
    ids=["plain", "checkpointed", "offloaded", "cut by tokens", "cut in seven", "critic"],
)
def test_gradients_are_those_of_the_cpu(gpu, models, model, options):
    assert bodies.gradient_error(gpu, models / model, **options) < 1e-4


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_gradients_over_trees_are_those_of_rows_on_the_cpu(gpu, models, options):
    options = {"batch": batch_of(LONG_ROWS), "shared_prefixes": "tree", **options}
    assert bodies.gradient_error(gpu, models / "qwen3", **options) < 1e-4


def test_every_policy_loss_is_that_of_the_cpu(gpu):
    errors = bodies.loss_errors(gpu)
    assert {name: error for name, error in errors.items() if not error < 1e-4} == {}


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo", "ipo"])
def test_training_on_rows_is_that_of_the_cpu_for_every_cut(gpu, models, kind):
    assert bodies.row_training_error(gpu, models, kind) < 1e-4


def test_offloaded_state_leaves_the_card_and_the_next_step_is_the_same(gpu, models):
    left, gap = bodies.offloaded_share(gpu, models / "qwen3", lambda: torch.cuda.memory_allocated(gpu))
    assert left < 0.05
    assert gap < 1e-5


def test_a_recovered_engine_continues_with_the_same_bits(gpu, models, tmp_path):
    assert bodies.recovered_equals_unbroken(gpu, models / "qwen3", tmp_path / "state")
