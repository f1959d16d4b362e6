"""The GPU suite itself: its checks run on the CPU with small sizes."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from areal.api.config import MicroBatchSpec
from areal.engine.packed_attention import _sdpa_per_sequence
from tests.engine import mesh_cases
from tests.engine.test_tree import LONG_ROWS, batch_of
from tests.gpu import bodies
from tests.gpu.__main__ import main
from tests.inference.test_paged_kernel import with_graphs
from tests.rank_processes import run_ranks

CPU = torch.device("cpu")


def test_kernels():
    shape = {"lengths": [1, 2, 17, 17], "size": 16, "heads": 4, "kv_heads": 2}
    forward, gradients = bodies.attention_error(_sdpa_per_sequence, _sdpa_per_sequence, CPU, torch.bfloat16, **shape)
    assert 0 < forward < 1e-1
    assert 0 < gradients < 2e-2
    rounded, exact = (
        bodies.head_error(CPU, torch.bfloat16, vocabulary=1000, tokens=20, float32_head=head) for head in (False, True)
    )
    assert exact < 1e-4 < rounded
    ours, reference = bodies.checksums(CPU, [3, 70_000])
    assert ours == reference


def test_engine(models, tmp_path):
    assert bodies.gradient_error(CPU, models / "qwen3", gradient_checkpointing=True) < 1e-5
    trees = {"batch": batch_of(LONG_ROWS), "shared_prefixes": "tree"}
    assert bodies.gradient_error(CPU, models / "qwen3", **trees) < 1e-5
    assert bodies.recovered_equals_unbroken(CPU, models / "qwen3", tmp_path / "state")


def test_float8(tmp_path):
    pytest.importorskip("torchao", reason="the extra quantization")
    mesh_cases.write_models(tmp_path)
    assert bodies.float8_error(CPU, tmp_path / "qwen3", "rowwise") == 0.0
    (tmp_path / "model").symlink_to(tmp_path / "qwen3")
    for difference, size in run_ranks(bodies.float8_ranks, tmp_path):
        assert difference < 1e-2 * size


def test_losses_and_training_of_rows(models):
    assert max(bodies.loss_errors(CPU).values()) == 0.0
    assert bodies.row_training_error(CPU, models, "dpo") < 1e-5
    assert (
        bodies.gradient_error(CPU, models / "qwen2", role="critic", mb_spec=MicroBatchSpec(max_tokens_per_mb=14)) < 1e-5
    )


def test_offload(models):
    """On the CPU the state stays where it is; that the engine computes the same is checked."""
    left, gap = bodies.offloaded_share(CPU, models / "qwen3", lambda: 0)
    assert left == 0.0
    assert gap < 1e-6


def test_a_step_of_one_rank_of_many_in_a_fake_group(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmark"))
    import gpu_memory
    import gpu_step

    if torch.distributed.is_initialized():  # by a mesh of another test
        torch.distributed.destroy_process_group()
    Qwen2Config(**gpu_step.TINY).save_pretrained(tmp_path)
    for ranks in (8, 512):
        assert gpu_memory.fake_rank_peak(tmp_path, CPU, ranks=ranks, tokens=32, checkpointing=True) == 0
        assert not torch.distributed.is_initialized()
    rows = gpu_memory.planned(tmp_path, CPU)
    assert len(rows) == 24
    gib = [row["gib"] for row in rows if row["model"] == "32B" and row["tokens"] == 8192 and not row["checkpointing"]]
    assert gib == sorted(gib, reverse=True)  # 8, 64 and 512 ranks


def test_sampling_and_the_difference_between_rollout_and_trainer(tmp_path):
    zeros, deviation = bodies.draws_of_weight_zero(CPU, draws=5000, vocabulary=500)
    assert zeros == 0
    assert deviation < 5
    bodies.write_model(tmp_path, hidden=64, layers=2, vocabulary=500)
    sizes = {"sequences": 4, "new_tokens": 16}
    rounded = bodies.rollout_difference(CPU, tmp_path, head_dtype="compute", **sizes)
    exact = bodies.rollout_difference(CPU, tmp_path, head_dtype="float32", **sizes)
    assert exact.mean < rounded.mean + 1e-6  # without AVX-512 both sides have the same bits but for float32 rounding
    assert rounded.mean < 0.2


@pytest.mark.parametrize("kind", sorted(bodies.QUANTIZED_LIMITS))
def test_quantized_products(kind):
    assert 0 < bodies.quantized_error(CPU, kind) < bodies.QUANTIZED_LIMITS[kind]


def test_decode_graphs(tmp_path, monkeypatch):
    bodies.write_model(tmp_path, hidden=64, layers=2, vocabulary=500)
    sizes = {"sequences": 3, "new_tokens": 20}
    assert bodies.graph_difference(CPU, tmp_path, **sizes) == (False, 0.0)
    with_graphs(monkeypatch)
    was_used, worst = bodies.graph_difference(CPU, tmp_path, **sizes)
    assert was_used
    assert worst < 1e-6


def test_without_a_gpu_the_command_says_so_and_exits_with_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["7"]) == 2
