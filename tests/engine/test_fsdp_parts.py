"""Schedules by hand, packed attention, micro-batch plans, weight files, and models that are refused."""

import json
import math
import zlib
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DogeConfig,
    DogeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
)

from areal.api.config import FSDPEngineConfig, MicroBatchSpec, OptimizerConfig
from areal.api.config.train import LoRAConfig
from areal.data.pack import take
from areal.engine.hf_model import resolve_model_folder
from areal.engine.micro_batch import make_micro_batch, plan_micro_batches
from areal.engine.optimizer import ScheduledOptimizer, learning_rate
from areal.engine.packed_attention import SHORT_ON_CPU, _sdpa_per_sequence, _varlen, choose_attention, packed_layout
from areal.weights.weight_files import write_tensors, write_weights
from tests.expect import raises_code


def rates(total: int, **options) -> list[float]:
    config = OptimizerConfig(lr=1.0, **options)
    return [learning_rate(config, step, total) for step in range(total + 1)]


def test_schedules_by_hand():
    assert rates(4, warmup_steps_proportion=0.0) == [1.0] * 5
    assert rates(4, warmup_steps_proportion=0.5) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates(5, lr_scheduler_type="linear", warmup_steps_proportion=0.0) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    warm = rates(6, lr_scheduler_type="linear", warmup_steps_proportion=0.34, min_lr_ratio=0.2)
    assert warm == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = rates(5, lr_scheduler_type="cosine", warmup_steps_proportion=0.0, min_lr_ratio=0.1)
    half = 0.1 + 0.9 * 0.5
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5))
    assert cosine == pytest.approx([1.0, quarter, half, 1.1 - quarter, 0.1, 0.1])


def test_schedules_of_degenerate_lengths():
    for shape in ("constant", "linear", "cosine"):
        assert rates(1, lr_scheduler_type=shape)[0] == 1.0
        assert rates(3, lr_scheduler_type=shape, warmup_steps_proportion=1.0)[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_the_norm_of_a_large_gradient_is_exact():
    weight = torch.nn.Parameter(torch.zeros(2048, 1024))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = ScheduledOptimizer({"w": weight}, OptimizerConfig(), 1)
    norm = optimizer.step(lambda values: values, torch.zeros(()))["grad_norm"].value
    assert norm == pytest.approx(1e-3 * 2**10.5, rel=1e-5)


def test_layout_groups_equal_neighbours():
    layout = packed_layout(torch.tensor([0, 2, 4, 7, 9], dtype=torch.int32), [2, 2, 3, 2])
    assert layout.runs == ((0, 2, 2), (4, 1, 3), (7, 1, 2))
    assert layout.max_seqlen == 3


@pytest.mark.parametrize("lengths", [[3, 3, 3], [1, 4, 4, 2], [7]])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("window", "has_blocks"), [(None, False), (2, False), (None, True), (2, True)])
@pytest.mark.parametrize("long", [1024, 1], ids=["", "long"])
def test_packed_attention_equals_masked_attention(monkeypatch, long, lengths, kv_heads, window, has_blocks):
    monkeypatch.setattr("areal.engine.packed_attention.LONG", long)
    torch.manual_seed(0)
    total = sum(lengths)
    places = torch.arange(total)
    blocks = torch.where(places % 5 < 3, places // 5, -1) if has_blocks else torch.full((total,), -1)
    query = torch.randn(1, 4, total, 8, requires_grad=True)
    key, value = (torch.randn(1, kv_heads, total, 8, requires_grad=True) for _ in range(2))
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    layout = packed_layout(bounds, lengths)
    layout = replace(layout, blocks=blocks) if has_blocks else layout
    out, _ = _sdpa_per_sequence(
        nn.Identity(), query, key, value, None, layout=layout, scaling=0.3, sliding_window=window
    )
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (blocks[:, None] == blocks[None, :]) & (blocks >= 0)
    mask = (owner[:, None] == owner[None, :]) & (mask | torch.ones_like(mask).tril())
    mask &= places[:, None] - places[None, :] < (total if window is None else window)
    exact = [states.detach().double().requires_grad_() for states in (query, key, value)]
    expected = F.scaled_dot_product_attention(*exact, mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    weights = torch.randn_like(out)
    actual = torch.autograd.grad((out * weights).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * weights.double()).sum(), exact)
    for mine, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("knows_groups", [True, False])
def test_the_kernel_is_called_as_torch_wants_it(monkeypatch, knows_groups):
    """On a machine without a GPU: shapes and arguments against a stand-in with the kernel's signature."""

    def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), **grouped):
        assert window_size == (-1, 0)
        assert cu_seq_q is cu_seq_k
        assert max_q == max_k == 4
        assert query.is_contiguous()
        repeats = query.shape[1] // key.shape[1]
        assert (repeats > 1) == grouped.get("enable_gqa", False)
        bounds = cu_seq_q.tolist()
        parts = [
            F.scaled_dot_product_attention(
                *(states[a:b].transpose(0, 1) for states in (query, key, value)),
                is_causal=True, scale=scale, enable_gqa=repeats > 1,
            ).transpose(0, 1)
            for a, b in pairwise(bounds)
        ]  # fmt: skip
        return torch.cat(parts)

    def with_groups(*args, enable_gqa=False, **rest):
        return stand_in(*args, enable_gqa=enable_gqa, **rest)

    def without_groups(*args, return_aux=None, scale=None, window_size=(-1, -1)):
        return stand_in(*args, scale=scale, window_size=window_size)

    replacement = with_groups if knows_groups else without_groups
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", replacement)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 7, 8) for heads in (4, 2, 2))
    layout = packed_layout(torch.tensor([0, 3, 7], dtype=torch.int32), [3, 4])
    expected, _ = _sdpa_per_sequence(nn.Identity(), query, key, value, None, layout=layout, scaling=0.3)
    actual, _ = _varlen(nn.Identity(), query, key, value, None, layout=layout, scaling=0.3)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_the_installed_kernel_takes_our_arguments():
    """Its shape rules run without a GPU, on tensors without data."""
    query, key, value = (torch.empty(1, heads, 7, 8, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2))
    layout = packed_layout(torch.empty(3, device="meta", dtype=torch.int32), [3, 4])
    for window in (None, 4):
        result, _ = _varlen(nn.Identity(), query, key, value, None, layout=layout, scaling=0.3, sliding_window=window)
        assert result.shape == (1, 7, 4, 8)


