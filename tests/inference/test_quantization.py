"""Quantized weights: their numbers by hand, log-probabilities of served models, updates by every path, refusals."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from areal.api.errors import ConfigError, RequestError
from areal.inference.quantization import SCHEMES, Fp4Blocks, QuantizedLinear, quantize, quantized_layers, widened
from areal.inference.weight_update import ServedWeights, weight_bytes
from areal.system.network import TOKEN_VARIABLE
from areal.weights.collective import DeltaCollectiveChannel
from tests.expect import raises_code, serve
from tests.fake_ranks import FakeRanks
from tests.fixed_trainer import FixedTrainer
from tests.inference.test_adapters import load, write_adapter
from tests.inference.test_paged_kernel import with_graphs
from tests.inference.vision_models import LAYOUT, pictured, png, qwen2_5_vl, qwen3_vl, reference, save
from tests.system.test_delta_transfer import copied
from tests.weights.test_delta_channel import Machine, Machines, new_channel, step
from tests.weights.test_delta_collective import Fleet as DeltaFleet

__all__ = ("copied", "write_adapter")

KINDS = sorted(SCHEMES)
# Half of the largest step between two codes, relative to the largest weight of a row or group.
HALF_STEPS = {"int8": 1 / 255, "fp8": 1 / 28, "int4": 1 / 15, "mxfp4": 1 / 5, "nvfp4": 1 / 5.6}
BLOCKS = {"int4": 32, "mxfp4": 32, "nvfp4": 16}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def weight_of(rows=48, columns=64, dtype=torch.float32):
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.1).to(dtype)


def dequantized(layer: QuantizedLinear) -> torch.Tensor:
    """[out, in] float64, computed from the codes by the definition of the kind."""
    if isinstance(layer.scheme, Fp4Blocks):
        codes, scales, *whole = layer.held
        numbers = E2M1[torch.cat((codes & 15, codes >> 4)).int()]
        steps = 2.0 ** (scales.double() - 127) if scales.dtype == torch.uint8 else scales.double() * whole[0].double()
        return (numbers * steps.repeat_interleave(len(numbers) // len(steps), 0)).T
    codes, scales = layer.held
    if scales.ndim == 1:
        return codes.double() * scales.double()[:, None]
    # The codes are in the order of torch's kernel, which gives back a column for each unit vector.
    units = torch.eye(layer.in_features, dtype=scales.dtype)
    ones = torch.stack((torch.ones_like(scales[..., 0]), torch.zeros_like(scales[..., 0])), -1)
    plain = torch.ops.aten._weight_int4pack_mm_for_cpu(units, codes, 32, ones).T.double()
    scale, zero = (scales[..., part].double().T.repeat_interleave(32, 1) for part in (0, 1))
    return plain * scale + zero


def held_by(model) -> list[torch.Tensor]:
    return [tensor for layer in quantized_layers(model) for tensor in layer.held]


def equal(result: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(result) == len(wanted) > 0 and all(map(torch.equal, result, wanted))


def layer_of(kind: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> QuantizedLinear:
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype).requires_grad_(False)
    plain.weight.copy_(weight)
    if bias is not None:
        plain.bias.copy_(bias)
    return QuantizedLinear(plain, SCHEMES[kind])


def with_plain_weights(model):
    """The model with linear layers of torch, whose weights are the dequantised ones."""
    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, QuantizedLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight.data = dequantized(module).float()
            linear.bias = module.bias
            parent, _, ours = name.rpartition(".")
            setattr(plain.get_submodule(parent), ours, linear)
    return plain


def test_codes_and_scales_by_hand():
    weight = torch.zeros(16, 32)
    weight[0, :4] = torch.tensor([2.55, -2.55, 0.02, 0.011])
    weight[1, :3] = torch.tensor([448.0, -17.0, 0.3])
    weight[3] = torch.arange(32) % 16 - 3.0
    codes, scales = SCHEMES["int8"].stored(weight)
    assert scales[:4].tolist() == pytest.approx([0.02, 448 / 127.5, 2.0**-126, 12 / 127.5])
    assert codes[0, :5].tolist() == [127, -128, 1, 1, 0]  # 127.5 is cut, 0.55 is rounded
    assert codes[1, :3].tolist() == [127, -5, 0]
    assert not codes[2].any()
    codes, scales = SCHEMES["fp8"].stored(weight)
    assert scales[1].item() == 1
    assert codes[1, :3].tolist() == [
        448,
        -16,
        0.3125,
    ]  # of 16 18 20, and of 0.28125 0.3125
    layer = layer_of("int4", weight)
    assert layer.held[1][0, 3].tolist() == [1, 5]  # -3 ... 12 in steps of 1, and the zero is that of code 8
    assert dequantized(layer)[3].equal(weight[3].double())
    assert dequantized(layer)[2].abs().max() < 1e-30


def nibbles(codes: torch.Tensor) -> list[list[int]]:
    """Codes from 0 to 15 of each output."""
    return torch.cat((codes & 15, codes >> 4)).T.tolist()


def test_4_bit_floats_by_hand():
    """Ties go to the even code; a power of two takes the next one when its numbers would round to 8."""
    weight = torch.zeros(3, 32)
    weight[0, :12] = torch.tensor([6, 0.25, 0.26, 0.75, 1.25, -1.75, 2.5, 3.5, 5, 5.1, -0.5, 6.9])
    weight[1, :3] = torch.tensor([7 / 64, -1.75 / 64, 2 / 64])
    codes, scales = SCHEMES["mxfp4"].stored(weight)
    assert codes.shape == (16, 3)
    assert scales.tolist() == [[127, 122, 1]]  # 2^0, 2^-5, and of no numbers the smallest
    first, second, empty = nibbles(codes)
    assert first[:12] == [7, 0, 1, 2, 2, 12, 4, 6, 6, 7, 9, 7]
    assert second[:3] == [6, 10, 2]  # 3.5 -> 4, -0.875 -> -1, 1
    assert not any(first[12:] + second[3:] + empty)
    weight[0, :16] = torch.arange(16) * 28 / 15
    weight[1, 16] = -1344.0
    weight[2, 0], weight[2, 16] = 2688.0, 1.0
    codes, scales, whole = SCHEMES["nvfp4"].stored(weight)
    assert (codes.dtype, scales.dtype, whole.item()) == (torch.uint8, torch.float8_e4m3fn, 1)
    # 28 / 6 = 4.67 of 4.5 and 5; 2.0^-6 = the smallest; 1 / 6 = 0.1667 of 0.15625 and 0.171875
    assert scales.float().T.tolist() == [[4.5, 2.0**-6], [0.017578125, 224], [448, 0.171875]]
    first, second, last = nibbles(codes)
    assert first[:16] == [0, 1, 2, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7]
    assert (second[16], last[0], last[16]) == (15, 7, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bit_floats_are_those_of_torchao(dtype):
    """Of weights with large and small blocks, and of ties; all zeros are not compared: torchao makes them NaN."""
    formats = pytest.importorskip("torchao.prototype.mx_formats")
    mx, nv = (pytest.importorskip(f"torchao.prototype.mx_formats.{name}_tensor") for name in ("mx", "nvfp4"))
    weight = weight_of(dtype=dtype) * 4.0 ** torch.arange(-24, 24)[:, None]
    weight[5] = torch.arange(64) / 8
    weight = weight.to(dtype)
    theirs = mx.MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, formats.ScaleCalculationMode.EVEN)
    layer = layer_of("mxfp4", weight)
    assert dequantized(layer).equal(theirs.dequantize(torch.float32).double())
    assert layer.held[1].T.equal(theirs.scale.view(torch.uint8))
    theirs = nv.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=nv.per_tensor_amax_to_scale(weight.abs().amax()))
    codes, scales, whole = SCHEMES["nvfp4"].stored(weight)
    assert scales.T.float().equal(theirs.scale.float())
    assert whole.equal(theirs.per_tensor_scale)
    packed = torch.stack((theirs.qdata & 15, theirs.qdata >> 4), -1).flatten(1)
    assert nibbles(codes) == packed.tolist()


def test_blocks_of_4_bit_floats_divide_the_inputs_of_any_number_of_outputs():
    sizes = [(7, 64), (7, 48), (7, 40)]
    assert [SCHEMES["mxfp4"].fits(*size) for size in sizes] == [True, False, False]
    assert [SCHEMES["nvfp4"].fits(*size) for size in sizes] == [True, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_zeros_give_zeros(kind):
    layer = layer_of(kind, torch.zeros(16, 32))
    assert layer(torch.ones(2, 32)).abs().max() < 1e-30


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_moves_by_more_than_half_a_step(kind):
    weight = weight_of()
    width = BLOCKS.get(kind, weight.shape[1])
    rows = weight.double().unflatten(1, (-1, width))
    reach = rows.amax(-1) - rows.amin(-1) if kind == "int4" else rows.abs().amax(-1)
    errors = (dequantized(layer_of(kind, weight)).unflatten(1, (-1, width)) - rows).abs().amax(-1)
    limit = HALF_STEPS[kind] / (2 if kind == "int4" else 1)
    assert (errors <= reach * limit * (1 + 1e-4)).all()
    assert errors.max() > reach.max() * limit / 4


def test_8_bit_codes_are_those_of_torchao():
    int8 = pytest.importorskip("torchao.quantization.quantize_.workflows.int8.int8_tensor").Int8Tensor
    fp8 = pytest.importorskip("torchao.quantization.quantize_.workflows.float8.float8_tensor").Float8Tensor
    row, weight = pytest.importorskip("torchao.quantization.granularity").PerRow(), weight_of()
    theirs, (codes, scales) = int8.from_hp(weight, row), SCHEMES["int8"].stored(weight)
    assert theirs.qdata.equal(codes)
    assert theirs.scale[:, 0].equal(scales)
    theirs, (codes, scales) = fp8.from_hp(weight, granularity=row), SCHEMES["fp8"].stored(weight)
    assert theirs.scale[:, 0].tolist() == pytest.approx(scales.tolist(), rel=1e-6)
    near = (theirs.qdata.float() - codes.float()).abs() <= codes.float().abs() / 8  # a tie by the last bit of the scale
    assert near.all()


def test_widened_codes_are_exact_on_the_cpu():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = every[~every.float().isnan()]
    assert len(finite) == 254
    for dtype in (torch.bfloat16, torch.float32):
        assert widened(finite, dtype).equal(finite.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantised_weights(kind, dtype):
    """With few rows and many: the kernels differ."""
    bias = torch.arange(48, dtype=dtype) / 16
    layer = layer_of(kind, weight_of(dtype=dtype), bias)
    states = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = states.double() @ dequantized(layer).T + bias.double()
    for rows in (states[:1, :1], states[0], states):
        result = layer(rows)
        assert (result.dtype, result.shape) == (dtype, (*rows.shape[:-1], 48))
        error = (result.double() - (rows.double() @ dequantized(layer).T + bias.double())).abs().max()
        assert error <= exact.abs().max() * (1e-6 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize("columns", [8, 16, 17, 24, 40, 48])
@pytest.mark.parametrize("rows", [8, 17, 24, 40])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_products_in_bfloat16_of_sizes_that_tiles_do_not_divide(kind, rows, columns):
    layer = layer_of(kind, weight_of(rows, columns, torch.bfloat16))
    states = torch.randn(3, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = states.double() @ dequantized(layer).T
    assert (layer(states).double() - exact).abs().max() <= exact.abs().max() * 2**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2-tied", "llama", "qwen3-gqa", "gemma2"])
def test_a_server_has_the_logprobs_of_the_dequantised_model(
    build_model, drive, prompts, reference_logprobs, family, kind, dtype
):
    model = build_model(family).to(dtype)
    quantize(model, kind)
    plain = with_plain_weights(model).float()
    driver = drive(model, max_prefill_tokens=32)
    each = [driver.add(prompt, temperature=1.0, seed=seed) for seed, prompt in enumerate(prompts)]
    driver.run()
    errors = []
    for sequence in each:
        exact = reference_logprobs(plain, sequence.token_ids)
        for place, logprob in enumerate(sequence.logprobs, sequence.num_prompt):
            errors.append(abs(logprob - exact[place - 1, sequence.token_ids[place]].item()))
    assert max(errors) < (5e-5 if dtype == torch.float32 else 0.5)
    assert sum(errors) / len(errors) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [qwen3_vl, qwen2_5_vl])
def test_a_quantised_model_answers_to_images_before_and_after_an_update(build, drive, kind, tmp_path):
    """The vision tower stays as it is."""
    model, new = build(0), build(1)
    folder = save(new, tmp_path)
    quantize(model, kind)
    assert not {id(part) for part in model.model.visual.modules()} & {id(layer) for layer in quantized_layers(model)}
    driver = drive(model, layout=LAYOUT)
    ids, images = pictured(3, png(2), 7, 8)
    for seed, current in enumerate((model, new)):
        if seed:
            driver.engine.weights.start("")
            driver.engine.weights.receive_folder(folder)
            driver.engine.install_weights("1", "retract")
            quantize(current, kind)
        sequence = driver.add(ids, images=images, max_new_tokens=8)
        driver.run()
        exact = reference(with_plain_weights(current), sequence.token_ids, images)
        wanted = [exact[place - 1, sequence.token_ids[place]].item() for place in range(len(ids), len(ids) + 8)]
        assert sequence.logprobs == pytest.approx(wanted, abs=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_in_float32_do_not_depend_on_the_requests_beside_them(build_model, drive, prompts, kind):
    model = build_model("qwen3-gqa")
    quantize(model, kind)
    together, alone = drive(model), drive(model)
    each = [together.add(prompt) for prompt in prompts]
    together.run()
    for sequence in each:
        ours = alone.add(sequence.token_ids[: sequence.num_prompt])
        alone.run()
        assert (ours.token_ids, ours.logprobs) == (sequence.token_ids, sequence.logprobs)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_gives_the_bits_of_a_model_that_was_loaded_with_the_new_weights(build_model, drive, kind):
    model, new = build_model("qwen3-gqa", 0).bfloat16(), build_model("qwen3-gqa", 1).bfloat16()
    values = new.state_dict()
    quantize(model, kind)
    wanted = copy.deepcopy(new)
    quantize(wanted, kind)
    driver = drive(model)
    before = driver.add([3, 4, 5])
    driver.run()
    ours = driver.engine.runner.model
    old = [held.clone() for held in held_by(ours)]
    for update in range(3):  # the copies are exchanged each time
        for name, value in values.items():
            driver.engine.weights.receive_value(name, value.float() if update else value)
        assert equal(held_by(ours), old)
        driver.engine.install_weights(str(update), "retract")
        assert equal(held_by(ours), held_by(wanted))
        old = [held.clone() for held in held_by(ours)]
    fresh = drive(wanted)
    after, exact = driver.add([3, 4, 5]), fresh.add([3, 4, 5])
    driver.run()
    fresh.run()
    assert (after.token_ids, after.logprobs) == (exact.token_ids, exact.logprobs)
    assert after.logprobs != before.logprobs


def test_decode_graphs_compute_with_the_codes_of_an_update(build_model, drive, prompts, monkeypatch):
    """A graph has fixed addresses; three updates use both copies of the codes."""
    model, result = build_model("qwen3-gqa"), []
    quantize(model, "int8")
    for is_graphed in (False, True):
        if is_graphed:
            with_graphs(monkeypatch)
        driver = drive(model, max_running=4)
        assert (driver.engine.runner._graphs is not None) == is_graphed
        for seed in (1, 2, 3):
            sequences = [driver.add(prompt, max_new_tokens=12) for prompt in prompts[:4]]
            driver.run()
            result.append([sequence.token_ids for sequence in sequences])
            for name, value in build_model("qwen3-gqa", seed).state_dict().items():
                driver.engine.weights.receive_value(name, value)
            driver.engine.install_weights(str(seed), "retract")
    assert result[:3] == result[3:]
    assert result[0] != result[1] != result[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_with_numbers_that_are_not_finite_is_refused(build_model, kind):
    model = build_model("qwen3-gqa").requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    with raises_code("weights.not_finite", "weight layers.1.mlp.up_proj of the checkpoint"):
        quantize(model, kind)


def test_a_weight_that_is_not_finite_leaves_the_old_ones(build_model):
    model = build_model("qwen3-gqa")
    quantize(model, "int8")
    weights, values = ServedWeights(model), build_model("qwen3-gqa", 1).state_dict()
    old = [held.clone() for held in held_by(model)]
    name = "model.layers.1.mlp.up_proj.weight"
    values[name][3, 4] = torch.inf
    bad = values.pop(name)
    for key, value in values.items():
        weights.receive_value(key, value)
    with pytest.raises(RequestError, match=f"weight {name} has numbers that are not finite"):
        weights.receive_value(name, bad)
    with pytest.raises(RequestError, match="the update lacks"):
        weights.check_complete("")
    assert equal(held_by(model), old)


def test_differences_over_a_collective_reach_quantised_weights(build_model, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    model, trained = build_model("qwen3-gqa").bfloat16(), build_model("qwen3-gqa", 1).bfloat16()
    quantize(model, "int8")
    fleet = DeltaFleet(model)
    channel = DeltaCollectiveChannel(FixedTrainer(trained), FakeRanks(), fleet, bucket_bytes=0, backend="gloo")
    serve(channel, 1)
    step(trained)
    serve(channel, 2)
    channel.close()
    assert [len(update.delta_bytes) for update in fleet.updates] == [0, 1]
    quantize(trained, "int8")
    assert equal(held_by(model), held_by(trained))


def test_only_linear_layers_of_fitting_sizes_in_blocks_are_quantised(build_model):
    model = build_model("qwen3-gqa").bfloat16()
    before = weight_bytes(model)
    inside = sum(weight.nbytes for name, weight in model.named_parameters() if "_proj" in name)
    quantize(model, "int8")
    assert len(quantized_layers(model)) == 2 * 7
    assert not isinstance(model.lm_head, QuantizedLinear)
    rows = sum(layer.out_features for layer in quantized_layers(model))
    assert weight_bytes(model) == before - inside // 2 + 2 * rows
    assert all(layer.weight.untyped_storage().nbytes() == 2 for layer in quantized_layers(model))


@pytest.mark.parametrize(("family", "what"), [("deepseek_v3", "experts"), ("lfm2", "layers with a state")])
def test_other_models_are_refused(build_model, family, what):
    with pytest.raises(ConfigError, match=f"native.quantization=int8 covers .* and this one has {what}: remove it"):
        quantize(build_model(family), "int8")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_folder_reaches_the_weights_of_a_server(options, serve_with, checkpoint, build_model, kind):
    wanted = build_model("qwen3-gqa", 1)
    wanted.load_state_dict(load_file(checkpoint(1) / "model.safetensors"), strict=False)
    quantize(wanted, kind)
    async for served in serve_with(replace(options, native=replace(options.native, quantization=kind))):
        first = await served.generate()
        await served.post("/update_weights_from_disk", {"model_path": str(checkpoint(1)), "weight_version": "1"})
        assert equal(held_by(served.engine.runner.model), held_by(wanted))
        second = await served.generate()
        assert second["meta_info"]["weight_versions"][0]["version"] == "1"
        assert first["meta_info"]["output_token_logprobs"] != second["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize("kind", ["int8", "nvfp4"])
def test_adapters_are_served_on_a_quantised_model(build_model, drive, write_adapter, prompts, reference_logprobs, kind):
    model = build_model("qwen3-gqa")
    quantize(model, kind)
    folder, merged = write_adapter(with_plain_weights(model), 1, 4)
    driver = drive(model, max_prefill_tokens=32)
    number = load(driver, folder)
    each = [driver.add(prompt, adapter=number) for prompt in prompts[:5]]
    driver.run()
    for sequence in each:
        exact = reference_logprobs(merged, sequence.token_ids)[sequence.num_prompt - 1 : -1]
        chosen = exact.gather(1, torch.tensor(sequence.answer_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sequence.logprobs), chosen, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_differences_of_weights_reach_a_server_that_keeps_the_stored_form_on_its_disk(
    build_model, tmp_path, monkeypatch, copied, kind
):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trained = build_model("qwen3-gqa").bfloat16()
    machine = Machine(tmp_path / "server")
    machine.model = copy.deepcopy(trained)
    quantize(machine.model, kind)
    channel = new_channel(FixedTrainer(trained), Machines([machine]))
    for version in (1, 2, 3):
        serve(channel, version)
        wanted = copy.deepcopy(trained)
        quantize(wanted, kind)
        assert equal(held_by(machine.model), held_by(wanted))
        step(trained)
    channel.close()
    machine.puller.close()
    assert machine.problems == ["", "", ""]
    assert {"delta_v000002", "delta_v000003"} <= {name for name, size in copied if size}
