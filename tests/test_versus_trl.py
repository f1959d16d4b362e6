"""The parts of benchmark/versus_trl.py that need no TRL: derived settings, rewards, figures of a run."""

import importlib
import json
from pathlib import Path

import pytest

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def versus(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    return importlib.import_module("versus_trl")


def test_trl_trains_as_areal_is_configured(versus, monkeypatch):
    monkeypatch.chdir(ROOT)
    cases = [(versus.QUICKSTART, 512, 2, 250), (versus.WIDE, 64, 1, 14), (versus.SMOLLM2, 64, 2, 24)]
    for path, completions, minibatches, steps in cases:
        config = load_experiment(["--config", path])
        assert isinstance(config, PPOConfig)
        assert config.actor.optimizer is not None
        result = versus.trl_settings(config, folder="out")
        assert result["per_device_train_batch_size"] * result["steps_per_generation"] == completions
        assert result["steps_per_generation"] == minibatches
        assert result["max_steps"] == steps * minibatches
        assert result["warmup_steps"] == int(0.05 * steps * minibatches)
        assert result["num_generations"] == config.gconfig.n_samples
        assert result["max_completion_length"] == config.gconfig.max_new_tokens
        assert (result["learning_rate"], result["adam_beta2"]) == (
            config.actor.optimizer.lr,
            config.actor.optimizer.beta2,
        )
        assert (result["epsilon"], result["beta"], result["loss_type"]) == (0.2, 0.0, "bnpo")
        assert (result["bf16"], result["generation_kwargs"]) == (False, None)


def test_trl_computes_in_bfloat16_and_writes_equal_lengths_where_areal_does(versus, monkeypatch):
    monkeypatch.chdir(ROOT)
    changes = ["actor.dtype=bfloat16", "gconfig.min_new_tokens=48", "gconfig.max_new_tokens=48"]
    result = versus.trl_settings(load_experiment(["--config", versus.WIDE, *changes]), folder="out")
    assert (result["bf16"], result["max_completion_length"]) == (True, 48)
    assert result["generation_kwargs"] == {"min_new_tokens": 48}


@pytest.mark.parametrize(("batched", "chosen"), [((3.0, 9.0), True), ((1.0, 8.9), False), ((None, 0.0), False)])
def test_trl_runs_with_the_fastest_trial_that_does_the_whole_work(versus, tmp_path, monkeypatch, batched, chosen):
    monkeypatch.setattr(versus, "REPOSITORY", tmp_path)
    monkeypatch.chdir(ROOT)
    (tmp_path / "rows").write_text(json.dumps({"messages": [], "answer": "{}", "data_source": "1 key"}) + "\n")
    config = load_experiment(
        ["--config", versus.SMOLLM2, f"train_dataset.path={tmp_path}/rows", "gconfig.min_new_tokens=9"]
    )
    asked = []

    def figures(spec, folder):
        trial = (spec["threads"], spec["grpo"]["use_transformers_continuous_batching"])
        asked.append((*trial, spec["grpo"]["max_steps"], spec["first"], spec["last"]))
        assert (spec["columns"], spec["lora"]["r"]) == (["answer", "data_source"], 16)
        seconds, tokens = measured[trial]
        return None if seconds is None else {"seconds_per_step": seconds, "tokens_per_answer": tokens}

    monkeypatch.setattr(versus, "ALL_CORES", 4)
    monkeypatch.setattr(versus, "trl_figures", figures)
    measured = {(1, False): (4.0, 9.0), (4, False): (5.0, 9.0), (1, True): batched}
    result = versus.run_trl(config, (2, 24))
    tried = [(1, False, 4, 1, 2), (4, False, 4, 1, 2), (1, True, 4, 1, 2)]
    assert asked == [*tried, (1, chosen, 48, 2, 24)]
    assert result["chosen"]["continuous_batching"] == chosen
    assert [trial["seconds_per_step"] for trial in result["trials"]] == [4.0, 5.0, 3.0 if chosen else None]


def test_the_specification_names_the_rows_and_the_goals(versus, tmp_path, monkeypatch):
    monkeypatch.setattr(versus, "REPOSITORY", tmp_path)
    monkeypatch.chdir(ROOT)
    config = load_experiment(["--config", versus.QUICKSTART, f"cluster.fileroot={tmp_path}"])
    assert isinstance(config, PPOConfig)
    rows = Path(str(config.train_dataset.path))
    rows.parent.mkdir(parents=True)
    rows.write_text(json.dumps({"prompt": "21=", "answer": "12"}) + "\n")
    spec = versus.trl_spec(config, folder="out", measured=(5, None))
    assert spec["columns"] == ["answer"]
    assert spec["goals"] == {"greedy": 0.96, "sampled": 0.87}
    assert (spec["eval_every"], spec["first"], spec["last"]) == (10, 5, None)


def test_rewards_goals_and_figures(versus):
    task = importlib.import_module("versus_task")
    assert task.digit_share(prompt="", completion="1a2b", prompt_ids=[], completion_ids=[]) == 0.5
    assert task.digit_share(prompt="", completion="", prompt_ids=[], completion_ids=[]) == 0.0
    assert task.reached({"greedy": 0.9}, {"greedy": 0.9})
    assert not task.reached({"greedy": 0.9, "sampled": 0.5}, {"greedy": 1.0})
    assert not task.reached({}, {"greedy": 1.0})
    rows = [{"step": 0, "eval/greedy/reward": 0.1, "eval/sampled/reward": 0.2}] + [
        {
            "step": step,
            "time": 1000.0 + 2.0 * step,
            "seconds/elapsed": 2.0 * step + (step > 2),
            "batch/answer_length": 6.0,
            "rollout/staleness_mean": 1.0,
        }
        for step in range(1, 6)
    ]
    rows[-1] |= {"eval/greedy/reward": 0.97, "eval/sampled/reward": 0.9}
    result = task.areal_figures(rows, ready_s=1001.5, first=3)
    assert result == {
        "steps": 5, "seconds": 8.5, "seconds_per_step": 2.0, "tokens_per_answer": 6.0, "staleness": 1.0,
        "greedy": 0.97, "sampled": 0.9,
    }  # fmt: skip
    assert task.areal_figures(rows, ready_s=0.0, first=2, last=4)["seconds_per_step"] == 2.5
    with pytest.raises(ValueError, match="5"):
        task.seconds_per_step([1.0] * 5, first=5, last=5)


def test_answers_of_the_wide_model_end_at_one_token_in_both_systems(versus, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.Qwen2ForCausalLM", lambda config: config)  # 24M parameters take a second
    versus.make_wide_model(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 1
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) >= 14 * 8
    assert {len(tokenizer.encode(row)) for row in rows} == {12}
