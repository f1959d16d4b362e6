"""Families whose layers keep a state from token to token: a packed row computes what transformers computes of each
sequence alone, in every way of training."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from areal.api.allocation import ParallelDims
from areal.api.batch import TrainBatch
from areal.api.config import load_experiment
from areal.api.config.train import LoRAConfig
from areal.api.errors import ConfigError
from areal.data.balance import balanced_parts
from areal.data.pack import take
from areal.engine import build
from areal.engine.fsdp import check_model
from areal.engine.mesh import TrainerMesh
from areal.inference.model_runner import ModelRunner, use_paged_attention
from areal.launcher import preflight
from areal.models.recurrent_layers import choosing_layers, for_each_sequence, neighbours, resets_state, state_layers
from tests.engine import engine_cases as cases
from tests.engine.test_every_family import FAMILIES, small_model
from tests.rank_processes import run_ranks

QUICK = ("qwen3_5_text", "nemotron_h", "lfm2", "jamba", "deepseek_v32", "llama4_text")
"""In `make test`."""
PACKED = {
    *QUICK[:4], "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "kimi_linear", "lfm2_moe",
    "lfm2_vl", "lfm3", "mamba", "mamba2", "minicpmv4_6", "minimax", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_next", "zamba2", "zaya",
}  # fmt: skip
TENSOR = {"bamba", "falcon_h1", "minicpmv4_6", "qwen3_5", "qwen3_5_text"}
"""Computed by tensor ranks: a layer with a state is whole on each."""
CHOOSING = {
    "axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "llama4_text", "qwen4_exp",
    "qwen4_exp_text",
}  # fmt: skip
"""Their tokens see those that an indexer chooses, or those of their chunk."""
SPARSE = ("glm5_next", "deepseek_v4", "inkling_text", "recurrent_gemma", "rwkv")
"""Their tokens choose the tokens that they see, see blocks of them, or add positions to scores."""
LENGTHS = [5, 9, 70, 9, 1, 14, 5, 7, 3]  # linear attention computes chunks of 64 tokens


def batch_of(seed: int = 0) -> TrainBatch:
    return cases.make_batch(LENGTHS, seed)


def alone(model: PreTrainedModel, batch: TrainBatch) -> torch.Tensor:
    """The log-probabilities of each sequence, which transformers computes one after the other."""
    result: list[torch.Tensor] = []
    for ids in torch.split(batch.input_ids, batch.sequence_lengths):
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        result += [logprobs.gather(1, ids[1:, None])[:, 0], torch.zeros(1)]
    return torch.cat(result)


def theirs(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    parts = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return FAMILIES[family].from_pretrained(folder, dtype=dtype, **parts).eval()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def own_gradients(engine, batch: TrainBatch) -> dict[str, torch.Tensor]:
    engine.forward_backward(batch, cases.policy_loss, denominator=1.0)
    return gradients_of(engine._model.model)


def expected_gradients(folder: Path, family: str, batch: TrainBatch) -> dict[str, torch.Tensor]:
    model = theirs(folder, family)
    terms = batch.advantages * alone(model, batch).mul(0.3).exp()
    terms[batch.loss_mask].sum().backward()
    return gradients_of(model)


def assert_close(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Within 1e-4 of the size of each gradient."""
    assert result.keys() == {name for name in expected if name in result}
    for name, value in expected.items():
        if name in result or value.abs().max() > 0:
            gap = (result[name] - value).norm()
            assert gap <= 1e-4 * value.norm() + 1e-7, (name, gap / value.norm())


def check(family: str, folder: Path) -> None:
    batch = batch_of()
    small_model(family).save_pretrained(folder)
    with torch.no_grad():
        expected = alone(theirs(folder, family), batch)
        rounded = alone(theirs(folder, family, torch.bfloat16), batch)
    save_file({"logprobs": expected}, folder / "expected")
    engine = cases.make_engine(folder)
    actual = engine.forward(batch).logprobs
    assert (actual - expected).abs().max() < 1e-5
    changed, start = batch.input_ids.clone(), sum(LENGTHS[:2])
    changed[start : start + LENGTHS[2]] = (changed[start : start + LENGTHS[2]] + 7) % cases.VOCAB
    others = torch.ones(len(changed), dtype=torch.bool)
    others[start : start + LENGTHS[2]] = False
    again = engine.forward(replace(batch, input_ids=changed)).logprobs
    assert torch.equal(again[others], actual[others])
    assert not torch.equal(again, actual)
    gradients = expected_gradients(folder, family, batch)
    assert_close(own_gradients(engine, batch), gradients)
    with suppress(ConfigError):  # of a family without it
        assert_close(own_gradients(cases.make_engine(folder, gradient_checkpointing=True), batch), gradients)
    half = cases.make_engine(folder, dtype="bfloat16").forward(batch).logprobs
    error, allowed = (half - expected).norm(), (rounded - expected).norm()
    assert error <= 1.5 * allowed, (error, allowed)
    check_lora(family, folder, batch)


