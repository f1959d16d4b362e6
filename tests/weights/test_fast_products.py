"""Products by oneDNN have the values and gradients of torch's own, and replace them inside the block alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from areal.weights.fast_products import ZEN4_MIN_RIGHT, fast_products, product, smallest_right

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
ZEN4, ZEN5 = (f"vendor_id\t: AuthenticAMD\ncpu family\t: {family}\nmodel\t\t: 17\n" for family in (25, 26))


def cpu(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    return path


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


OPERANDS = {
    "aligned": (values(64, 128), values(128, 320)),
    "padded rows": (values(1037, 64), values(64, 96)),
    "transposed right": (values(200, 64), values(256, 64).t()),
    "transposed left": (values(256, 64).t(), values(256, 512)),
    "columns of a wider matrix": (values(96, 200)[:, 8:136], values(128, 400)[:, 3:300]),
    "one row expanded": (values(1, 96).expand(512, 96), values(96, 64)),
    "one number expanded": (values(1, 1).expand(1000, 64), values(64, 64)),
    "large with odd sizes": (values(1013, 517), values(517, 263)),
    "odd number of terms, large": (values(257, 4099).contiguous(), values(4099, 131)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_a_product_is_exact_to_float32(name: str) -> None:
    left, right = OPERANDS[name]
    bias = values(right.shape[1])
    exact = left.double() @ right.double()
    scale = left.double().abs() @ right.double().abs()
    for given, expected in ((None, exact), (bias, exact + bias.double())):
        found = product(left, right, given, 0)
        assert found is not None
        assert found.shape == exact.shape
        assert found.is_contiguous()
        assert float(((found.double() - expected).abs() / (scale + 1)).max()) < 1e-6


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (values(64, 64), values(64, 64)),  # too small
        (values(31, 512), values(512, 512)),  # few rows
        (values(512, 100), values(100, 64)),  # terms that are no whole blocks, and not large
        (values(512, 512).double(), values(512, 512).double()),
        (values(512, 512).bfloat16(), values(512, 512).bfloat16()),
    ],
)
def test_other_products_stay_with_torch(left: Tensor, right: Tensor) -> None:
    assert product(left, right, None, 0) is None


def test_a_product_with_a_small_right_operand_stays_with_torch() -> None:
    left, right = values(512, 256), values(256, 128)
    assert product(left, right, None, right.numel()) is not None
    assert product(left, right, None, right.numel() + 1) is None


def test_only_cpus_whose_avx512_mkl_does_not_use_are_faster(tmp_path: Path) -> None:
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkl.is_available()
    assert smallest_right(cpu(tmp_path, ZEN5)) == (0 if has_avx512 else None)
    assert smallest_right(cpu(tmp_path, ZEN4)) == (ZEN4_MIN_RIGHT if has_avx512 else None)
    assert smallest_right(cpu(tmp_path, "vendor_id\t: GenuineIntel\ncpu family\t: 26\n")) is None
    assert smallest_right(tmp_path / "none") is None


def train(rows: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    inputs = [given.clone().requires_grad_() for given in (rows, weight, bias) if given is not None]
    loss = F.linear(*inputs).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize(("tokens", "num_faster"), [(40, 0), (512, 3), (1003, 2)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_layer_has_the_same_gradients(
    tokens: int, num_faster: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.weights.fast_products.smallest_right", lambda cpu_info: 0)
    calls: list[Tensor | None] = []

    def noted(left: Tensor, right: Tensor, bias: Tensor | None, min_right: int) -> Tensor | None:
        calls.append(product(left, right, bias, min_right))
        return calls[-1]

    monkeypatch.setattr("areal.weights.fast_products.product", noted)
    given = values(tokens, 128), values(192, 128), values(192) if has_bias else None
    before = train(*given)
    assert not calls
    with fast_products():
        inside = train(*given)
    assert len(calls) == 3  # forward, and the gradients of rows and weight
    assert sum(found is not None for found in calls) == num_faster
    after = train(*given)
    assert len(calls) == 3
    for name, one, other, last in zip(("loss", "rows", "weight", "bias"), before, inside, after, strict=False):
        torch.testing.assert_close(other, one, rtol=2e-5, atol=1e-3, msg=name)
        assert torch.equal(last, one), name


def test_on_other_cpus_nothing_changes(tmp_path: Path) -> None:
    left, right = values(512, 512), values(512, 512)
    expected = left @ right
    with fast_products(cpu(tmp_path, "vendor_id\t: GenuineIntel\n")):
        assert torch.equal(left @ right, expected)
