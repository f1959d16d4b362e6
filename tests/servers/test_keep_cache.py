"""New weights in the middle of answers that keep their cache, and the canary, with real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from areal.api.data import ProbeScore, WeightUpdate
from tests.expect import serve
from tests.fixed_trainer import FixedTrainer
from tests.servers.checkpoints import Scorer, build_model, token_id
from tests.servers.conftest import with_old_weights
from tests.servers.real_server import Backend, RealServer
from tests.servers.server_kit import PROMPT, TOLERANCE, Kit, a_request, largest_gap, tokens_made
from tests.servers.test_interruption import ATTEMPTS, NUM_TOKENS


@pytest.fixture(scope="module")
def own_server(
    backend: Backend, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("keeps")
    server = RealServer(backend, models["old"], folder, name="keeps", weight_update="keep_cache")
    try:
        yield server.wait_ready()
    finally:
        server.kill_all()


@pytest.fixture
async def server(own_server: RealServer, kit: Kit) -> RealServer:
    return await with_old_weights(own_server, kit)


@torch.no_grad()
def mixed_logprobs(prompt: list[int], output: list[int], split: int) -> list[float]:
    """The old weights sampled the first `split` tokens, the new ones continue on their keys and values."""
    cache, result = DynamicCache(), list[float]()
    ids = torch.tensor([prompt + output])
    num_old = len(prompt) + split - 1  # the last token of the old weights is the first input of the new ones
    for seed, first, last in ((1, 0, num_old), (2, num_old, ids.shape[1] - 1)):
        logits = build_model(seed)(ids[:, first:last], past_key_values=cache, use_cache=True).logits[0].float()
        chosen = logits.log_softmax(-1).gather(1, ids[0, first + 1 : last + 1, None])[:, 0]
        result += chosen.tolist()
    return result[len(prompt) - 1 :]


@pytest.mark.parametrize("channel", ["disk", "collective"])
async def test_an_answer_continues_on_its_cache_with_exact_versions(
    server: RealServer, kit: Kit, new: Scorer, channel: str
) -> None:
    fleet = await kit.fleet(server, weight_update="keep_cache")
    trainer = FixedTrainer(build_model(1))
    collective = kit.collective(fleet, trainer)
    for version in range(2, 2 + 2 * ATTEMPTS, 2):
        trainer.model = build_model(1)
        await asyncio.to_thread(serve, collective, version - 1)
        trainer.model = build_model(2)
        made = fleet.status()["generated_tokens"]
        # Prompts that differ at once: a prefix that the server has cached may come from any older version.
        requests = [a_request(NUM_TOKENS, prompt=[token_id("abcd"[i]), version, *PROMPT]) for i in range(4)]
        running = [asyncio.create_task(fleet.agenerate(request)) for request in requests]
        await tokens_made(fleet, made + 4 * 8)
        if channel == "disk":
            await fleet.update_weights(WeightUpdate(version=version, kind="disk", path=str(kit.models["new"])))
        else:
            await asyncio.to_thread(serve, collective, version)
        responses = await asyncio.gather(*running)
        splits = [response.output_versions.count(version - 1) for response in responses]
        for response, split in zip(responses, splits, strict=True):
            assert response.output_versions == [version - 1] * split + [version] * (NUM_TOKENS - split)
            assert (response.num_interruptions, response.stop_reason) == (0, "length")
            if 0 < split < NUM_TOKENS:
                expected = mixed_logprobs(response.input_ids, response.output_ids, split)
                assert largest_gap(response.output_logprobs, expected) < TOLERANCE
                recomputed = new.logprobs(response.input_ids, response.output_ids)
                assert largest_gap(response.output_logprobs[split:], recomputed[split:]) > TOLERANCE
        after = await fleet.agenerate(a_request(20, prompt=[token_id("Z"), version, *PROMPT]))
        assert after.output_versions == [version] * 20
        assert largest_gap(after.output_logprobs, new.logprobs(after.input_ids, after.output_ids)) < TOLERANCE
        if all(0 < split < NUM_TOKENS for split in splits):
            return
    pytest.fail(f"the update came after the last token {ATTEMPTS} times")


async def test_the_canary_finds_a_server_whose_weights_are_not_the_trainers(
    server: RealServer, kit: Kit, old: Scorer, new: Scorer
) -> None:
    fleet = await kit.fleet(server)

    async def compared(version: int, trainer: Scorer):
        probe = fleet.probe_tokens(version)
        assert probe is not None
        logprobs = trainer.logprobs(probe.prompt_ids, probe.answer_ids)
        score = ProbeScore(version=version, answer_ids=probe.answer_ids, logprobs=logprobs, dtype="float32")
        report = await fleet.compare(score)
        assert report is not None
        return report

    await fleet.update_weights(WeightUpdate(version=1, kind="disk", path=str(kit.models["new"])))
    agreed = await compared(1, new)
    assert (agreed.differing, len(agreed.digest)) == ([], 16)
    assert agreed.difference < TOLERANCE
    # The trainer has other weights than the server: as if an update had never been applied.
    await fleet.update_weights(WeightUpdate(version=2, kind="disk", path=str(kit.models["new"])))
    for _ in ("updated again", "rejected"):
        report = await compared(2, old)
        assert report.differing == ["server-0"]
        assert report.difference > report.tolerance
    (replica,) = fleet.status()["replicas"]
    assert replica["weights"] == "rejected"
