"""FP8 training: products against float64 with the same scales, the layers that are converted, every way through them,
two ranks that gather weights in 8 bits, checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal.api.allocation import ParallelDims
from areal.api.config import Float8Config, FSDPEngineConfig, LoRAConfig, MicroBatchSpec, TrainEngineConfig
from areal.api.config.load import load_experiment
from areal.api.errors import ConfigProblem
from areal.data.balance import balanced_parts
from areal.data.pack import take
from areal.engine import build, float8
from areal.engine.fsdp import check_model
from areal.engine.lora import LoRALinear
from areal.launcher import preflight
from tests.engine import engine_cases as cases
from tests.engine import mesh_cases
from tests.expect import in_order, raises_code
from tests.rank_processes import run_ranks

pytest.importorskip("torchao", reason="the extra quantization")
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

ROWWISE, TENSORWISE = Float8Config(), Float8Config(recipe="tensorwise")
ROOT = Path(__file__).parents[2]
LINEAR = 14
"""Linear layers of the decoder blocks: 2 x 7."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("float8")
    mesh_cases.write_models(folder)
    return folder / "qwen3"


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """A word for each product in 8 bits that has run: forward or backward."""
    result: list[str] = []
    for name in ("forward", "backward"):
        original = getattr(matmul_with_hp_or_float8_args, name)

        def counted(*arguments, original=original, name=name):
            result.append(name)
            return original(*arguments)

        monkeypatch.setattr(matmul_with_hp_or_float8_args, name, staticmethod(counted))
    return result


def logprobs(engine, batch) -> Tensor:
    return engine.forward(batch).logprobs


# ----------------------------------------------------------------------------------------------------------------------
# The numbers.