def test_caps_and_sinks_are_not_left_to_the_kernel(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", None)
    query, key, value = (torch.randn(1, heads, 6, 4) for heads in (4, 2, 2))
    layout = packed_layout(torch.tensor([0, 4, 6], dtype=torch.int32), [4, 2])
    for rules in ({"softcap": 0.5}, {"s_aux": torch.randn(4)}):
        actual, expected = (
            attention(nn.Identity(), query, key, value, None, layout=layout, scaling=0.3, sliding_window=3, **rules)[0]
            for attention in (_varlen, _sdpa_per_sequence)
        )
        assert torch.equal(actual, expected)


def test_attention_refuses_what_would_be_wrong():
    states, layout = torch.zeros(1, 1, 2, 8), packed_layout(torch.tensor([0, 2]), [2])
    module = nn.Identity()
    module.is_causal = False
    with raises_code("model.unsupported"):
        _sdpa_per_sequence(module, states, states, states, None, layout=layout)
    with pytest.raises(RuntimeError, match="mask"):
        _sdpa_per_sequence(nn.Identity(), states, states, states, torch.zeros(2, 2), layout=layout)
    both_ways = nn.Identity()
    both_ways.is_causal = False
    with raises_code("model.unsupported", "causal"):
        _sdpa_per_sequence(both_ways, states, states, states, None, layout=layout)
    with raises_code("model.attention_unavailable", "attn_impl=varlen"):
        choose_attention("varlen", torch.device("cpu"), torch.bfloat16)


def test_attention_is_chosen_by_device_and_type():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    on_cpu = choose_attention("auto", cpu, torch.float32)
    assert choose_attention("flash_attention_2", cpu, torch.bfloat16) == on_cpu
    assert choose_attention("sdpa", gpu, torch.bfloat16) == on_cpu
    assert choose_attention("auto", gpu, torch.float32) == on_cpu
    kernel = choose_attention("varlen", gpu, torch.bfloat16)
    assert kernel != on_cpu
    assert choose_attention("auto", gpu, torch.bfloat16) == kernel
    assert choose_attention("flash_attention_2", gpu, torch.bfloat16) == kernel


def test_a_rank_with_little_makes_as_many_micro_batches_as_the_others():
    def busy_elsewhere(facts):
        return torch.maximum(facts, torch.tensor([5.0, 0.0, 0.0, 0.0], dtype=torch.float64))

    plan = plan_micro_batches([3, 4], MicroBatchSpec(max_tokens_per_mb=10), busy_elsewhere)
    assert len(plan) == 5
    assert sorted(i for part in plan for i in part) == [0, 1]
    assert plan_micro_batches([], MicroBatchSpec(), busy_elsewhere) == [[]] * 5


def test_a_sequence_too_long_elsewhere_raises_here_too():
    def long_elsewhere(facts):
        return torch.maximum(facts, torch.tensor([0.0, 99.0, 1.0, 0.0], dtype=torch.float64))

    with raises_code("data.too_long", "99 tokens"):
        plan_micro_batches([3], MicroBatchSpec(max_tokens_per_mb=10), long_elsewhere)


def unchanged(facts):
    return facts


def test_patches_of_images_limit_a_micro_batch_too():
    lengths, patches = [4, 4, 4, 4, 4], [16, 0, 16, 48, 0]
    for tokens in (None, 24):
        spec = MicroBatchSpec(max_tokens_per_mb=tokens, max_patches_per_mb=48)
        plan = plan_micro_batches(lengths, spec, unchanged, patches)
        assert sorted(i for part in plan for i in part) == [0, 1, 2, 3, 4]
        assert len(plan) == 2
        assert max(sum(patches[i] for i in part) for part in plan) == 48
        assert len(plan_micro_batches(lengths, replace(spec, max_patches_per_mb=None), unchanged, patches)) == 1
        with raises_code("data.too_long", "max_patches_per_mb=47"):
            plan_micro_batches(lengths, replace(spec, max_patches_per_mb=47), unchanged, patches)


def test_micro_batch_is_sorted_by_length_and_says_where_it_came_from(cases):
    batch = cases.make_batch([4, 2, 3, 2])
    micro, inputs = make_micro_batch(batch, [0, 1, 3], torch.device("cpu"))
    assert micro.source_index == [1, 3, 0]
    assert micro.max_seqlen == 4
    assert micro.position_ids.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]
    ids = micro.batch.input_ids.tolist()
    assert ids[:2] == batch.input_ids[4:6].tolist()
    assert inputs.has_label.tolist() == [True, False, True, False, True, True, True, False]
    assert inputs.labels.tolist() == [ids[1], 0, ids[3], 0, ids[5], ids[6], ids[7], 0]
    assert inputs.layout.runs == ((0, 2, 2), (4, 1, 4))


