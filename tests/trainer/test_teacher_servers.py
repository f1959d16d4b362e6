"""Teachers on servers: what they are asked, what their answers become, and what happens when they do not answer."""

import asyncio
import math
import socket
from dataclasses import replace

import orjson
import pytest
from aiohttp import web

from areal.api.config import TeacherConfig, TeacherServersConfig
from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.workflow import RolloutWorkflow
from areal.data.tiny_model import character_tokenizer
from areal.data.tokenizer import load_tokenizer
from areal.fleet.native import NATIVE
from areal.fleet.sglang import SGLANG
from areal.fleet.vllm import VLLM
from areal.trainer.teacher_servers import (
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_TOP,
    TaughtWorkflow,
    TeacherServers,
    teacher_problem,
)
from tests.expect import raises_code

LETTERS = ["<pad>", "<eos>", "<unk>", *"abcd ", "ab", "cd"]
POLICY = ["<pad>", "<eos>", "<unk>", *"abcd "]


class Teacher:
    """A native server whose log-probability of token t is -t / 8. It fails as often as `failures` says."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.failures: list[int] = []
        self.has_top = True

    async def answer(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.asked.append(body)
        if self.failures:
            return web.json_response({"error": {"message": "no", "code": "x"}}, status=self.failures.pop(0))
        ids = body["input_ids"]
        places = [(None if place == 0 else -token / 8, token, None) for place, token in enumerate(ids)]
        meta = {"input_token_logprobs": places[body["logprob_start_len"] :]}
        if (k := body["top_logprobs_num"]) and self.has_top:
            top = [[(-number / 4, number, None) for number in range(k)] for _ in ids]
            meta["input_top_logprobs"] = top[body["logprob_start_len"] :]
        return web.json_response({"meta_info": meta})


class Episodes(RolloutWorkflow):
    """Ends at once with given trajectories."""

    def __init__(self, *trajectories: Trajectory, rejected: str = "") -> None:
        self.group = TrajectoryGroup(trajectories=list(trajectories), rejected=rejected)

    async def arun_episode(self, engine, data):
        return self.group


@pytest.fixture
async def teacher():
    made = Teacher()
    app = web.Application()
    app.router.add_post("/generate", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.address = f"127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


def trajectory(ids: list[int], mask: list[int]) -> Trajectory:
    return Trajectory(
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=[0.0] * len(ids),
        output_versions=[0 if trained else -1 for trained in mask],
        reward=1.0,
        finished=True,
    )


def config(*addresses: str, sources=(), tokenizer_path="", **options) -> TeacherConfig:
    servers = TeacherServersConfig(server_addrs=list(addresses), sources=list(sources), tokenizer_path=tokenizer_path)
    return TeacherConfig(servers=[servers], **options)


def test_vllm_answers_have_ranks():
    body = VLLM.scoring.body([5, 6, 7], 1, 2)
    assert body == {"prompt": [5, 6, 7], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2}
    places = [
        None,
        {"6": {"logprob": -3.0, "rank": 9}, "1": {"logprob": -0.5, "rank": 1}, "2": {"logprob": -1.0, "rank": 2}},
        {"7": {"logprob": -0.25, "rank": 1}, "3": {"logprob": -2.0, "rank": 2}},
    ]
    scores = VLLM.scoring.parse({"choices": [{"prompt_logprobs": places}]}, [5, 6, 7], 1, 2)
    assert scores.logprobs == [-3.0, -0.25]
    assert scores.top == [[(1, -0.5), (2, -1.0)], [(7, -0.25), (3, -2.0)]]


def test_sglang_begins_with_a_token_that_has_no_log_probability():
    body = SGLANG.scoring.body([5, 6, 7], 1, 1)
    assert (body["logprob_start_len"], body["top_logprobs_num"]) == (0, 1)
    meta = {
        "input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]],
        "input_top_logprobs": [None, [[-0.5, 8, None]], [[-0.25, 9, None]]],
    }
    scores = SGLANG.scoring.parse({"meta_info": meta}, [5, 6, 7], 1, 1)
    assert scores.logprobs == [-1.0, -2.0]
    assert scores.top == [[(8, -0.5)], [(9, -0.25)]]


@pytest.mark.parametrize("values", [[-1.0], [-1.0, None], [-1.0, math.nan]])
def test_an_answer_without_a_number_for_each_token_is_refused(values):
    meta = {"input_token_logprobs": [[value, 0, None] for value in values]}
    with pytest.raises((ValueError, TypeError)):
        NATIVE.scoring.parse({"meta_info": meta}, [5, 6, 7], 1, 0)


async def test_trained_tokens_get_the_scores_of_the_teacher(teacher):
    row = trajectory([8, 16, 24, 32, 40], [0, 1, 1, 0, 1])
    workflow = TaughtWorkflow(Episodes(row), config(teacher.address, top_k=2, loss_coef=1.0), None)
    group = await workflow.arun_episode(None, {})
    columns = group.trajectories[0].columns
    assert columns[TEACHER_LOGPROBS].tolist() == [0.0, -2.0, -3.0, 0.0, -5.0]
    assert columns[TEACHER_IDS].tolist() == [[0, 0], [0, 1], [0, 1], [0, 0], [0, 1]]
    assert columns[TEACHER_TOP].tolist() == [[0, 0], [0, -0.25], [0, -0.25], [0, 0], [0, -0.25]]
    assert [body["logprob_start_len"] for body in teacher.asked] == [0]
    await workflow.aclose()


async def test_a_rejected_episode_asks_no_teacher(teacher):
    workflow = TaughtWorkflow(Episodes(trajectory([1, 2], [0, 1]), rejected="x"), config(teacher.address), None)
    assert (await workflow.arun_episode(None, {})).rejected == "x"
    assert teacher.asked == []


async def test_a_row_is_taught_by_the_teacher_of_its_source(teacher):
    chosen = config(teacher.address, sources=["math"])
    workflow = TaughtWorkflow(Episodes(trajectory([1, 2], [0, 1])), chosen, None)
    await workflow.arun_episode(None, {"data_source": "math"})
    with raises_code("teacher.none", "'code'"):
        await workflow.arun_episode(None, {"data_source": "code"})
    await workflow.aclose()


async def test_a_request_is_repeated_until_a_server_answers(teacher, monkeypatch):
    monkeypatch.setattr("areal.trainer.teacher_servers._FIRST_PAUSE_S", 0.0)
    teacher.failures = [503, 500]
    workflow = TaughtWorkflow(Episodes(trajectory([1, 8], [0, 1])), config(teacher.address), None)
    [scored] = (await workflow.arun_episode(None, {})).trajectories
    assert scored.columns[TEACHER_LOGPROBS].tolist() == [0.0, -1.0]
    teacher.failures = [400]
    with raises_code("server.request_refused"):
        await workflow.arun_episode(None, {})
    assert len(teacher.asked) == 4
    await workflow.aclose()


async def test_an_answer_of_another_form_fails_the_episode_at_once(teacher):
    wrong = config(teacher.address, top_k=2, loss_coef=1.0)
    workflow = TaughtWorkflow(Episodes(trajectory([1, 8], [0, 1])), wrong, None)
    teacher.has_top = False
    with raises_code("server.unreadable_answer"):
        await workflow.arun_episode(None, {})
    assert len(teacher.asked) == 1
    await workflow.aclose()


async def test_a_server_that_hangs_does_not_hold_up_the_other_one(teacher):
    with socket.create_server(("127.0.0.1", 0)) as hung:  # it takes connections and never answers
        address = f"127.0.0.1:{hung.getsockname()[1]}"
        both = config(address, teacher.address, server_timeout_s=4.0)
        servers = TeacherServers(both.servers[0], both)
        result = await asyncio.gather(*(servers.scores([1, 8], 1) for _ in range(200)))
        assert [scores.logprobs for scores in result] == [[-1.0]] * 200
        servers.close()
        assert "did not answer" in await asyncio.to_thread(teacher_problem, config(address, server_timeout_s=0.1))


async def test_a_teacher_that_never_answers_fails_the_episode():
    workflow = TaughtWorkflow(Episodes(trajectory([1, 8], [0, 1])), config("127.0.0.1:9", server_timeout_s=0.05), None)
    with raises_code("teacher.unavailable", "server_timeout_s"):
        await workflow.arun_episode(None, {})


def test_a_teacher_is_asked_before_the_start():
    assert "did not answer" in teacher_problem(config("127.0.0.1:9"))


async def test_a_teacher_with_other_tokens_is_compared_by_spans(teacher, tmp_path):
    # policy: "ab cda" as letters and its end token; teacher: ab, space, cd, a, end
    theirs, ours = character_tokenizer(LETTERS), character_tokenizer(POLICY)
    theirs.save_pretrained(tmp_path)
    answer = [*ours.encode("ab cda"), 1]
    prompt = ours.encode("dd")
    row = trajectory(prompt + answer, [0, 0] + [1] * 7)
    workflow = TaughtWorkflow(Episodes(row), config(teacher.address, tokenizer_path=str(tmp_path)), ours)
    [scored] = (await workflow.arun_episode(None, {"prompt": "d"})).trajectories
    ids = {token: load_tokenizer(tmp_path).convert_tokens_to_ids(token) for token in LETTERS}
    assert teacher.asked[0]["input_ids"] == [ids[token] for token in ("d", "ab", " ", "cd", "a", "<eos>")]
    of = {token: -number / 8 for token, number in ids.items()}
    expected = [of["ab"] / 2] * 2 + [of[" "]] + [of["cd"] / 2] * 2 + [of["a"], of["<eos>"]]
    assert scored.columns[TEACHER_LOGPROBS].tolist() == pytest.approx([0.0, 0.0, *expected])
    silent = trajectory([3, 0], [0, 1])  # the answer is a token without text, which ended it
    [unscored] = (
        await TaughtWorkflow(Episodes(silent), workflow._config, ours).arun_episode(None, {"prompt": "d"})
    ).trajectories
    assert unscored.columns[TEACHER_LOGPROBS].tolist() == [0.0, of["<eos>"]]
    unended = replace(trajectory([3, 0, 0], [0, 1, 1]), rollout_logprobs=[0.0, -0.5, -2.0])
    [local] = (
        await TaughtWorkflow(Episodes(unended), workflow._config, ours).arun_episode(None, {"prompt": "d"})
    ).trajectories
    assert local.columns[TEACHER_LOGPROBS].tolist() == [0.0, -0.5, of["<eos>"]]
    several = TaughtWorkflow(
        Episodes(trajectory([3, 4, 5], [1, 0, 1])), config(teacher.address, tokenizer_path=str(tmp_path)), ours
    )
    with raises_code("teacher.several_answers"):
        await several.arun_episode(None, {"prompt": "d"})
    await workflow.aclose()