def rounded(values: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """float32 values in 8 bits and back, as float64. `dim`: along which the largest value sets a scale, which is then a
    power of two; None: one scale for all."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest.double().clamp(min=1e-12)).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (values * scale).to(dtype).double() / scale.double()


def products(recipe: str, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the input, gradient of the weight: [t, in], [out, in], [t, out] float32 -> float64."""
    small, wide = torch.float8_e4m3fn, torch.float8_e5m2
    if recipe == "tensorwise":
        a, b, c = rounded(x, small, None), rounded(w, small, None), rounded(g, wide, None)
        return a @ b.T, c @ b, c.T @ a
    output = rounded(x, small, 1) @ rounded(w, small, 1).T
    if recipe == "rowwise":
        return output, rounded(g, small, 1) @ rounded(w, small, 0), rounded(g, small, 0).T @ rounded(x, small, 0)
    scale = (448 / w.abs().amax().double()).log2().floor().exp2()  # one for the whole weight
    back = (w * scale.float()).to(small).double() / scale
    return output, rounded(g, small, 1) @ back, g.double().T @ x.double()


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
def test_products_are_those_of_float64_with_the_same_scales(model, recipe):
    engine = cases.make_engine(model, fp8=Float8Config(recipe=recipe))
    generator = torch.Generator().manual_seed(0)
    for layer in (module for module in engine._model.modules() if isinstance(module, Float8Linear)):
        x = torch.randn(7, layer.in_features, generator=generator).requires_grad_()
        upstream = torch.randn(7, layer.out_features, generator=generator) * 1e-3
        output = layer(x)
        gradients = torch.autograd.grad(output, (x, layer.weight), upstream)
        exact = products(recipe, x.detach(), layer.weight.detach(), upstream)
        plain = x.detach().double() @ layer.weight.detach().double().T
        for actual, expected in zip((output.detach(), *gradients), exact, strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6 * expected.abs().max().item())
        error = (exact[0] - plain).norm() / plain.norm()
        assert 0.01 < error < 0.06  # 8 bits: the comparison above is not one of plain products


class Reference(torch.autograd.Function):
    """A linear layer in 8 bits, of float64."""

    @staticmethod
    def forward(ctx, x, weight, recipe):
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return products(recipe, x.float(), weight.float(), x.new_ones(len(x), len(weight)).float())[0]

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        return (*products(ctx.recipe, x.float(), weight.float(), upstream.float())[1:], None)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_whole_model_is_that_of_float64(model, recipe, monkeypatch):
    """Log-probabilities and gradients of packed rows, where all values between the products are float64."""
    batch = cases.make_batch([16])
    engine = cases.make_engine(model, fp8=Float8Config(recipe=recipe))
    result = logprobs(engine, batch)
    gradients = cases.gradients(engine, batch)
    exact = cases.make_engine(model)
    exact._model.double()
    head = exact._model.model.get_output_embeddings()

    def forward(self, x):
        if self is head:
            return nn.functional.linear(x, self.weight)
        return Reference.apply(x.flatten(0, -2), self.weight, recipe).unflatten(0, x.shape[:-1])

    monkeypatch.setattr(nn.Linear, "forward", forward)
    torch.testing.assert_close(result.double(), logprobs(exact, batch).double(), rtol=0, atol=1e-4)
    exact.forward_backward(batch, cases.policy_loss, denominator=float(batch.loss_mask.sum()))
    ours = {name: weight.grad for name, weight in exact._model.named_tensors() if weight.grad is not None}
    assert ours.keys() == gradients.keys()
    for name, gradient in ours.items():
        limit = 3e-3 * gradient.abs().max().item()
        torch.testing.assert_close(gradients[name].double(), gradient, rtol=0, atol=limit, msg=name)


def test_rowwise_log_probabilities_do_not_depend_on_the_other_rows(model):
    """Those of one scale for all tokens of a micro-batch do."""
    batch, spread = cases.make_batch(), MicroBatchSpec(n_mbs=4)
    for recipe, least, most in ((ROWWISE, 0.0, 1e-6), (TENSORWISE, 1e-3, 1.0)):
        first, four = (cases.make_engine(model, fp8=recipe, mb_spec=spec) for spec in (MicroBatchSpec(), spread))
        gap = (logprobs(first, batch) - logprobs(four, batch)).abs().max().item()
        assert least <= gap <= most


# ----------------------------------------------------------------------------------------------------------------------
# Which layers, and that every pass enters them.


def converted(engine) -> set[str]:
    layers = engine._model.model.named_modules()
    return {name for name, item in layers if isinstance(item, Float8Linear | LoRALinear)}


KINDS: dict[str, dict] = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": True, "checkpointing": "selective"},
    "bf16": {"dtype": "bfloat16"},
    "critic": {"role": "critic"},
    "reward": {"role": "reward"},
    "trees": {"shared_prefixes": "tree"},
    "lora": {"lora": LoRAConfig(rank=2)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [ROWWISE, TENSORWISE])
def test_every_pass_enters_every_layer(model, calls, kind, recipe, shares_in_small_rows):
    engine = cases.make_engine(model, fp8=recipe, **KINDS[kind])
    batch = cases.make_batch()
    assert len(converted(engine)) == LINEAR
    assert not any("head" in name or "score" in name for name in converted(engine))
    engine.forward(batch)
    assert calls == ["forward"] * LINEAR
    calls.clear()
    loss = {"critic": cases.value_loss, "reward": cases.score_loss}.get(kind, cases.policy_loss)
    cases.train(engine, batch, loss_fn=loss)
    again = 2 if kind in ("checkpointed", "selective") else 1
    result = calls.count("forward"), calls.count("backward")
    if kind == "lora":  # one product for a gradient; nothing below the first block is trained
        assert result == (LINEAR + LINEAR - 3, 0)
    else:
        assert result == (again * LINEAR, LINEAR)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
def test_a_weight_below_adapters_takes_no_product_for_its_gradient_and_the_rest_is_that_of_torchao(model, recipe):
    engine = cases.make_engine(model, fp8=Float8Config(recipe=recipe), lora=LoRAConfig(rank=2))
    like = cases.make_engine(model, fp8=Float8Config(recipe=recipe))
    generator = torch.Generator().manual_seed(0)
    layers = [module for module in like._model.modules() if isinstance(module, Float8Linear)]
    adapted = [module for module in engine._model.modules() if isinstance(module, LoRALinear)]
    assert len(adapted) == len(layers) == LINEAR
    for ours, torchaos in zip(adapted, layers, strict=True):
        x = torch.randn(2, 7, ours.in_features, generator=generator).requires_grad_()
        upstream = torch.randn(2, 7, ours.out_features, generator=generator) * 1e-3
        counts, result = [], []
        for product in (lambda x, ours=ours: ours.product(x, ours.weight, ours.bias), torchaos):
            with Products() as products_run:
                output = product(x)
                output.backward(upstream)
            counts.append(products_run.count)
            result.append((output, x.grad))
            x.grad = None
        assert counts == [2, 3]
        assert torch.equal(result[0][0], result[1][0])
        assert torch.equal(result[0][1], result[1][1])


def test_the_base_model_below_adapters_computes_in_8_bits(model):
    batch = cases.make_batch()
    adapted = cases.make_engine(model, fp8=ROWWISE, lora=LoRAConfig(rank=2))
    plain = cases.make_engine(model, fp8=ROWWISE)
    assert torch.equal(logprobs(adapted, batch), logprobs(plain, batch))
    base = adapted.forward(batch, with_adapters=False).logprobs
    assert base is not None
    assert torch.equal(base, logprobs(plain, batch))
    cases.train(adapted, batch)
    assert not torch.equal(logprobs(adapted, batch), logprobs(plain, batch))


def test_filtered_and_odd_layers_stay(model, models, caplog):
    caplog.set_level("INFO", logger="areal.engine")
    result = converted(cases.make_engine(model, fp8=Float8Config(filter_fqns=["layers.0.", "o_proj"])))
    assert result == {
        f"model.layers.1.{name}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                     "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }  # fmt: skip
    assert "fp8: 6 of 14 linear layers compute in 8 bits (rowwise, emulated on the CPU), 8 are in filter" in caplog.text
    result = converted(cases.make_engine(models / "llama", fp8=ROWWISE))  # 24 columns of the MLP, 8 of keys and values
    assert result == {f"model.layers.{n}.self_attn.{name}" for n in range(2) for name in ("q_proj", "o_proj")}
    assert (
        "4 of 14 linear layers compute in 8 bits (rowwise, emulated on the CPU), 0 are in filter_fqns, 10 have sizes"
        in caplog.text
    )


def test_routers_and_experts_stay(model):
    result = converted(cases.make_engine(model.parent / "qwen3_moe", fp8=ROWWISE))
    assert {name.rpartition(".")[2] for name in result} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"filter_fqns": ["mlpp"]}, "model.no_such_weight", ["fp8.filter_fqns: 'mlpp'", "model.layers.0.self_attn.q"]),
        ({"filter_fqns": ["layers"]}, "model.unsupported", ["fp8: 0 of 14", "14 are in filter_fqns", "remove fp8"]),
    ],
)
def test_a_model_without_such_layers_is_refused_before_the_start(model, options, code, values):
    config = TrainEngineConfig(path=str(model), fp8=Float8Config(**options))
    with raises_code(code, *values):
        check_model(config, role="actor", dims=ParallelDims())


