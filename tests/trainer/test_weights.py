"""The checksum of weights, and what a rank does when the servers lost its version."""

from dataclasses import replace

import pytest
import torch

from areal.api.config import GRPOConfig
from areal.rollout.client import WeightsNeeded
from areal.system.run_paths import RunPaths
from areal.trainer import weights as trainer_weights
from areal.trainer.checksum import WeightsChecksum
from areal.trainer.weights import ChecksummedWeights, WeightPublisher

LARGE = 5 * 2**15 + 77
KNOWN = "34ec16105c509aa7cade250b0f4ade4b"


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed": (LARGE,), "layer.a": (3, 5), "layer.b": (3, 5), "norm": ()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def checksum(tensors):
    found = WeightsChecksum()
    for name, value in tensors.items():
        found.add(name, value)
    return found.hexdigest()


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


def test_names_shapes_and_types_count():
    before = weights()
    reference = checksum(before)
    assert checksum(before | {"layer.a": before["layer.b"], "layer.b": before["layer.a"]}) != reference
    assert checksum(before | {"layer.a": before["layer.a"].reshape(5, 3)}) != reference
    assert checksum(before | {"layer.a": before["layer.a"].view(torch.int32)}) != reference
    assert checksum({("x" if name == "norm" else name): value for name, value in before.items()}) != reference
    assert checksum({name: value for name, value in before.items() if name != "norm"}) != reference


def test_the_order_of_weights_and_their_memory_layout_do_not_count():
    before = weights()
    reordered = dict(reversed(before.items())) | {"layer.a": before["layer.a"].t().contiguous().t()}
    assert not reordered["layer.a"].is_contiguous()
    assert checksum(reordered) == checksum(before)


def test_the_checksum_of_zeros_tells_their_number():
    assert checksum({"a": torch.zeros(4)}) != checksum({"a": torch.zeros(5)})


def test_the_size_of_the_blocks_does_not_count(monkeypatch):
    reference = checksum(weights())
    monkeypatch.setattr("areal.trainer.checksum._CPU_ROWS", 3)
    assert checksum(weights()) == reference


def test_a_known_checksum_stays_what_it_is():
    """Ledgers hold it: a later version must find the same."""
    values = torch.arange(100_000, dtype=torch.int32).view(torch.float32)
    assert checksum({"a": values, "b": torch.arange(7, dtype=torch.bfloat16)}) == KNOWN


class Engine:
    """A rank of an engine with one weight, and the reduction of its group."""

    def __init__(self, toolbox_group=None, rank=0):
        self.weight = torch.zeros(3)
        self._group, self._rank = toolbox_group, rank

    def named_weights(self):
        yield "w", self.weight

    def all_reduce(self, values, op="sum"):
        return values if self._group is None else self._group.all_reduce(self._rank, values, op)


class Channel:
    """Passes the weights by, like every channel."""

    def __init__(self, weights):
        self.weights, self.published = weights, []

    def publish(self, version):
        self.published.append(version)
        for _ in self.weights.named_weights():
            pass

    def close(self):
        pass


def publisher(engine, *, is_rank0=True):
    weights = ChecksummedWeights(engine, is_rank0=is_rank0)
    channel = Channel(weights)
    return WeightPublisher(channel, weights), channel


def test_each_publication_tells_the_checksum_of_what_was_sent():
    engine = Engine()
    publishes, _ = publisher(engine)
    first = publishes.publish(1)
    engine.weight[1] = 1.0
    assert first == checksum({"w": torch.zeros(3)})
    assert publishes.publish(2) == checksum({"w": engine.weight}) != first


def test_ranks_above_zero_send_the_weights_without_a_checksum():
    publishes, channel = publisher(Engine(), is_rank0=False)
    assert publishes.publish(1) == ""
    assert channel.published == [1]


def test_all_ranks_publish_again_when_some_were_told_that_the_servers_lost_the_weights(toolbox):
    group = toolbox.RankGroup(2)

    def rank(index):
        publishes, channel = publisher(Engine(group, index))
        asked = []

        def question():
            asked.append(index)
            if index == 1 and len(channel.published) < 2:  # rank 0 has its answer at once
                raise WeightsNeeded("no server holds version 7")
            return f"answer {index}"

        return publishes.ask(question, version=7), channel.published, len(asked)

    assert group.run(rank) == [("answer 0", [7, 7], 1), ("answer 1", [7, 7], 3)]


def test_an_empty_answer_is_an_answer():
    publishes, channel = publisher(Engine())
    assert publishes.ask(dict, version=3) == {}
    assert channel.published == []


@pytest.mark.parametrize(("mode", "ranks"), [("native:d2+fsdp:d1", 1), ("vllm:d2t4+fsdp:d1", 4)])
def test_every_rank_of_a_server_has_its_place_in_the_update_group(monkeypatch, tmp_path, mode, ranks):
    asked = {}
    monkeypatch.setattr(trainer_weights, "CollectiveChannel", lambda *_, **options: asked.update(options))
    config = replace(GRPOConfig(), allocation_mode=mode)
    config = replace(config, actor=replace(config.actor, weight_update_mode="xccl"))
    trainer_weights.build_weight_publisher(config, Engine(), None, RunPaths(tmp_path), is_rank0=True)
    assert asked["ranks_per_replica"] == ranks
