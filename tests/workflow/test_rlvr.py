import asyncio
from pathlib import Path

import pytest

from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.api.errors import InputError, RewardError
from areal.workflow.rlvr import RLVRWorkflow

LENGTH_REWARD = f"{Path(__file__).parent / 'reward_for_rlvr.py'}:length_reward"


@pytest.fixture
async def workflow_of(tokenizer):
    made = []

    def make(n_samples=1, *, reward_fn=LENGTH_REWARD, **options):
        gconfig = {key: options.pop(key) for key in ("max_tokens", "max_new_tokens") if key in options}
        gconfig = GenerationHyperparameters(n_samples=n_samples, **gconfig)
        made.append(RLVRWorkflow(reward_fn, gconfig, tokenizer, **options))
        return made[-1]

    yield make
    for workflow in made:
        await workflow.aclose()


ROW = {"prompt": "2+2=", "prompts": []}


async def test_a_group_is_asked_at_once_and_every_token_is_aligned(workflow_of, engine_of):
    engine = engine_of(["4<e>", "five", "<e>"])
    group = await workflow_of(3).arun_episode(engine, ROW)

    assert engine.most_in_flight == 3
    first, cut, empty = group.trajectories
    assert first.token_ids == [ord(c) + 3 for c in "2+2=4"] + [1]
    assert first.loss_mask == [0, 0, 0, 0, 1, 1]
    assert first.rollout_logprobs == [0, 0, 0, 0, -0.5, -1.5]
    assert first.output_versions == [-1, -1, -1, -1, 7, 7]
    assert [t.reward for t in group.trajectories] == [41.0, 44.0, 40.0]
    assert (first.finished, cut.finished, empty.finished) == (True, False, True)
    assert group.stats["reward"] == pytest.approx(125 / 3)
    assert group.stats["reward_errors"] == 0
    assert group.stats["output_tokens"] == pytest.approx((2 + 4 + 1) / 3)
    assert group.stats["finished"] == pytest.approx(2 / 3)


async def test_requests_of_a_group_share_its_id_and_differ_in_their_own(workflow_of, engine_of):
    engine = engine_of(["a<e>"] * 4)
    workflow = workflow_of(2)
    await workflow.arun_episode(engine, ROW)
    await workflow.arun_episode(engine, ROW)
    ids = [request.request_id for request in engine.requests]
    assert len(set(ids)) == 4
    assert len({len(i) for i in ids}) == 1
    assert len({request.group_id for request in engine.requests}) == 2
    assert engine.requests[0].gconfig.n_samples == 1
    assert engine.requests[0].gconfig.stop_token_ids == [1, 0]


async def test_messages_go_through_the_chat_template(workflow_of, engine_of, tokenizer):
    engine = engine_of(["4<e>"])
    row = {"messages": [{"role": "user", "content": "2+2?"}], "prompts": []}
    group = await workflow_of(enable_thinking=True).arun_episode(engine, row)
    assert tokenizer.decode(engine.requests[0].input_ids) == "<s>user\n2+2?<e>\n<s>assistant\n(think)"
    assert group.trajectories[0].reward == 1 + 10 * len(engine.requests[0].input_ids) + 1000


async def test_own_prompt_ids(workflow_of, engine_of):
    engine = engine_of(["4<e>"])
    workflow = workflow_of(get_input_ids_fn=lambda row, tokenizer, thinking: tokenizer.encode(row["q"]))
    await workflow.arun_episode(engine, {"q": "7", "prompts": []})
    assert engine.requests[0].input_ids == [ord("7") + 3]


async def test_a_row_without_a_prompt_is_named(workflow_of, engine_of):
    with pytest.raises(InputError, match=r"neither a column 'messages' nor 'prompt', only \['question'\]"):
        await workflow_of().arun_episode(engine_of([]), {"question": "?"})
    with pytest.raises(InputError, match="must be text, and holds 5"):
        workflow_of().check_row({"prompt": 5})
    with pytest.raises(InputError, match="must be a list of"):
        workflow_of().check_row({"messages": "hello"})
    with pytest.raises(InputError, match="is empty"):
        workflow_of().check_row({"prompt": ""})


async def test_prompt_and_answer_stay_within_max_tokens(workflow_of, engine_of):
    engine = engine_of(["x"])
    await workflow_of(max_tokens=6, max_new_tokens=5).arun_episode(engine, ROW)
    assert engine.requests[0].gconfig.max_new_tokens == 2
    with pytest.raises(InputError, match="4 tokens, and gconfig"):
        await workflow_of(max_tokens=4).arun_episode(engine, ROW)


async def test_a_failing_reward_fails_the_episode_or_scores_zero(workflow_of, engine_of):
    with pytest.raises(RewardError, match="length_reward raised ValueError: bad answer"):
        await workflow_of(2).arun_episode(engine_of(["4<e>", "bad<e>"]), ROW)
    lenient = workflow_of(2, reward=RewardConfig(on_error="zero", workers=1))
    group = await lenient.arun_episode(engine_of(["4<e>", "bad<e>"]), ROW)
    assert [t.reward for t in group.trajectories] == [41.0, 0.0]
    assert group.stats["reward_errors"] == 1


async def test_one_failed_request_cancels_its_siblings(workflow_of):
    cancelled = []

    class Engine:
        version = 0

        async def agenerate(self, request):
            if request.request_id.endswith("1"):
                raise ConnectionError("gone")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(request.request_id)
                raise

    with pytest.raises(ConnectionError):
        await workflow_of(3).arun_episode(Engine(), ROW)
    assert len(cancelled) == 2


async def test_evaluation_asks_once_and_shares_the_pool(workflow_of, engine_of):
    workflow = workflow_of(4)
    evaluation = workflow.for_evaluation(GenerationHyperparameters(n_samples=4, greedy=True))
    engine = engine_of(["a<e>", "b<e>"])
    group = await evaluation.arun_episode(engine, ROW)
    assert len(group.trajectories) == 1
    assert engine.requests[0].gconfig.greedy
    await evaluation.aclose()
    await evaluation.arun_episode(engine, ROW)  # the pool belongs to the training workflow


def test_no_process_is_started_before_the_first_answer(tokenizer):
    workflow = RLVRWorkflow("exact", GenerationHyperparameters(), tokenizer)
    assert workflow._scorer._pool is None
