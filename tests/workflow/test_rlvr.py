import asyncio
import dataclasses
import math
from pathlib import Path

import pytest

from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.api.data import BASELINE, TEMPERATURES
from areal.api.engine import InferenceEngine
from areal.api.errors import InputError
from areal.data.pack import to_train_batch
from areal.ledger.payload import encode_episode, payload_head, to_table
from areal.rollout.executor import EpisodeEngine
from areal.rollout.train_batches import build_share, share_parts
from areal.workflow.registry import mixed_rewards
from areal.workflow.rlvr import RLVRWorkflow
from tests.expect import raises_code

LENGTH_REWARD = f"{Path(__file__).parent / 'reward_for_rlvr.py'}:length_reward"


@pytest.fixture
async def workflow_of(tokenizer):
    made = []

    def make(n_samples=1, *, reward_fn=LENGTH_REWARD, **options):
        gconfig = {
            key: options.pop(key) for key in ("max_tokens", "max_new_tokens", "temperature_key") if key in options
        }
        gconfig = GenerationHyperparameters(n_samples=n_samples, **gconfig)
        made.append(RLVRWorkflow(reward_fn, gconfig, tokenizer, **options))
        return made[-1]

    yield make
    for workflow in made:
        await workflow.aclose()


ROW = {"prompt": "2+2=", "prompts": []}


async def test_group_requests_run_concurrently_and_tokens_align(workflow_of, engine_of):
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


async def test_get_input_ids_fn_replaces_the_prompt(workflow_of, engine_of):
    engine = engine_of(["4<e>"])
    workflow = workflow_of(get_input_ids_fn=lambda row, tokenizer, thinking: tokenizer.encode(row["q"]))
    await workflow.arun_episode(engine, {"q": "7", "prompts": []})
    assert engine.requests[0].input_ids == [ord("7") + 3]


async def test_a_row_without_a_prompt_is_named(workflow_of, engine_of):
    with raises_code("data.missing_column", "['question']"):
        await workflow_of().arun_episode(engine_of([]), {"question": "?"})
    for row in ({"prompt": 5}, {"messages": "hello"}, {"prompt": ""}):
        with raises_code("data.invalid_column"):
            workflow_of().check_row(row)


async def test_prompt_and_answer_stay_within_max_tokens(workflow_of, engine_of):
    engine = engine_of(["x"])
    await workflow_of(max_tokens=6, max_new_tokens=5).arun_episode(engine, ROW)
    assert engine.requests[0].gconfig.max_new_tokens == 2
    with raises_code("workflow.prompt_too_long", "gconfig.max_tokens=4 "):
        await workflow_of(max_tokens=4).arun_episode(engine, ROW)


async def test_a_failing_reward_fails_the_episode_or_scores_zero(workflow_of, engine_of):
    with raises_code("workflow.reward_failed", "length_reward ", "ValueError: bad answer"):
        await workflow_of(2).arun_episode(engine_of(["4<e>", "bad<e>"]), ROW)
    lenient = workflow_of(2, reward=RewardConfig(on_error="zero", workers=1))
    group = await lenient.arun_episode(engine_of(["4<e>", "bad<e>"]), ROW)
    assert [t.reward for t in group.trajectories] == [41.0, 0.0]
    assert group.stats["reward_errors"] == 1


async def test_several_functions_make_the_reward_and_the_filter_sees_its_part(workflow_of, engine_of):
    reward = RewardConfig(workers=1, fns={LENGTH_REWARD: 1.0, "exact": 100.0}, filter_on=["exact"])
    group = await workflow_of(2, reward_fn="", reward=reward).arun_episode(
        engine_of(["4<e>", "44<e>"]), ROW | {"answer": 44}
    )
    assert [t.reward for t in group.trajectories] == [41.0, 142.0]
    assert group.filter_rewards == [0.0, 100.0]
    assert (group.stats["reward/length_reward"], group.stats["reward/exact"]) == (41.5, 0.5)
    assert not mixed_rewards(dataclasses.replace(group, filter_rewards=[100.0, 100.0]))
    assert mixed_rewards(group)


