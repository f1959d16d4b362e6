"""Stages of the quickstart on Megatron-Core ranks: experts with replayed choices, PPO with a critic."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.expert_model import write_expert_model

REPOSITORY = Path(__file__).parents[2]


def launch(folder: Path, stage: str, *overrides: str) -> list[dict[str, float]]:
    """Run a stage of the quickstart; its metrics."""
    command = [sys.executable, "-m", "areal.launcher.local", "--config", f"examples/quickstart/{stage}.yaml"]
    subprocess.run([*command, f"cluster.fileroot={folder}", *overrides], cwd=REPOSITORY, check=True, timeout=1500)
    lines = (folder / "quickstart" / stage / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_experts_learn_with_the_choices_of_the_servers(tmp_path):
    data = tmp_path / "quickstart" / "data"
    subprocess.run([sys.executable, "examples/quickstart/prepare.py", str(data)], cwd=REPOSITORY, check=True)
    write_expert_model(data / "model", data / "model")
    launch(tmp_path, "sft", "allocation_mode=megatron:(attn:d2|ffn:e2)")
    rows = launch(
        tmp_path,
        "grpo",
        "allocation_mode=native:d1+megatron:(attn:d2|ffn:e2)",
        "actor.router_replay=true",
        "actor.router_aux_loss_coef=0.01",
        "total_train_steps=80",
    )
    rewards = [row["eval/sampled/reward"] for row in rows if "eval/sampled/reward" in row]
    assert max(rewards) > rewards[0] + 0.15, rewards
    trained = [row for row in rows if "actor/router_replayed" in row]
    assert min(row["actor/router_replayed"] for row in trained) > 0.8
    assert min(row["actor/router_agreement"] for row in trained) > 0.9
    assert all(row["actor/router_load_max"] >= 1 for row in trained)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_policy_and_its_critic_learn_on_pipeline_stages(tmp_path):
    data = tmp_path / "quickstart" / "data"
    subprocess.run([sys.executable, "examples/quickstart/prepare.py", str(data)], cwd=REPOSITORY, check=True)
    launch(tmp_path, "sft", "allocation_mode=megatron:p2")
    warm = "${cluster.fileroot}/quickstart/sft/checkpoints/model/step-000055"
    rows = launch(
        tmp_path,
        "grpo",
        "allocation_mode=native:d1+megatron:p2",
        "actor.weight_update_mode=disk",
        "actor.reward_norm=null",
        "actor.adv_norm={mean_level: batch, std_level: batch}",
        f"critic={{path: {warm}, dtype: float32, ppo_n_minibatches: 2, optimizer: {{lr: 2.0e-3, beta2: 0.99}}}}",
        "total_train_steps=50",
    )
    rewards = [row["eval/sampled/reward"] for row in rows if "eval/sampled/reward" in row]
    assert max(rewards) > rewards[0] + 0.1, rewards
    errors = [row["critic/squared_error"] for row in rows if "critic/squared_error" in row]
    assert sum(errors[-5:]) < sum(errors[:5]), errors
