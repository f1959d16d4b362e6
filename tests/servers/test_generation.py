"""Real servers answer as our own would: the trainer's log-probabilities, exact limits, the sampling asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from areal.api.errors import RequestError
from tests.expect import raises_code
from tests.fleet.generation_parts import Chunks
from tests.servers.checkpoints import CHARACTERS, EOS, VOCAB_SIZE, Scorer, build_model, token_id
from tests.servers.real_server import CONTEXT_LENGTH, RealServer
from tests.servers.server_kit import PROMPT, SGLANG_ONLY, TOLERANCE, VLLM_ONLY, Kit, a_request, gap

VOWELS = {token_id(character) for character in "aeiou"}
PROMPTS = [[token_id(c) for c in text] for text in ("a", "12+34=", "abc, def. GHI; jkl: mno", "0" * 60)]


@pytest.fixture(scope="module")
def greedy() -> list[int]:
    """The likeliest token after PROMPT, again and again, by transformers' own model."""
    model, tokens = build_model(1), list(PROMPT)
    with torch.no_grad():
        while len(tokens) < len(PROMPT) + 120:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


async def test_greedy_answers_are_those_of_transformers(
    server: RealServer, kit: Kit, old: Scorer, greedy: list[int]
) -> None:
    fleet = await kit.fleet(server)
    response = await fleet.agenerate(a_request(120, greedy=True))
    assert response.output_ids == greedy
    assert gap(response, old) < TOLERANCE
    assert response.output_versions == [0] * 120
    assert response.stop_reason == "length"