async def test_a_greedy_answer_is_the_baseline_and_no_sample(workflow_of, engine_of):
    engine = engine_of(["4<e>", "five", "greedy<e>"])
    workflow = workflow_of(2, greedy_baseline=True)
    group = await workflow.arun_episode(engine, ROW)
    assert [request.gconfig.greedy for request in engine.requests] == [False, False, True]
    assert engine.most_in_flight == 3
    assert len({request.group_id for request in engine.requests}) == 1
    assert [t.reward for t in group.trajectories] == [41.0, 44.0]
    assert [t.columns[BASELINE] for t in group.trajectories] == [46.0, 46.0]
    assert group.filter_rewards == [41.0, 44.0]
    assert (group.stats["reward"], group.stats["output_tokens"], group.stats["finished"]) == (42.5, 3.0, 0.5)
    assert (group.stats["greedy_reward"], group.stats["greedy_reward_errors"]) == (46.0, 0.0)

    evaluation = workflow.for_evaluation(GenerationHyperparameters(n_samples=4))
    plain = await evaluation.arun_episode(engine_of(["4<e>"]), ROW)
    assert BASELINE not in plain.trajectories[0].columns
    assert "greedy_reward" not in plain.stats


async def test_a_greedy_answer_whose_reward_fails_is_counted_apart(workflow_of, engine_of):
    reward = RewardConfig(on_error="zero", workers=1)
    workflow = workflow_of(1, greedy_baseline=True, reward=reward)
    group = await workflow.arun_episode(engine_of(["4<e>", "bad<e>"]), ROW)
    assert [(t.reward, t.columns[BASELINE]) for t in group.trajectories] == [(41.0, 0.0)]
    assert (group.stats["reward_errors"], group.stats["greedy_reward_errors"]) == (0.0, 1.0)
    with raises_code("workflow.reward_failed"):
        await workflow_of(1, greedy_baseline=True).arun_episode(engine_of(["4<e>", "bad<e>"]), ROW)


def test_every_row_is_checked_for_a_reward_function(workflow_of):
    workflow = workflow_of(reward_fn="", reward=RewardConfig(by_source={"a": {"exact": 1.0}}))
    rows = [{"prompt": "?", "data_source": source} for source in ("a", "a", "b")]
    workflow.check_rows(rows[:2])
    with pytest.raises(InputError, match=r"row 2 .*'b'") as unknown:
        workflow.check_rows(rows)
    with pytest.raises(InputError, match="'data_source'") as missing:
        workflow.check_row({"prompt": "?"})
    assert (unknown.value.code, missing.value.code) == ("reward.unknown_source", "reward.unknown_source")
    with raises_code("data.missing_column"):
        workflow.check_rows([{"data_source": "a"}])
    workflow.check_rows([])


async def test_one_failed_request_cancels_its_siblings(workflow_of):
    cancelled = []

    class Engine(InferenceEngine):
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


async def test_evaluation_uses_one_sample_and_the_same_pool(workflow_of, engine_of):
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


async def test_the_temperature_of_a_row_is_requested_recorded_with_its_tokens_and_reaches_the_trainer(
    workflow_of, engine_of
):
    workflow = workflow_of(2, temperature_key="heat")
    groups = []
    for answers, row in ((["4<e>", "5<e>"], ROW | {"heat": 0.5}), (["6<e>", "7<e>"], ROW), (["8<e>", "9"], ROW)):
        scripted = engine_of(answers)
        engine = EpisodeEngine(scripted, lambda answer: None, temperature=1.0)
        groups.append(await workflow.arun_episode(engine, row))
        assert {request.gconfig.temperature for request in scripted.requests} == {row.get("heat", 1.0)}
    columns = [group.trajectories[0].columns for group in groups]
    assert list(columns[0][TEMPERATURES]) == pytest.approx([math.nan] * 4 + [0.5] * 2, nan_ok=True)
    assert TEMPERATURES not in columns[1]
    payloads = [encode_episode(place, group).payload for place, group in enumerate(groups)]
    for place, payload in enumerate(payloads):
        assert to_table(place, payload).lengths.tolist() == [6, 6 if place < 2 else 5]
    (part,) = share_parts([payload_head(payload) for payload in payloads[:2]], 1)
    share = build_share(payloads[:2], part, step=0, version=0, mask_before=0)
    batch = to_train_batch(share)
    sampled = batch.loss_mask
    assert batch.columns[TEMPERATURES][sampled][:4].tolist() == [0.5] * 4
    assert batch.columns[TEMPERATURES][sampled][4:].isnan().all()
    assert batch.columns[TEMPERATURES][~sampled].isnan().all()
    (part,) = share_parts([payload_head(payload) for payload in payloads[1:]], 1)
    plain = build_share(payloads[1:], part, step=0, version=0, mask_before=0)
    assert TEMPERATURES not in to_train_batch(plain).columns


@pytest.mark.parametrize("value", ["hot", 0, -1.0, True, float("inf")])
def test_a_row_with_an_impossible_temperature_is_refused(workflow_of, value):
    with raises_code("data.invalid_column"):
        workflow_of(temperature_key="heat").check_row(ROW | {"heat": value})
