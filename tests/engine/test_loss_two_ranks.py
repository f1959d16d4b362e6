"""The policy's update through the FSDP engine: one process against two ranks with unequal and empty shares."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal.api.batch import TrainBatch
from areal.api.config import MicroBatchSpec, NormConfig, PPOActorConfig
from areal.api.config.policy_losses import AGGREGATIONS
from areal.api.metrics import metric_values
from areal.data.pack import take
from areal.engine.mesh import TrainerMesh
from areal.trainer.actor import PPOActor
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.policy_update import output_spec
from tests.engine.engine_cases import LENGTHS, SGD, make_batch, make_engine, weights_of
from tests.rank_processes import run_ranks

SHARES = {"uneven": [[0, 3, 6], [1, 2, 4, 5, 7, 8]], "empty": [[], list(range(9))]}
"""Groups are s % 3, so that these keep them whole."""


def options(aggregation: str, **others) -> PPOActorConfig:
    """Every term and every filter on."""
    scale = {"loss_scale_tokens": 6} if aggregation in ("token-sum", "seq-mean-token-sum-norm") else {}
    defaults = {
        "path": "x", "kl_ctl": 0.0, "ppo_n_minibatches": 1, "use_decoupled_loss": True, "behav_imp_weight_cap": 2.0,
        "entropy_coef": 0.3, "entropy_clamp": 0.2, "positive_nll_coef": 0.4, "mask_truncated": True,
        "dynamic_sampling": True, "shared_prefix_min_tokens": 1,
        "reward_norm": NormConfig(mean_level="group", std_level="batch"),
    }  # fmt: skip
    return PPOActorConfig(**defaults | scale | {"loss_aggregation": aggregation} | others)


def rewarded_batch() -> TrainBatch:
    """Nine sequences in three groups: two with mixed rewards, one uniform; two answers cut."""
    batch = make_batch()
    return replace(
        batch,
        advantages=None,
        rollout_logprobs=torch.where(batch.loss_mask, -3.0 + 0.5 * batch.advantages, 0.0),
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 1.0, 1.0, 2.0, 1.0]),
        group_ids=torch.arange(len(LENGTHS)) % 3,
        finished=torch.arange(len(LENGTHS)) % 4 != 1,
    )


def update(path: Path, mesh: TrainerMesh | None, batch: TrainBatch, config: PPOActorConfig, **engine_options):
    """One train step on `batch`; (weights after it, metrics of all ranks)."""
    engine = make_engine(path, mesh, outputs=output_spec(config), optimizer=SGD, **engine_options)
    actor = PPOActor(engine, config)
    batch = actor.with_prox_logprobs(batch)
    batch, filtered = actor.with_filters(batch)
    batch, _ = actor.with_correction(batch)
    metrics = actor.update(actor.with_advantages(batch)) | filtered
    return weights_of(engine), metric_values(reduce_metrics(metrics, engine))


def on_two_ranks(mesh: TrainerMesh, folder: Path) -> dict[str, dict[str, float]]:
    facts = {}
    for aggregation in AGGREGATIONS:
        for name, shares in SHARES.items():
            share = take(rewarded_batch(), shares[mesh.rank])
            spec = MicroBatchSpec(max_tokens_per_mb=15)
            weights, metrics = update(folder / "models" / "qwen3", mesh, share, options(aggregation), mb_spec=spec)
            save_file(weights, folder / f"{aggregation}-{name}-{mesh.rank}")
            facts[f"{aggregation}-{name}"] = metrics
    return facts


@pytest.fixture(scope="module")
def folder(cases, tmp_path_factory) -> Path:
    """The folder that two ranks have filled."""
    folder = tmp_path_factory.mktemp("loss_ranks")
    cases.write_models(folder / "models")
    run_ranks(on_two_ranks, folder)
    return folder


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_ranks_with_micro_batches_learn_what_one_process_learns(cases, folder, aggregation):
    path = folder / "models" / "qwen3"
    config = options(aggregation)
    expected, metrics = update(path, None, rewarded_batch(), config)
    before = cases.weights_of(cases.make_engine(path))
    assert max(float((before[name] - value).abs().max()) for name, value in expected.items()) > 1e-3
    for rank in range(2):
        facts = json.loads((folder / f"facts-{rank}.json").read_text())
        for share in SHARES:
            actual = load_file(folder / f"{aggregation}-{share}-{rank}")
            for name, value in expected.items():
                torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6, msg=f"{share}: {name}")
            assert facts[f"{aggregation}-{share}"] == pytest.approx(metrics, abs=1e-5)


def test_the_terms_and_filters_of_this_batch_are_not_idle(folder):
    metrics = json.loads((folder / "facts-0.json").read_text())["token-mean-uneven"]
    for name in ("filter/truncated_tokens", "filter/uniform_group_tokens", "actor/positive_nll", "actor/bonus_entropy"):
        assert metrics[name] > 0
