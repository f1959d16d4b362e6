"""Choice of the weight channel, and what a rank does when the servers lost its version."""

from dataclasses import replace

import pytest
import torch

from areal.api.config import GRPOConfig
from areal.rollout.client import CheckpointWanted, WeightsNeeded
from areal.trainer import ppo_loop
from areal.trainer.ppo_loop import ask_controller
from tests.fake_ranks import FakeRanks
from tests.process_context import a_context


class Engine:
    """An engine with one weight."""

    def __init__(self):
        self.weight = torch.zeros(3)

    def named_weights(self):
        yield "w", self.weight


class Channel:
    """Records what is published."""

    def __init__(self):
        self.published = []

    def publish(self, version):
        self.published.append(version)
        return ""

    def wait_served(self):
        pass

    def metrics(self):
        return {}

    def close(self):
        pass


def test_all_ranks_publish_again_when_the_servers_lost_the_weights_of_some(toolbox):
    group = toolbox.RankGroup(2)

    def rank(index):
        channel, asked = Channel(), []

        def question():
            asked.append(index)
            if index == 1 and len(channel.published) < 2:  # rank 0 has its answer at once
                raise WeightsNeeded("no server holds version 7")
            return f"answer {index}"

        answer = ask_controller(question, channel=channel, ranks=FakeRanks(index, group), version=7)
        return answer, channel.published, len(asked)

    assert group.run(rank) == [("answer 0", [7, 7], 1), ("answer 1", [7, 7], 3)]


def test_all_ranks_save_when_one_is_asked_to_while_it_waits(toolbox):
    group = toolbox.RankGroup(2)

    def rank(index):
        channel, saved, asked = Channel(), [], []

        def question():
            asked.append(index)
            if index == 1 and len(asked) == 1:  # rank 0 has its answer at once
                raise CheckpointWanted
            return f"answer {index}"

        ranks = FakeRanks(index, group)
        answer = ask_controller(question, channel=channel, ranks=ranks, version=7, save=lambda: saved.append(7))
        return answer, channel.published, saved

    assert group.run(rank) == [("answer 0", [], [7]), ("answer 1", [], [7])]


def test_an_empty_answer_is_an_answer():
    channel = Channel()
    assert ask_controller(dict, channel=channel, ranks=FakeRanks(), version=3) == {}
    assert channel.published == []


@pytest.mark.parametrize(
    ("mode", "update_mode", "ranks", "limit_s"),
    [
        ("native:d2+fsdp:d1", "xccl", 1, 300.0),
        ("vllm:d2t4+fsdp:d1", "xccl", 4, 300.0),
        ("native:d2+fsdp:d1", "delta_xccl", 1, 300.0),
        ("vllm:d2t4+fsdp:d1", "delta_xccl", 2, 2000.0),
    ],
)
def test_every_rank_or_host_of_a_server_has_its_place_in_the_update_group(
    monkeypatch, mode, update_mode, ranks, limit_s
):
    """Hosts make a folder after the broadcast, and servers load it: the trainer waits for both."""
    asked = {}
    for kind in ("CollectiveChannel", "DeltaCollectiveChannel"):
        monkeypatch.setattr(ppo_loop, kind, lambda *_, **options: asked.update(options))
    config = replace(GRPOConfig(), allocation_mode=mode)
    rollout = replace(config.rollout, weight_update_timeout_s=1000.0)
    config = replace(config, actor=replace(config.actor, weight_update_mode=update_mode), rollout=rollout)
    context = a_context(device="cuda:0", weight_transport="gloo", num_parts=2)
    ppo_loop.build_weight_channel(config, Engine(), FakeRanks(), None, context)
    assert (asked["ranks_per_replica"], asked["backend"], asked["timeout_s"]) == (ranks, "gloo", limit_s)