SAMPLING = {"plain": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.5}}
ADJUSTED = {
    "frequency": {"frequency_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.4},
    "min tokens": {"min_new_tokens": 30, "ignore_eos": False, "stop_token_ids": sorted(VOWELS)},
}


async def check_sampling(kit: Kit, server: RealServer, old: Scorer, sampling: dict[str, Any]) -> None:
    """Many at once, so that the server batches them."""
    fleet = await kit.fleet(server)
    requests = [a_request(length, prompt=prompt, **sampling) for prompt in PROMPTS for length in (30, 60)]
    responses = await asyncio.gather(*(fleet.agenerate(request) for request in requests))
    for request, response in zip(requests, responses, strict=True):
        assert gap(response, old) < TOLERANCE
        if "min_new_tokens" in sampling:
            assert len(response.output_ids) >= 30
            assert not VOWELS & set(response.output_ids[:29])
        else:
            assert len(response.output_ids) == request.gconfig.max_new_tokens
        assert response.output_versions == [0] * len(response.output_ids)
    assert len({tuple(response.output_ids) for response in responses}) == len(responses)


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
async def test_sampled_answers_have_the_log_probabilities_of_the_trainer(
    server: RealServer, kit: Kit, old: Scorer, sampling: dict[str, Any]
) -> None:
    await check_sampling(kit, server, old, sampling)


@VLLM_ONLY
@pytest.mark.parametrize("sampling", ADJUSTED.values(), ids=ADJUSTED)
async def test_adjusted_logits_leave_the_log_probabilities_alone(
    server: RealServer, kit: Kit, old: Scorer, sampling: dict[str, Any]
) -> None:
    await check_sampling(kit, server, old, sampling)


@SGLANG_ONLY
@pytest.mark.parametrize("sampling", ADJUSTED.values(), ids=ADJUSTED)
async def test_what_would_change_the_log_probabilities_is_refused(
    server: RealServer, kit: Kit, sampling: dict[str, Any]
) -> None:
    fleet = await kit.fleet(server)
    with raises_code("server.unsupported_sampling"):
        await fleet.agenerate(a_request(30, **sampling))


async def test_top_k_is_obeyed(server: RealServer, kit: Kit) -> None:
    fleet = await kit.fleet(server)
    narrow = await fleet.agenerate(a_request(100, top_k=2))
    with torch.no_grad():
        logits = build_model(1)(torch.tensor([PROMPT + narrow.output_ids])).logits[0, len(PROMPT) - 1 : -1]
    best = logits.topk(2).indices.tolist()
    assert all(token in pair for token, pair in zip(narrow.output_ids, best, strict=True))
    assert any(token != pair[0] for token, pair in zip(narrow.output_ids, best, strict=True))


@VLLM_ONLY
async def test_penalties_are_obeyed(server: RealServer, kit: Kit, greedy: list[int]) -> None:
    fleet = await kit.fleet(server)
    for penalty in ({"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}):
        varied = await fleet.agenerate(a_request(60, greedy=True, **penalty))
        assert len(set(varied.output_ids)) > len(set(greedy[:60]))


async def test_tokens_come_in_chunks_while_they_are_made(server: RealServer, kit: Kit, greedy: list[int]) -> None:
    replica = kit.replica(server)
    chunks = await Chunks().collect(replica, a_request(60, greedy=True), 8)
    assert chunks.ids == greedy[:60]
    assert len(chunks) >= 5
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    whole = await Chunks().collect(replica, a_request(60, greedy=True), 60)
    assert [chunk.token_ids for chunk in whole] == [greedy[:60]]


def first_new(tokens: list[int], start: int) -> int:
    """The first place from `start` on whose token has not come before."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


async def test_stop_tokens_end_an_answer(server: RealServer, kit: Kit, greedy: list[int]) -> None:
    fleet = await kit.fleet(server)
    place = first_new(greedy, 5)
    stop = {"greedy": True, "ignore_eos": False, "stop_token_ids": [greedy[place]]}
    response = await fleet.agenerate(a_request(60, **stop))
    assert response.output_ids == greedy[: place + 1]
    assert response.stop_reason == "stop"
    if kit.backend == "vllm":
        longer = await fleet.agenerate(a_request(60, **stop, min_new_tokens=place + 5))
        assert len(longer.output_ids) >= place + 5
        assert longer.output_ids[:place] == greedy[:place]
        assert greedy[place] not in longer.output_ids[: place + 4]
    ignored = await fleet.agenerate(a_request(60, **(stop | {"ignore_eos": True})))
    assert ignored.output_ids == greedy[:60]


async def test_a_stop_string_ends_an_answer(server: RealServer, kit: Kit, greedy: list[int]) -> None:
    """Of two characters, which are two tokens here."""
    fleet = await kit.fleet(server)
    text = [CHARACTERS[token - 3] if token >= 3 else "\0" for token in greedy]
    place = next(
        i for i in range(6, 60) if "\0" not in text[i : i + 2] and i == "".join(text).find("".join(text[i : i + 2]))
    )
    response = await fleet.agenerate(
        a_request(100, greedy=True, ignore_eos=False, stop=["".join(text[place : place + 2])])
    )
    assert response.output_ids == greedy[: place + 2]
    assert response.stop_reason == "stop"


async def test_the_end_token_of_the_model_ends_an_answer(server: RealServer, kit: Kit) -> None:
    fleet = await kit.fleet(server)
    requests = [a_request(900, ignore_eos=False, stop_token_ids=[EOS]) for _ in range(4)]
    ended = [r for r in await asyncio.gather(*map(fleet.agenerate, requests)) if r.stop_reason == "stop"]
    assert ended  # with one token in 75 it would be a wonder if none came
    for response in ended:
        assert response.output_ids[-1] == EOS
        assert EOS not in response.output_ids[:-1]


async def test_answers_differ_unless_they_have_the_same_seed(server: RealServer, kit: Kit) -> None:
    """SGLang follows seeds on GPUs only, so it refuses them here."""
    fleet = await kit.fleet(server)
    drawn = [r.output_ids for r in await asyncio.gather(*(fleet.agenerate(a_request(40)) for _ in range(4)))]
    assert len(set(map(tuple, drawn))) == 4
    if kit.backend == "sglang":
        with raises_code("server.unsupported_sampling", "seed"):
            await fleet.agenerate(a_request(40, seed=1))
        return
    first, same, other = [(await fleet.agenerate(a_request(40, seed=seed))).output_ids for seed in (1, 1, 2)]
    assert first == same != other


BAD_REQUESTS = {
    "prompt id": {"prompt": [5, VOCAB_SIZE]},
    "stop id": {"stop_token_ids": [VOCAB_SIZE + 7], "ignore_eos": False},
    "too long": {"num_tokens": CONTEXT_LENGTH},
}


@pytest.mark.parametrize("bad", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
async def test_what_would_kill_the_server_is_refused_before(
    server: RealServer, kit: Kit, bad: dict[str, object]
) -> None:
    fleet = await kit.fleet(server)
    with pytest.raises(RequestError):
        await fleet.agenerate(a_request(**({"num_tokens": 8} | bad)))  # type: ignore[arg-type]
    assert len((await fleet.agenerate(a_request(8))).output_ids) == 8
    assert fleet.status()["replicas"][0]["failures"] == 0