def check_lora(family: str, folder: Path, batch: TrainBatch) -> None:
    """Adapters of every projection train, also of the layers with a state, and are a part of what is exported."""
    engine = cases.make_engine(folder, lora=LoRAConfig(rank=2, target_modules=["all-linear"]), seed=3)
    model = engine._model.model
    layers = [*state_layers(model).values(), *choosing_layers(model)]
    adapted = [weight for layer in layers for name, weight in layer.named_parameters() if weight.requires_grad]
    cases.train(engine, batch)  # B is 0 before, and then A has no gradient
    engine.forward_backward(batch, cases.policy_loss, denominator=1.0)
    assert all(weight.grad is not None and weight.grad.any() for weight in adapted)
    assert adapted
    engine.optimizer_step()
    engine.save(folder / "merged", with_optimizer=False)
    with torch.no_grad():
        exact = alone(theirs(folder / "merged", family, torch.float64), batch)
        rounding = (alone(theirs(folder / "merged", family), batch) - exact).abs().max()
    # Where float32 is inexact in transformers too, the separate products of the adapters round more often.
    assert (engine.forward(batch).logprobs - exact).abs().max() < max(1e-4, 5 * rounding)


@pytest.mark.parametrize("family", QUICK)
def test_a_packed_row_equals_each_sequence_alone(tmp_path, family):
    check(family, tmp_path / family)


@pytest.mark.parallel
@pytest.mark.parametrize("family", sorted((PACKED | CHOOSING) - {*QUICK}))
def test_packed_rows_of_every_family(tmp_path, family):
    check(family, tmp_path / family)


def on_two_ranks(mesh: TrainerMesh, folder: Path) -> dict[str, list[float]]:
    """Differences of log-probabilities, and of the weights after a step, from one rank."""
    actual: dict[str, list[float]] = {}
    for path in sorted(each.parent for each in folder.glob("*/expected")):
        expected, after = load_file(path / "expected")["logprobs"], load_file(path / "after")
        engine = cases.make_engine(path, mesh)
        is_split = mesh.dims.tp > 1
        parts = [*range(len(LENGTHS))] if is_split else balanced_parts(LENGTHS, mesh.world_size)[mesh.rank]
        mine = take(batch_of(), parts)
        ours = torch.cat([torch.split(expected, LENGTHS)[part] for part in parts])
        gap = (engine.forward(mine).logprobs - ours).abs().max().item()
        cases.train(engine, mine)
        gaps = [(value - after[name]).abs().max().item() for name, value in cases.weights_of(engine).items()]
        actual[path.name] = [gap, max(gaps)]
    return actual


def write_cases(folder: Path, families: set[str]) -> None:
    """For each family a checkpoint, what transformers computes, and the weights of one rank after a step."""
    for family in families:
        small_model(family).save_pretrained(folder / family)
        with torch.no_grad():
            expected = alone(theirs(folder / family, family), batch_of())
        save_file({"logprobs": expected}, folder / family / "expected")
        engine = cases.make_engine(folder / family)
        cases.train(engine, batch_of())
        save_file(cases.weights_of(engine), folder / family / "after")


@pytest.mark.parallel
def test_two_data_ranks_compute_what_one_does(tmp_path):
    write_cases(tmp_path, PACKED | CHOOSING)
    for rank in run_ranks(on_two_ranks, tmp_path):
        assert rank.keys() == PACKED | CHOOSING
        for family, (gap, weights) in rank.items():
            assert gap < 1e-5, family
            assert weights < 1e-5, family


@pytest.mark.parametrize("family", SPARSE)
def test_attention_to_chosen_tokens_is_refused(tmp_path, family):
    small_model(family).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        cases.make_engine(tmp_path)
    assert caught.value.code == "model.unsupported"


class Kernel(nn.Module):
    """A layer that adds up the tokens before each, and knows of borders or not."""

    knows_borders = True

    def __init__(self, config: object, layer_idx: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: torch.Tensor, seq_idx: torch.Tensor, cu_seq_lens_q: torch.Tensor) -> torch.Tensor:
        sizes = cu_seq_lens_q.diff().tolist() if self.knows_borders else [hidden.shape[1]]
        assert seq_idx.tolist() == [[0] * 3 + [1] * 5]
        return torch.cat([part.cumsum(1) for part in hidden.split(sizes, dim=1)], dim=1) * self.scale


class Leaking(Kernel):
    knows_borders = False


@pytest.mark.parametrize(("kind", "expected"), [(Kernel, True), (Leaking, False), (nn.Linear, False)])
def test_what_a_kernel_does_at_borders_is_tried(kind, expected):
    config = PretrainedConfig(hidden_size=4)
    assert resets_state(kind, config, torch.device("cpu"), torch.float32) is expected


