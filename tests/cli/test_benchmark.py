"""`areal benchmark`: figures worked by hand, the grid, and a real run."""

import json

import pytest

from areal.api.config.experiment import sweep_words
from areal.cli.benchmark import Hardware, benchmark, table_lines, throughput
from tests.expect import raises_code
from tests.test_end_to_end import folder

__all__ = ["folder"]
HARDWARE = Hardware(
    num_gpus=4, num_trainer_gpus=2, num_parameters=1_000_000, peak_tflops=0.001, dollars_per_gpu_hour=9.0
)


def row(step, time, **values):
    result = {"tokens": 0, "produced_tokens": 0, "generated_tokens": 0, "rejected": 0, "failed": 0, "dropped": 0}
    result |= {"staleness_mean": 1.0, "staleness_max": 2.0} | values
    rates = {"seconds/step": 2.0, "seconds/elapsed": 9.0, "seconds/rollout": 0.5, "seconds/update": 1.2}
    rates |= {"seconds/wait_servers": 0.05, "seconds/wait_batch": 0.4, "actor/tree_ratio": 2.0}
    memory = {"memory/server-0": 1.0 + 1 / step, "memory/trainer-0": 0.5}
    return {"step": step, "time": time, "batch/num_trained_tokens": 300.0, **rates, **memory} | {
        f"rollout/{name}": float(value) for name, value in result.items()
    }


def test_the_steps_between_warm_up_and_end_are_measured():
    rows = [
        {"step": 0, "time": 50.0, "eval/greedy/reward": 0.5},
        row(1, 100.0, tokens=10**9, produced_tokens=10**9),
        row(2, 102.0, tokens=1000, produced_tokens=900, generated_tokens=600, rejected=3),
        row(3, 105.0, tokens=1500, produced_tokens=700, generated_tokens=800, failed=1, staleness_mean=2.0),
        row(4, 105.1, tokens=10**9, produced_tokens=10**9),
    ]
    result = throughput(rows, warmup_steps=1, steps=2, hardware=HARDWARE)
    assert (result.steps, result.seconds, result.seconds_per_step) == (2, 5.0, 2.5)
    assert (result.generated_tokens_per_s, result.trained_tokens_per_s, result.effective_tokens_per_s) == (
        320,
        500,
        120,
    )
    assert result.trained_tokens_per_s_per_gpu == 125
    assert result.unused_share == pytest.approx(1 - 1400 / 1600)
    assert (result.rejected_episodes, result.failed_episodes, result.dropped_episodes) == (3, 1, 0)
    assert result.seconds_by_phase == {"update": 1.2, "rollout": 0.5}
    assert list(result.waits.items()) == [("batch", pytest.approx(0.16)), ("servers", pytest.approx(0.02))]
    assert (result.waiting_share, result.bound) == (pytest.approx(0.18), "generation")
    assert "trainer waits    18.0% (batch 16.0%, servers 2.0%)" in table_lines(result)
    assert result.tree_ratio == 2.0
    assert (result.staleness_mean, result.staleness_max) == (1.5, 2.0)
    assert result.memory_gib == {"server-0": 1.5, "trainer-0": 0.5}
    assert result.mfu == pytest.approx(6 * 1e6 * 250 / (2 * 1e9))
    assert result.dollars_per_million_trained_tokens == pytest.approx(9 * 4 * (5 / 3600) / 2500 * 1e6)


def test_a_run_with_fewer_steps_is_refused():
    with raises_code("benchmark.too_few_steps"):
        throughput([row(1, 1.0), row(2, 2.0)], warmup_steps=1, steps=2, hardware=HARDWARE)


def test_commas_inside_brackets_do_not_separate_values_of_a_sweep():
    word = "allocation_mode=native:d1+megatron:(attn:d1,x|ffn:d1),native:d2+fsdp:d1"
    assert [text.partition("=")[2] for text in sweep_words(word)] == [
        "native:d1+megatron:(attn:d1,x|ffn:d1)",
        "native:d2+fsdp:d1",
    ]
    for bad in ("seed", "seed=", "seed=1,,2"):
        with raises_code("config.bad_override"):
            sweep_words(bad)


def test_bad_lengths_and_runs_without_rollouts_are_refused_before_anything_starts(folder):
    with raises_code("config.not_a_choice"):
        benchmark(["--config", str(folder / "c.yaml"), "benchmark.length=long"])
    assert not list((folder / "runs").glob("**/benchmark*"))


@pytest.mark.slow
def test_a_grid_of_synthetic_runs(folder, capsys):
    words = ["--config", str(folder / "c.yaml"), "benchmark.length=uniform(2,7)", "benchmark.prompt_length=6"]
    words += [
        "benchmark.warmup_steps=1",
        "benchmark.steps=2",
        "--json",
        "--sweep",
        "rollout.max_head_offpolicyness=0,1",
    ]
    assert benchmark(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert [run["settings"] for run in report["runs"]] == [
        {"rollout.max_head_offpolicyness": "0"},
        {"rollout.max_head_offpolicyness": "1"},
    ]
    for run in report["runs"]:
        assert run["throughput"]["steps"] == 2
        assert run["throughput"]["trained_tokens_per_s"] > run["throughput"]["effective_tokens_per_s"] > 0
    assert [run["throughput"]["staleness_max"] for run in report["runs"]] == [0.0, 1.0]
    (saved,) = (folder / "runs" / "e2e").glob("benchmark-*.json")
    assert [file for file in saved.parent.glob("benchmark-*") if file.is_file() and file != saved]  # the rows
    assert json.loads(saved.read_bytes()) == report
