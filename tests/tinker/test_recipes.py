"""Unmodified recipes of tinker-cookbook 0.6.1 against the service, each for a few steps."""

import json
import math

import pytest

from tests.tinker.recipe_folder import BASE, MODEL, SMALL

MATH_RL = "math_rl.train groups_per_batch=6 group_size=4 max_steps=2"
DPO = "preference.dpo.train dataset=hhh batch_size=4 max_steps=2"
GUESS = "multiplayer_rl.guess_number.train batch_size=2 group_size=4 max_steps=1 eval_every=0"
RL_LOOP = "rl_loop batch_size=8 group_size=8 max_steps=2 max_tokens=20"


def run_recipe(served, words, log):
    """The finished process, and what it did to the counts of the service."""
    recipe, *options = words.split()
    before = served.audit()
    result = served.python("-m", f"tinker_cookbook.recipes.{recipe}", *options, f"log_path={log}")
    after = served.audit()
    return result, {name: after[name] - before[name] for name in ("optimiser_steps", "failed", "waiting", "models")}


def metrics_of(log):
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def last_checkpoint(log):
    return json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "words", "steps", "logged"),
    [
        (MODEL, f"{MATH_RL} loss_fn=importance_sampling", 2, {"grad_norm:mean", "optim/kl_sample_train_v1"}),
        (MODEL, f"{MATH_RL} loss_fn=ppo max_steps_off_policy=2", 2, {"grad_norm:mean"}),
        (SMALL, GUESS, 1, {"grad_norm:mean", "optim/kl_sample_train_v1"}),
        (BASE, DPO, 2, {"dpo_loss", "margin", "test/nll"}),
    ],
)
def test_a_recipe_ends_with_its_steps(serve, tmp_path, name, words, steps, logged):
    result, counts = run_recipe(serve(name), words, log := tmp_path / "log")
    assert result.returncode == 0, result.stderr[-3000:]
    assert counts == {"optimiser_steps": steps, "failed": 0, "waiting": 0, "models": 1}
    rows = metrics_of(log)
    values = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert all(map(math.isfinite, values))
    assert logged <= set().union(*rows)
    first = rows[0].get("optim/kl_sample_train_v1", 0.0)
    assert abs(first) < 1e-4  # the trainer's log-probabilities are those of the samples
    assert last_checkpoint(log)["sampler_path"].endswith("/sampler_weights/final")


def test_rl_loop_continues_from_the_weights_of_sl_loop(serve, tmp_path):
    served = serve(BASE)
    result, counts = run_recipe(served, "sl_loop batch_size=8 learning_rate=1e-2", tmp_path / "sl")
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [row["train_mean_nll"] for row in metrics_of(tmp_path / "sl")]
    assert counts == {"optimiser_steps": len(losses), "failed": 0, "waiting": 0, "models": 1}
    assert losses[0] > 5.0
    assert losses[-1] < 0.6
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl/checkpoints.jsonl").write_text(json.dumps(last_checkpoint(tmp_path / "sl") | {"batch": 0}) + "\n")
    result, counts = run_recipe(served, f"{RL_LOOP} loss_fn=cispo", tmp_path / "rl")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = metrics_of(tmp_path / "rl")
    assert counts == {"optimiser_steps": 2, "failed": 0, "waiting": 0, "models": 1}
    assert all(row["reward/total"] > 0 and row["grad_norm:mean"] > 0 for row in rows)


@pytest.mark.parametrize(("name", "words"), [(MODEL, MATH_RL)])
def test_a_loss_without_formula_ends_the_recipe_with_advice(serve, tmp_path, name, words):
    result, counts = run_recipe(serve(name), words, tmp_path / "log")
    assert result.returncode == 1
    assert "loss_fn=stable_reinforce has no published formula: use loss_fn=cispo, ppo or" in result.stderr
    assert (counts["optimiser_steps"], counts["models"]) == (0, 1)
