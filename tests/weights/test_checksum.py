"""The checksum of weights: what changes it, and what does not."""

import pytest
import torch

from areal.weights.weight_files import WeightsChecksum, checksum_of
from tests.fake_ranks import FakeRanks

LARGE = 5 * 2**15 + 77
KNOWN = "34ec16105c509aa7cade250b0f4ade4b"


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed": (LARGE,), "layer.a": (3, 5), "layer.b": (3, 5), "norm": ()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def checksum(tensors):
    result = WeightsChecksum()
    for name, value in tensors.items():
        result.add(name, value)
    return result.hexdigest()


def flipped(tensor, place, bit):
    result = tensor.clone().reshape(-1)
    words = result.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    words[place] ^= torch.tensor(1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit), dtype=words.dtype)
    return result.reshape(tensor.shape)


@pytest.mark.parametrize(("dtype", "top_bit"), [(torch.float32, 31), (torch.bfloat16, 15)])
def test_every_flipped_bit_changes_the_checksum(dtype, top_bit):
    before = weights(dtype)
    seen = {checksum(before)}
    changes = [("embed", place, bit) for place in (0, 2**15 - 1, 2**15, LARGE - 1) for bit in (0, 7, top_bit)]
    changes += [("norm", 0, 3), ("layer.b", 14, top_bit)]
    for name, place, bit in changes:
        seen.add(checksum(before | {name: flipped(before[name], place, bit)}))
    assert len(seen) == 1 + len(changes)


@pytest.mark.parametrize(("i", "j"), [(0, 1), (5, 5 + 2**15), (2**15 - 1, LARGE - 1)])
def test_two_swapped_elements_change_the_checksum(i, j):
    before = weights()
    swapped = before["embed"].clone()
    swapped[[i, j]] = swapped[[j, i]]
    assert checksum(before | {"embed": swapped}) != checksum(before)


def test_the_checksum_depends_on_names_shapes_and_types():
    before = weights()
    reference = checksum(before)
    assert checksum(before | {"layer.a": before["layer.b"], "layer.b": before["layer.a"]}) != reference
    assert checksum(before | {"layer.a": before["layer.a"].reshape(5, 3)}) != reference
    assert checksum(before | {"layer.a": before["layer.a"].view(torch.int32)}) != reference
    assert checksum({("x" if name == "norm" else name): value for name, value in before.items()}) != reference
    assert checksum({name: value for name, value in before.items() if name != "norm"}) != reference


def test_the_checksum_ignores_order_and_memory_layout():
    before = weights()
    reordered = dict(reversed(before.items())) | {"layer.a": before["layer.a"].t().contiguous().t()}
    assert not reordered["layer.a"].is_contiguous()
    assert checksum(reordered) == checksum(before)


def test_the_checksum_of_zeros_depends_on_their_number():
    assert checksum({"a": torch.zeros(4)}) != checksum({"a": torch.zeros(5)})


def test_the_checksum_ignores_the_block_size(monkeypatch):
    reference = checksum(weights())
    monkeypatch.setattr("areal.weights.weight_files._CPU_ROWS", 3)
    assert checksum(weights()) == reference


def test_a_known_checksum_is_unchanged():
    """Ledgers hold it: a later version must find the same."""
    values = torch.arange(100_000, dtype=torch.int32).view(torch.float32)
    assert checksum({"a": values, "b": torch.arange(7, dtype=torch.bfloat16)}) == KNOWN


class Engine:
    """An engine with these weights."""

    def __init__(self, tensors):
        self.tensors = tensors

    def named_weights(self):
        yield from self.tensors.items()


def test_the_weights_that_pass_are_unchanged_and_counted():
    result = WeightsChecksum()
    assert dict(result.adding(iter(weights().items()))).keys() == weights().keys()
    assert result.hexdigest() == checksum(weights())


def test_the_checksum_of_an_engine_is_on_rank_0_only():
    ranks = FakeRanks()
    assert checksum_of(Engine(weights()), ranks) == checksum(weights())
    ranks.rank = 1
    assert checksum_of(Engine(weights()), ranks) == ""
