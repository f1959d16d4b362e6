"""The policy's update through the FSDP engine: one process against two ranks with unequal and empty shares."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal.api.config.policy_losses import AGGREGATIONS
from tests.engine import loss_cases
from tests.rank_processes import run_ranks


@pytest.fixture(scope="module")
def folder(cases, tmp_path_factory) -> Path:
    """The folder that two ranks have filled."""
    folder = tmp_path_factory.mktemp("loss_ranks")
    cases.write_models(folder / "models")
    run_ranks(loss_cases.on_two_ranks, folder)
    return folder


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_ranks_with_micro_batches_learn_what_one_process_learns(cases, folder, aggregation):
    path = folder / "models" / "qwen3"
    config = loss_cases.options(aggregation)
    expected, metrics = loss_cases.update(path, None, loss_cases.rewarded_batch(), config)
    before = cases.weights_of(cases.make_engine(path))
    assert max(float((before[name] - value).abs().max()) for name, value in expected.items()) > 1e-3
    for rank in range(2):
        facts = json.loads((folder / f"facts-{rank}.json").read_text())
        for share in loss_cases.SHARES:
            found = load_file(folder / f"{aggregation}-{share}-{rank}")
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=f"{share}: {name}")
            assert facts[f"{aggregation}-{share}"] == pytest.approx(metrics, abs=1e-5)


def test_the_terms_and_filters_of_this_batch_are_not_idle(folder):
    metrics = json.loads((folder / "facts-0.json").read_text())["token-mean-uneven"]
    for name in ("filter/truncated_tokens", "filter/uniform_group_tokens", "actor/positive_nll", "actor/bonus_entropy"):
        assert metrics[name] > 0