def test_a_dry_run_says_the_line_of_the_trainer(model, monkeypatch):
    # tests/models/test_packed_families.py starts the process of this check
    monkeypatch.setattr(preflight, "_answer_about", lambda config, *inputs: json.dumps(build.refused_models(config)))
    words = [f"model.path={model}", "allocation_mode=fsdp:d1", "model.fp8.filter_fqns=[mlpp]"]
    config = load_experiment(["--config", str(ROOT / "examples" / "quickstart" / "sft.yaml"), *words])
    ((line, code),) = preflight.refused_models(config)
    assert line.startswith("fp8.filter_fqns: 'mlpp'")
    assert code == "model.no_such_weight"


def test_without_torchao_or_such_a_card_one_line_says_so(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with raises_code("launch.no_gpu", "compute capability 8.9", "NVIDIA A100 has 8.0"):
        float8._require_card(torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises_code("launch.package_missing", "torchao", "pip install -e '.[quantization]'"):
        cases.make_engine(model, fp8=ROWWISE)


@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        ("delayed", ["torchao 0.18", "tensorwise"]),
        ("nvfp4", ["Blackwell", "B200", "torchao", "0.18"]),
        ("mxfp4", ["Blackwell", "B200", "torchao", "0.18"]),
        ("blockwise", ["rowwise, rowwise_with_gw_hp, tensorwise"]),
    ],
)
def test_recipes_that_torchao_does_not_train_with_are_refused(recipe, values):
    (problem,) = Float8Config(recipe=recipe).problems()
    assert isinstance(problem, ConfigProblem)
    assert (problem.path, problem.code) == ("recipe", "config.not_a_choice")
    assert in_order(problem.message, f"{recipe}: ", *values)


