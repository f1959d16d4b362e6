"""The GPU suite itself: its checks run on the CPU with small sizes."""

import torch

from areal.engine.packed_attention import _sdpa_per_sequence
from tests.gpu import bodies
from tests.gpu.__main__ import main

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
    assert bodies.recovered_equals_unbroken(CPU, models / "qwen3", tmp_path / "state")


def test_sampling_and_the_difference_between_rollout_and_trainer(tmp_path):
    zeros, deviation = bodies.draws_of_weight_zero(CPU, draws=5000, vocabulary=500)
    assert zeros == 0
    assert deviation < 5
    bodies.write_model(tmp_path, hidden=64, layers=2, vocabulary=500)
    sizes = {"sequences": 4, "new_tokens": 16}
    rounded = bodies.rollout_difference(CPU, tmp_path, head_dtype="compute", **sizes)
    exact = bodies.rollout_difference(CPU, tmp_path, head_dtype="float32", **sizes)
    assert exact.mean < rounded.mean < 0.2


def test_without_a_gpu_the_command_says_so_and_exits_with_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["6"]) == 2
