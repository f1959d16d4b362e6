"""New weights in the middle of a dialogue of an agent: each token has the version and log-probability of its policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen2ForCausalLM

from areal.api.config import AgentConfig, GenerationHyperparameters
from areal.api.data import TURNS as TURN_NUMBERS
from areal.api.data import Trajectory, WeightUpdate
from areal.data.tiny_model import character_tokenizer, tiny_model
from areal.workflow.agent import AgentWorkflow
from tests.agent.test_images import TEMPLATE, TOKENS
from tests.run_token import TOKEN
from tests.servers.real_server import CONTEXT_LENGTH, Backend, RealServer
from tests.servers.server_kit import Kit, largest_gap, tokens_made

pytestmark = pytest.mark.slow
EXACT = 1e-5
TURNS = (30, 600, 20)
"""Tokens of each answer: the update comes in the second."""
ATTEMPTS = 5


async def talks(row: dict[str, Any], client: Any, session: Any) -> float:
    messages: list[Any] = []
    for number, size in enumerate(TURNS):
        messages.append({"role": "user", "content": f"{row['question']} {number}"})
        result = await client.chat.completions.create(model="policy", messages=messages, max_tokens=size)
        messages.append(result.choices[0].message)
    return 1.0


@pytest.fixture(scope="module")
def backend() -> Backend:
    return "native"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return character_tokenizer(TOKENS, end="<|end|>", context_length=CONTEXT_LENGTH, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def models(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("old", "new")}
    for seed, folder in enumerate(folders.values()):
        tiny_model(tokenizer, seed, initializer_range=0.1).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREAL_SERVER_TOKEN", TOKEN)
        server = RealServer("native", models["old"], tmp_path_factory.mktemp("agents"))
        try:
            yield server.wait_ready()
        finally:
            server.kill_all()


@pytest.mark.parametrize("mode", ["interrupt", "keep", "keep_cache"])
async def test_each_token_of_a_dialogue_has_the_version_and_log_probability_of_its_policy(
    server: RealServer, kit: Kit, tokenizer: Any, models: dict[str, Path], mode: str
) -> None:
    fleet = await kit.fleet(server, weight_update=mode)
    gconfig = GenerationHyperparameters(
        n_samples=1, max_new_tokens=max(TURNS), max_tokens=CONTEXT_LENGTH, ignore_eos=True
    )
    workflow = AgentWorkflow(gconfig, tokenizer, agent=f"{__file__}:talks", agent_config=AgentConfig(inline=True))
    for attempt in range(ATTEMPTS):
        for name in ("old", "new"):
            update = WeightUpdate(version=fleet.version + 1, kind="disk", path=str(models[name]))
            if name == "new":
                made = fleet.status()["generated_tokens"]
                dialogue = asyncio.create_task(workflow.arun_episode(fleet, {"question": f"{mode} {attempt}"}))
                await tokens_made(fleet, made + TURNS[0] + 8)
            await fleet.update_weights(update)
        (row,) = (await dialogue).trajectories
        if check_row(row, update.version, models, on_old_keys=mode == "keep_cache"):
            await workflow.aclose()
            return
    pytest.fail(f"the update came after the second answer {ATTEMPTS} times")


def check_row(row: Trajectory, version: int, models: dict[str, Path], *, on_old_keys: bool) -> bool:
    """Whether both policies have tokens of the second answer."""
    turns, versions, ids = [*row.columns[TURN_NUMBERS]], [*row.output_versions], torch.tensor([[*row.token_ids]])
    spans = [(turns.index(turn), turns.index(turn) + size) for turn, size in enumerate(TURNS)]
    assert [sum(row.loss_mask[start:end]) for start, end in spans] == list(TURNS)
    start, end = spans[1]
    split = start + versions[start:end].count(version - 1)
    made = [version for version in versions if version >= 0]
    assert made == [version - 1] * (TURNS[0] + split - start) + [version] * (end - split + TURNS[2])
    policies = {name: Qwen2ForCausalLM.from_pretrained(folder).eval() for name, folder in models.items()}
    expected = {name: logprobs(policy, ids) for name, policy in policies.items()}
    expected["kept"] = after_keys_of(policies["old"], policies["new"], ids, split) if on_old_keys else expected["new"]
    parts = [("old", *spans[0]), ("old", start, split), ("kept", split, end), ("new", *spans[2])]
    for name, first, last in parts:
        if first < last:
            assert largest_gap(list(row.rollout_logprobs[first:last]), expected[name][first:last]) < EXACT
    if on_old_keys and start < split < end:
        assert largest_gap(expected["kept"][split:end], expected["new"][split:end]) > 100 * EXACT
    return start < split < end


@torch.no_grad()
def logprobs(policy: Any, ids: torch.Tensor, **options: Any) -> list[float]:
    """Of each token, given those before it; 0 for the first."""
    result = policy(ids, **options).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return [0.0, *result.tolist()]


def after_keys_of(old: Any, new: Any, ids: torch.Tensor, split: int) -> list[float]:
    """Of the new policy from token `split` on, where the old one has computed the tokens before its predecessor."""
    cache = DynamicCache()
    with torch.no_grad():
        old(ids[:, : split - 1], past_key_values=cache, use_cache=True)
    return [0.0] * (split - 1) + logprobs(new, ids[:, split - 1 :], past_key_values=cache, use_cache=True)