def test_neighbours_of_similar_length_share_a_call():
    shapes: list[torch.Size] = []

    def forward(hidden, *, positions, factor):
        shapes.append(hidden.shape)
        assert positions.shape == hidden.shape[:2]
        return hidden.cumsum(1) * factor, None

    row = torch.ones(1, 8, 2)
    values = {"positions": torch.arange(8)[None], "factor": 2}
    result, nothing = for_each_sequence(forward, [[1], [2, 2, 3]], (row,), values)
    assert result[0, :, 0].tolist() == [2, 2, 4, 2, 4, 2, 4, 6]
    assert nothing is None
    assert shapes == [(1, 1, 2), (3, 3, 2)]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(0, 2, 5), (10, 1, 6)], [[5, 5, 6]]),
        ([(0, 1, 5), (5, 1, 60)], [[5], [60]]),  # padding would be most of it
        ([(0, 1, 60), (60, 1, 66)], [[60], [66]]),  # of one chunk and of two
        ([(0, 1, 90), (90, 2, 128)], [[90, 128, 128]]),
    ],
)
def test_calls_are_padded_where_that_costs_little(runs, expected):
    assert neighbours(runs) == expected


SFT, GRPO = (str(Path(__file__).parents[2] / "examples" / "quickstart" / name) for name in ("sft.yaml", "grpo.yaml"))


@pytest.mark.parametrize(
    ("family", "mesh"), [("glm5_next", "d1"), ("deepseek_v32", "c2"), ("qwen3_5_text", "c2"), ("qwen3_5_text", "d1")]
)
def test_a_dry_run_says_the_line_of_the_trainer(tmp_path, family, mesh, monkeypatch):
    if (family, mesh) != ("qwen3_5_text", "c2"):  # that one is checked in a process of its own, as before a run
        monkeypatch.setattr(
            preflight, "_answer_about", lambda config, *inputs: json.dumps(build.refused_models(config))
        )
    small_model(family).save_pretrained(tmp_path)
    config = load_experiment(["--config", SFT, f"model.path={tmp_path}", f"allocation_mode=fsdp:{mesh}"])
    expected = []
    try:
        check_model(config.models["model"], role="actor", dims=config.allocation.train[0].parallel)
        cases.make_engine(tmp_path)
    except ConfigError as error:
        expected = [[str(error), error.code]]
    assert preflight.refused_models(config) == expected
    assert bool(expected) == ((family, mesh) != ("qwen3_5_text", "d1"))


@pytest.mark.parametrize("family", ["deepseek_v32", "llama4_text", "qwen3_5_text"])
def test_a_dry_run_says_the_line_of_the_native_server(tmp_path, family):
    model = small_model(family)
    model.save_pretrained(tmp_path)
    use_paged_attention(model)
    expected = []
    try:
        ModelRunner(model)
    except ConfigError as error:
        expected = [(str(error), error.code)]
    assert bool(expected) == (family in CHOOSING)
    for servers in ("native", "vllm"):
        words = ["--config", GRPO, f"actor.path={tmp_path}", f"allocation_mode={servers}:d1+fsdp:d1"]
        words.append("actor.shared_prefixes=auto")
        assert build.refused_models(load_experiment(words)) == (expected if servers == "native" else [])


@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_5_moe_text", "qwen4_exp_text", "zaya"])
def test_the_check_before_the_start_passes_models_with_experts_or_states(tmp_path, family):
    small_model(family).save_pretrained(tmp_path)
    check_model(cases.make_config(tmp_path), role="actor", dims=ParallelDims())


@pytest.mark.parallel
def test_tensor_ranks_compute_what_one_rank_does(tmp_path):
    write_cases(tmp_path, TENSOR)
    for rank in run_ranks(on_two_ranks, tmp_path, ParallelDims(tp=2)):
        assert rank.keys() == TENSOR
        for family, (gap, weights) in rank.items():
            assert gap < 1e-5, family
            assert weights < 1e-5, family


@pytest.mark.parallel
def test_expert_ranks_compute_what_one_rank_does(tmp_path):
    write_cases(tmp_path, {"qwen3_5_moe_text", "qwen3_next"})
    for rank in run_ranks(on_two_ranks, tmp_path, ParallelDims(dp=2, ep=2)):
        for family, (gap, weights) in rank.items():
            assert gap < 1e-5, family
            assert weights < 1e-5, family


@pytest.mark.parametrize("family", ["deepseek_v32", "llama4_text", "qwen4_exp_text"])
def test_the_native_server_refuses_tokens_that_choose(family):
    model = small_model(family).eval()
    use_paged_attention(model)
    with pytest.raises(ConfigError) as caught:
        ModelRunner(model)
    assert caught.value.code == "model.unsupported"