# ----------------------------------------------------------------------------------------------------------------------
# State, and two ranks.


def test_weights_exports_and_checkpoints_are_those_without_fp8(model, tmp_path):
    batch = cases.make_batch()
    low, plain = cases.make_engine(model, fp8=TENSORWISE), cases.make_engine(model)
    assert low.weight_specs() == plain.weight_specs()
    low.save(tmp_path / "export", with_optimizer=False)
    stored, result = load_file(model / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    assert {name: value.dtype for name, value in result.items()} == dict.fromkeys(stored, torch.float32)
    assert all(torch.equal(result[name], value) for name, value in stored.items())
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    cases.train(low, batch)
    low.save(tmp_path / "state", with_optimizer=True)
    plain.load(tmp_path / "state")
    again = cases.make_engine(model, fp8=TENSORWISE)
    again.load(tmp_path / "state")
    for engine in (plain, again):
        assert all(
            torch.equal(value, low_value)
            for (_, value), (_, low_value) in zip(engine.named_weights(), low.named_weights(), strict=True)
        )
    assert torch.equal(logprobs(again, batch), logprobs(low, batch))
    cases.train(low, batch)
    cases.train(again, batch)
    assert torch.equal(logprobs(again, batch), logprobs(low, batch))


VARIANTS = {
    "tensorwise": {"fp8": TENSORWISE},
    "tensorwise_bf16": {"fp8": TENSORWISE, "dtype": "bfloat16"},
    "rowwise": {"fp8": ROWWISE},
    "rowwise_bf16": {"fp8": ROWWISE, "dtype": "bfloat16"},
    "lora": {"fp8": TENSORWISE, "lora": LoRAConfig(rank=2, modules_to_save=["norm"])},
    "adam": {"fp8": TENSORWISE, "optimizer": mesh_cases.ADAM},
    "muon": {"fp8": TENSORWISE, "optimizer": mesh_cases.OPTIONS["muon"]["optimizer"]},
    "critic": {"fp8": TENSORWISE, "role": "critic"},
    "checkpointed": {"fp8": TENSORWISE, "gradient_checkpointing": True},
    "offloaded": {"fp8": TENSORWISE, "fsdp": FSDPEngineConfig(offload_params=True)},
}


def two_ranks(mesh, folder: Path) -> dict[str, object]:
    """What each of two ranks does with its part of the rows."""
    batch = cases.make_batch()
    ours = take(batch, balanced_parts(batch.sequence_lengths, 2)[mesh.dp_rank])
    sent: list[int] = []
    gather = DefaultAllGather.__call__

    def counted(self, output_tensor, input_tensor, **options):
        sent.append(input_tensor.nbytes)
        return gather(self, output_tensor, input_tensor, **options)

    DefaultAllGather.__call__ = counted  # pyright: ignore[reportAttributeAccessIssue] - in this process alone
    facts: dict[str, object] = {}
    for name, options in VARIANTS.items():
        engine = cases.make_engine(folder / "model", mesh, **options)
        sent.clear()
        result = engine.forward(ours)
        facts[name] = sum(sent)
        output = result.values if name == "critic" else result.logprobs
        cases.train(engine, ours, steps=2, loss_fn=cases.value_loss if name == "critic" else cases.policy_loss)
        weights = cases.weights_of(engine)
        save_file(weights | {"output": output}, folder / f"{name}-{mesh.rank}")
        if name in ("adam", "tensorwise_bf16"):
            engine.save(folder / f"state-{name}", with_optimizer=True)
            other = cases.make_engine(folder / "model", mesh, **options)
            other.load(folder / f"state-{name}")
            assert all(torch.equal(value, weights[key]) for key, value in other.named_weights())
            for each in (engine, other):
                cases.train(each, ours)
            assert torch.equal(logprobs(engine, ours), logprobs(other, ours))
            engine.load_weights(iter(weights.items()))
            save_file({"output": logprobs(engine, ours)}, folder / f"loaded-{name}-{mesh.rank}")
            assert all(type(value) is Tensor for _, value in engine.named_weights())
        if name == "checkpointed":
            weight = engine._model.model.get_submodule("model.layers.0.mlp.up_proj").weight
            assert isinstance(weight, DTensor)
            assert type(weight.to_local()).__name__ == "WeightWithDynamicFloat8CastTensor"
    return facts


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    (folder / "model").symlink_to(model)
    facts = run_ranks(two_ranks, folder)
    (folder / "facts").write_text(json.dumps(facts[0]))
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_compute_what_one_does_with_the_parts_as_micro_batches(model, folder, name):
    engine, batch = cases.make_engine(model, **VARIANTS[name]), cases.make_batch()
    parts = [take(batch, part) for part in balanced_parts(batch.sequence_lengths, 2)]
    loss = cases.value_loss if name == "critic" else cases.policy_loss
    tolerance = 2e-2 if "bf16" in name else 2e-6
    for rank, part in enumerate(parts):
        actual = engine.forward(part)
        expected = load_file(folder / f"{name}-{rank}")["output"]
        torch.testing.assert_close(
            actual.values if name == "critic" else actual.logprobs, expected, rtol=0, atol=tolerance
        )
    for _ in range(2):
        for part in parts:
            engine.forward_backward(part, loss, denominator=float(batch.loss_mask.sum()))
        engine.optimizer_step()
    for rank in range(2):
        actual = load_file(folder / f"{name}-{rank}")
        for key, value in cases.weights_of(engine).items():
            torch.testing.assert_close(actual[key], value, rtol=0, atol=tolerance, msg=key)


def test_weights_travel_in_8_bits(model, folder):
    facts, values = json.loads((folder / "facts").read_text()), 0
    for name, item in cases.make_engine(model)._model.model.named_modules():
        if isinstance(item, nn.Linear) and "lm_head" not in name:
            values += item.weight.numel() // 2  # of a rank
    assert facts["rowwise"] - facts["tensorwise"] == 3 * values
    assert facts["rowwise"] == facts["offloaded"]
    assert facts["rowwise_bf16"] - facts["tensorwise_bf16"] == values


@pytest.mark.parametrize("name", ["adam", "tensorwise_bf16"])
def test_loaded_weights_have_new_scales(model, folder, name):
    engine = cases.make_engine(model, **VARIANTS[name])
    weights = {key: value for key, value in load_file(folder / f"{name}-0").items() if key != "output"}
    engine.load_weights(iter(weights.items()))
    batch = cases.make_batch()
    for rank, part in enumerate(balanced_parts(batch.sequence_lengths, 2)):
        expected = load_file(folder / f"loaded-{name}-{rank}")["output"]
        torch.testing.assert_close(
            logprobs(engine, take(batch, part)), expected, rtol=0, atol=2e-6 if name == "adam" else 2e-2
        )


def on_tensor_ranks(mesh, folder: Path) -> list[float]:
    """Gaps of log-probabilities to those of one rank: with FP8 on both, and without on the other; converted layers."""
    path, batch, result = folder / "wide", cases.make_batch(), list[float]()
    for recipe in (ROWWISE, TENSORWISE):
        engine = cases.make_engine(path, mesh, fp8=recipe)
        ranks, alone = logprobs(engine, batch), logprobs(cases.make_engine(path, fp8=recipe), batch)
        plain = logprobs(cases.make_engine(path), batch)
        result += [(ranks - alone).abs().mean().item(), (ranks - plain).abs().mean().item(), len(converted(engine))]
        cases.train(engine, batch)
        assert logprobs(engine, batch).isfinite().all()
    return result


def test_tensor_ranks_scale_their_own_columns(model, tmp_path):
    (tmp_path / "wide").symlink_to(model.parent / "qwen3_wide")
    for rows, to_plain, count, tensor, tensor_to_plain, same in run_ranks(
        on_tensor_ranks, tmp_path, ParallelDims(dp=1, tp=2)
    ):
        assert count == same == LINEAR
        assert 0 < rows < to_plain < 0.1
        assert 0 < tensor < 2 * tensor_to_plain < 0.3
