"""A sharded model has the weights of a whole one, and each rank needs the memory of its own rows only."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from areal.api.allocation import ParallelDims
from areal.api.config import OptimizerConfig, TrainEngineConfig
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.hf_model import compute_buffers, draw_weights, read_weights
from areal.engine.mesh import TrainerMesh, local_part
from areal.models.stored_form import StoredForm
from tests.expect import raises_code
from tests.rank_processes import run_ranks

RANKS = 4


def write_model(folder: Path, *, hidden: int, layers: int, vocabulary: int) -> None:
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _status_bytes(key: str) -> int:
    """A line of this process's status in Linux: VmRSS = resident now, VmHWM = the peak since the last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def on_ranks(mesh: TrainerMesh, folder: Path) -> dict[str, int]:
    added: dict[str, int] = {}
    for name, from_scratch in (("small", False), ("large", False), ("large", True)):  # small: imports and allocators
        config = TrainEngineConfig(
            path=str(folder / name), dtype="float32", optimizer=OptimizerConfig(), init_from_scratch=from_scratch
        )
        before = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        engine = build_fsdp_engine(config, role="actor", total_steps=1, mesh=mesh, seed=3)
        kind = f"{name}-{'scratch' if from_scratch else 'read'}"
        added[kind] = _status_bytes("VmHWM") - before
        ours = {key: local_part(value).clone() for key, value in engine._model.named_tensors()}
        save_file(ours, folder / f"{kind}-{mesh.rank}")
        del engine, ours
    return added


def tensors_of(engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.named_weights(stored=True)}


@pytest.mark.parametrize("options", [{}, {"init_from_scratch": True}], ids=["read", "drawn"])
@pytest.mark.parametrize(
    ("model", "role"),
    [("qwen2", "actor"), ("qwen3", "actor"), ("qwen3", "critic"), ("mixtral", "actor"), ("deepseek_v3", "actor")],
)
def test_a_sharded_model_has_the_bits_of_a_whole_one(cases, models, model, role, options):
    whole = cases.make_engine(models / model, role=role, seed=5, **options)
    sharded = cases.make_engine(models / model, role=role, seed=5, dtype="bfloat16", **options)
    expected, actual = tensors_of(whole), tensors_of(sharded)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_buffers_that_no_checkpoint_has_are_computed():
    scaling = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=50, rope_parameters=scaling)
    whole = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    empty.to_empty(device="cpu")
    compute_buffers(empty, torch.device("cpu"))
    expected = dict(whole.named_buffers())
    assert expected
    for name, value in empty.named_buffers():
        assert torch.equal(value, expected[name]), name
    empty.model.register_buffer("own", torch.ones(2), persistent=False)
    with raises_code("model.unsupported"):
        compute_buffers(empty, torch.device("cpu"))


def test_a_checkpoint_that_does_not_fit_and_a_parameter_without_a_rule_are_refused(models):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models / "qwen3"))
    model.model.register_parameter("own", torch.nn.Parameter(torch.zeros(3)))
    with raises_code("model.weights_do_not_fit"):
        read_weights(model, StoredForm(model), models / "qwen3", head_seed=None)
    with raises_code("model.unsupported"):
        draw_weights(model, 0)


@pytest.mark.slow
def test_four_ranks_need_the_memory_of_their_own_rows(tmp_path):
    write_model(tmp_path / "small", hidden=64, layers=1, vocabulary=100)
    write_model(tmp_path / "large", hidden=512, layers=10, vocabulary=16000)
    stored = load_file(tmp_path / "large" / "model.safetensors")
    total = sum(value.nbytes for value in stored.values())
    assert total > 190e6
    added = run_ranks(on_ranks, tmp_path, ParallelDims(dp=RANKS))
    share = total / RANKS
    for rank in range(RANKS):
        for name, ours in load_file(tmp_path / f"large-read-{rank}").items():
            assert torch.equal(ours, torch.chunk(stored[name], RANKS)[rank]), name
    for item in added:
        assert item["large-read"] < 1.5 * share
        assert item["large-scratch"] < 1.5 * share
