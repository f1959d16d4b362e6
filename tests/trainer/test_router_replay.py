"""Routed experts from the native server through trajectory, ledger and batch to the trainer."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.agent.transcript import TokenTree, path_to, row_of
from areal.api.columns import ROUTED_EXPERTS, ExpertShape, RoutedExperts
from areal.api.config import NativeServerConfig
from areal.api.data import TrajectoryGroup
from areal.data.pack import to_train_batch
from areal.inference.engine import build_engine
from areal.inference.scheduler import SamplingParams, Sequence
from areal.ledger.payload import encode_episode, payload_head
from areal.rollout.train_batches import build_share, share_parts
from tests.engine import engine_cases as cases
from tests.engine.test_routing import near_ties

SHAPE = ExpertShape(2, 2, 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of the served and of the trained model: their router weights differ by 1e-6, which decides between experts."""
    folder = tmp_path_factory.mktemp("replay")
    cases.write_models(folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3_moe")
    for name, noise in (("served", 1e-6), ("trained", -1e-6)):
        model.load_state_dict(near_ties(folder / "qwen3_moe", noise))
        model.save_pretrained(folder / name)
    return folder / "served", folder / "trained"


def generated(engine, prompt: list[int], *, number: int) -> Sequence:
    params = SamplingParams(max_new_tokens=12, temperature=1.0)
    sequence = Sequence(
        request_id=str(number), token_ids=prompt, num_prompt=len(prompt), params=params, seed=number, experts_start=0
    )
    engine.scheduler.add(sequence)
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
    return sequence


def dialogue(engine, *, number: int):
    """Two turns of a conversation, as a trajectory."""
    tree = TokenTree()
    end = tree.add_fixed(tree.root, [3, 4, 5 + number])
    for turn in range(2):
        prompt = [token for node in path_to(end) for token in node.token_ids]
        sequence = generated(engine, prompt, number=10 * number + turn)
        ids = sequence.token_ids[sequence.num_prompt :]
        record = RoutedExperts(SHAPE, b"".join(sequence.experts))
        end = tree.add_generated(end, str(turn), ids, sequence.logprobs, [0] * len(ids), experts=record)
        if turn == 0:
            end = tree.add_fixed(end, [7, 8, 9])
    return replace(row_of(path_to(end)), reward=1.0, finished=True)


def test_the_trainer_has_the_log_probabilities_of_the_server(folders):
    served, trained = folders
    config = NativeServerConfig(dtype="float32", device="cpu", context_length=64, max_running_requests=4)
    engine = build_engine(
        config, served, "cpu", deliver=lambda *_: None, on_failure=lambda _: None, records_experts=True
    )
    rows = [dialogue(engine, number=number) for number in range(4)]
    payload = encode_episode(0, TrajectoryGroup(trajectories=rows)).payload
    (part,) = share_parts([payload_head(payload)], 1)
    batch = to_train_batch(build_share([payload], part, step=0, version=0, mask_before=0))
    unknown = (batch.columns[ROUTED_EXPERTS] == 255).flatten(1).any(1)
    assert unknown.nonzero().flatten().tolist() == (batch.cu_seqlens[1:] - 1).tolist()
    mask = batch.loss_mask
    for has_record, low, high in ((True, 0.0, 1e-5), (False, 1e-3, 10.0)):
        result = cases.make_engine(trained, router_replay=has_record).forward(batch).logprobs
        difference = (result - batch.rollout_logprobs)[mask].abs().max().item()
        assert low <= difference < high
    assert mask.sum() == 4 * 2 * 12
    assert torch.isfinite(batch.rollout_logprobs).all()