def test_weights_survive_the_files_they_are_cut_into(tmp_path):
    weights = {f"layer.{i}.weight": torch.randn(10, 10) for i in range(5)}
    for limit, files in ((10**9, 1), (900, 3), (1, 5)):
        folder = tmp_path / str(limit)
        folder.mkdir()
        write_weights(folder, weights.items(), max_file_bytes=limit)
        assert len(list(folder.glob("*.safetensors"))) == files
        result = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        assert result.keys() == weights.keys()
        assert all(torch.equal(result[name], value) for name, value in weights.items())
    index = json.loads((tmp_path / "1" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["layer.4.weight"] == "model-00005-of-00005.safetensors"


def test_tensors_are_written_with_the_checksum_of_what_was_in_memory(tmp_path):
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(5).bfloat16(),
        "steps": torch.tensor(7.0),
        "transposed": torch.randn(3, 700_000).T,
        "empty": torch.zeros(0, 4),
        "ids": torch.arange(6).reshape(2, 3),
    }
    checksum = write_tensors(tmp_path / "x.safetensors", tensors)
    assert checksum == zlib.crc32((tmp_path / "x.safetensors").read_bytes())
    result = load_file(tmp_path / "x.safetensors")
    assert result.keys() == tensors.keys()
    for name, value in tensors.items():
        assert result[name].dtype == value.dtype
        assert torch.equal(result[name], value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["whole", "sharded"])
def test_models_whose_attention_cannot_be_replaced_are_refused_when_they_are_loaded(cases, tmp_path, dtype):
    """BERT attends in both directions, Doge adds masks, and Falcon has a table of attention classes."""
    shape = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    models = {
        "bert": BertLMHeadModel(BertConfig(**shape, intermediate_size=8)),
        "doge": DogeForCausalLM(DogeConfig(**shape, intermediate_size=8, num_key_value_heads=2)),
        "falcon": FalconForCausalLM(FalconConfig(**shape)),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        with raises_code("model.unsupported"):
            cases.make_engine(tmp_path / name, dtype=dtype)


def test_blocks_are_not_compiled_without_a_compiler(cases, models, monkeypatch):
    monkeypatch.setenv("CXX", "absent-compiler")
    with raises_code("model.no_compiler", "absent-compiler"):
        cases.make_engine(models / "qwen2", compile=True)


@pytest.mark.parametrize(("dtype", "is_exact"), [("float32", True), ("bfloat16", False)])
def test_gradients_of_micro_batches_are_summed_in_the_type_of_their_reduction(cases, models, dtype, is_exact):
    """Computed in bfloat16; the sum of two micro-batches has more bits only in float32."""
    lengths = [9, 7]

    def gradients(batch, count):
        engine = cases.make_engine(
            models / "llama", dtype="bfloat16", grad_reduce_dtype=dtype, mb_spec=MicroBatchSpec(max_tokens_per_mb=10)
        )
        before = {name: value.clone() for name, value in engine.named_weights(stored=True)}
        engine.forward_backward(batch, cases.policy_loss, denominator=count)
        engine.optimizer_step()
        return {name: before[name] - value for name, value in engine.named_weights(stored=True)}

    batch = cases.make_batch(lengths)
    parts = [gradients(take(batch, [place]), 8.0) for place in range(2)]
    whole = gradients(batch, 8.0)
    gaps = [(parts[0][name] + parts[1][name] - value).abs().max().item() for name, value in whole.items()]
    assert (max(gaps) < 1e-6) is is_exact


@pytest.mark.parametrize(
    ("role", "options"),
    [("actor", {}), ("critic", {}), ("actor", {"lora": LoRAConfig(rank=2)}), ("actor", {"freeze": ["embed_tokens"]})],
    ids=["policy", "critic", "lora", "frozen"],
)
def test_one_rank_trains_in_bfloat16_as_fsdp_does(cases, models, role, options):
    """The weights stay in float32 between the passes, each update reaches the next pass, and all bits are equal."""
    loss = cases.policy_loss if role == "actor" else cases.value_loss
    options |= {"dtype": "bfloat16", "role": role, "mb_spec": MicroBatchSpec(max_tokens_per_mb=10)}
    batch, results = cases.make_batch([9, 7, 5]), []
    for fsdp in (FSDPEngineConfig(), FSDPEngineConfig(offload_params=True)):
        engine = cases.make_engine(models / "llama", fsdp=fsdp, **options)
        cases.train(engine, batch, steps=3, loss_fn=loss)
        assert {value.dtype for name, value in engine._changing().items() if value.is_floating_point()} == {
            torch.float32
        }
        outputs = engine.forward(batch)
        results.append((cases.weights_of(engine), outputs.logprobs if role == "actor" else outputs.values))
    (whole, outputs), (sharded, expected) = results
    torch.testing.assert_close(whole, sharded, rtol=0, atol=0)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


def test_the_gradients_of_short_sequences_in_bfloat16_are_computed_in_float32_on_a_cpu(monkeypatch):
    attend, seen = F.scaled_dot_product_attention, []

    def watched(query, *others, **options):
        seen.append(query.dtype)
        return attend(query, *others, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    lengths = [SHORT_ON_CPU, 9]
    layout = packed_layout(torch.tensor([0, *lengths]).cumsum(0).int(), lengths)
    torch.manual_seed(0)
    values = torch.randn(3, 1, 2, sum(lengths), 4).bfloat16()
    actual, expected = [], []
    for dtype, gradients in ((torch.bfloat16, actual), (torch.float32, expected)):
        states = [each.to(dtype).requires_grad_() for each in values]
        out, _ = _sdpa_per_sequence(nn.Identity(), *states, None, layout=layout, scaling=0.5)
        assert out.dtype == dtype
        out.float().square()[:, SHORT_ON_CPU:].sum().backward()
        gradients += [each.grad[:, :, SHORT_ON_CPU:] for each in states]
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.float32]
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_weights_that_stay_gathered_during_a_step_are_new_after_it(cases, models, gradient_checkpointing):
    options = {"dtype": "bfloat16", "mb_spec": MicroBatchSpec(max_tokens_per_mb=20)}
    engine = cases.make_engine(models / "qwen2", gradient_checkpointing=gradient_checkpointing, **options)
    batch = cases.make_batch()
    for _ in range(2):
        cases.train(engine, batch)
        result = engine.forward(batch).logprobs
        fresh = cases.make_engine(models / "qwen2", **options)
        fresh.load_weights([(name, value.clone()) for name, value in engine.named_weights(stored=True)])
        assert torch.equal(fresh.forward(batch).logprobs, result)


def test_checkpoints_that_are_broken_are_refused(cases, models, tmp_path, monkeypatch):
    with raises_code("model.not_found", "config.json"):
        resolve_model_folder(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with raises_code("model.not_found", tmp_path / "absent"):
        resolve_model_folder(str(tmp_path / "absent"))
    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "config.json").write_text((models / "qwen3" / "config.json").read_text())
    weights = load_file(models / "qwen3" / "model.safetensors")
    write_weights(partial, [(name, value) for name, value in weights.items() if name != "model.norm.weight"])
    with raises_code("model.weights_do_not_fit", 1, "model.norm.weight"):
        cases.make_engine(partial)

    write_weights(partial, [(name, value[:5]) for name, value in weights.items()])
    with raises_code("model.weights_do_not_fit", "shape [5", "config.json"):
        cases.make_engine(partial)
    (partial / "model.safetensors").write_bytes(b"cut short")
    with raises_code("model.not_loadable", partial):
        cases.make_engine(partial)
    (partial / "config.json").write_text("{}")
    with raises_code("model.not_loadable", "config.json"):
        cases.make_engine(partial)
