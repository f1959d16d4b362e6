"""A teacher on a real server: what it says of the student's tokens and its likeliest ones is what transformers says."""

from __future__ import annotations

import asyncio

import pytest
import torch

from areal.api.config import TeacherConfig, TeacherServersConfig
from areal.system.network import TEACHER_TOKEN, run_token
from areal.trainer.teacher_servers import TeacherServers, teacher_problem
from tests.servers.checkpoints import VOCAB_SIZE, build_model
from tests.servers.real_server import RealServer
from tests.servers.server_kit import PROMPT, TOLERANCE, VLLM_ONLY, largest_gap


@pytest.mark.parametrize("top_k", [0, 5, 20])
async def test_a_teacher_scores_the_tokens_of_the_student_as_transformers_does(
    server: RealServer, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    monkeypatch.setenv(TEACHER_TOKEN, run_token())
    options = TeacherServersConfig(server_addrs=[server.address], backend=server.backend)
    config = TeacherConfig(servers=[options], top_k=top_k, loss_coef=1.0)
    assert await asyncio.to_thread(teacher_problem, config) == ""
    generator, model = torch.Generator().manual_seed(3), build_model(1)
    answers = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 2, 17, 200) * 4]
    teacher = TeacherServers(options, config)
    try:
        scores = await asyncio.gather(*(teacher.scores([*PROMPT, *answer], len(PROMPT)) for answer in answers))
    finally:
        teacher.close()
    for answer, actual in zip(answers, scores, strict=True):
        ids = torch.tensor([[*PROMPT, *answer]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, len(PROMPT) - 1 : -1].double(), -1)
        assert largest_gap(actual.logprobs, logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].tolist()) < TOLERANCE
        assert [len(place) for place in actual.top] == ([top_k] * len(answer) if top_k else [])
        for place, expected in zip(actual.top, logprobs, strict=False):
            tokens = [token for token, _ in place]
            assert largest_gap([logprob for _, logprob in place], expected[tokens].tolist()) < TOLERANCE
            assert largest_gap([logprob for _, logprob in place], expected.topk(top_k).values.tolist()) < TOLERANCE
            assert len({*tokens}) == top_k


@VLLM_ONLY
async def test_more_tokens_than_vllm_was_started_for_are_refused_before_the_start(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TEACHER_TOKEN, run_token())
    options = TeacherServersConfig(server_addrs=[server.address], backend="vllm")
    problem = await asyncio.to_thread(teacher_problem, TeacherConfig(servers=[options], top_k=100, loss_coef=1.0))
    assert "100" in problem
    assert "64" in problem
