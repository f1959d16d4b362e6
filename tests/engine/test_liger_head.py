"""Liger as the source of log-probabilities: what it is called with, what the engine makes of it, what is refused."""

import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from areal.api.batch import OutputSpec
from areal.engine.linear_logprobs import require_liger
from tests.expect import raises_code

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def stand_in(hidden, weight, target, bias, *options):
    """liger-kernel's function, which needs a GPU: its order of arguments since 0.8.2, its four results."""
    assert options == (None, -100, 0.0, 0.0, "none", None, False, torch.float32)
    assert target.dtype == torch.int64
    losses = F.cross_entropy(F.linear(hidden, weight, bias).float(), target, reduction="none", ignore_index=-100)
    return losses, None, None, None


@pytest.fixture
def with_liger(monkeypatch):
    ops = ModuleType("liger_kernel.ops")
    ops.fused_linear_cross_entropy = SimpleNamespace(
        LigerFusedLinearCrossEntropyFunction=SimpleNamespace(apply=stand_in)
    )
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    monkeypatch.setattr("areal.engine.fsdp.require_liger", lambda device, outputs, tensor_ranks: None)


@pytest.mark.usefixtures("with_liger")
@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_liger_gives_the_same_and_no_entropy(cases, models, model):
    batch = cases.make_batch()
    engine, other = (cases.make_engine(models / model, logprob_kernel=kernel) for kernel in ("liger", "torch"))
    outputs, expected = engine.forward(batch), other.forward(batch)
    torch.testing.assert_close(outputs.logprobs, expected.logprobs, rtol=0, atol=2e-6)
    assert outputs.entropy is None
    actual = cases.gradients(engine, batch)
    for name, value in cases.gradients(other, batch).items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6, msg=name)


def set_version(monkeypatch, version):
    def of(name):
        assert name == "liger-kernel"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr("areal.engine.linear_logprobs.metadata.version", of)


@pytest.mark.parametrize("version", ["0.8.2", "0.10", "1.0.0.dev3"])
def test_versions_that_weigh_each_token_by_its_own_gradient_are_taken(monkeypatch, version):
    set_version(monkeypatch, version)
    require_liger(CUDA, OutputSpec())


@pytest.mark.parametrize("version", ["0.8.1", None])
def test_other_versions_are_refused(monkeypatch, version):
    set_version(monkeypatch, version)
    with raises_code("model.liger_unavailable", "0.8.2", version or "pip install"):
        require_liger(CUDA, OutputSpec())


@pytest.mark.parametrize(
    "outputs", [OutputSpec(entropy_grad=True), OutputSpec(entropy_clamp=0.1), OutputSpec(candidates=0)]
)
def test_liger_gives_log_probabilities_only(monkeypatch, outputs):
    set_version(monkeypatch, "0.8.5")
    with raises_code("model.liger_unavailable"):
        require_liger(CUDA, outputs)


def test_liger_on_the_cpu_is_refused_by_the_engine(cases, models):
    with raises_code("model.liger_unavailable", "cpu"):
        cases.make_engine(models / "qwen3", logprob_kernel="liger")
