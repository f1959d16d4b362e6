import itertools

import pytest

from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.workflow.rlvr import MultiTurnWorkflow
from tests.expect import raises_code

ROW = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
FIRST = "<s>user\n2+2?<e>\n<s>assistant\n"
RETRY = "<e>\n<s>user\nagain<e>\n<s>assistant\n"


@pytest.fixture
async def workflow_of(tokenizer):
    made = []

    def make(max_turns=3, turn_discount=0.5, n_samples=1, reward=None, **gconfig):
        gconfig = GenerationHyperparameters(n_samples=n_samples, **gconfig)
        reward_fn = "" if reward else "exact"
        options = {"reward": reward, "retry_message": "again"}
        made.append(MultiTurnWorkflow(reward_fn, gconfig, tokenizer, max_turns, turn_discount, **options))
        return made[-1]

    yield make
    for workflow in made:
        await workflow.aclose()


def trained_text(trajectory, tokenizer):
    return tokenizer.decode([t for t, m in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if m])


async def test_a_correct_first_answer_ends_the_dialogue(workflow_of, engine_of, tokenizer):
    group = await workflow_of().arun_episode(engine_of(["4<e>"]), ROW)
    (trajectory,) = group.trajectories
    assert tokenizer.decode(trajectory.token_ids) == FIRST + "4<e>"
    assert trajectory.reward == 1.0
    assert group.stats["num_turns"] == 1


async def test_wrong_answers_are_followed_by_a_retry_and_discounted(workflow_of, engine_of, tokenizer):
    engine = engine_of(["5<e>", "666", "4<e>"])
    group = await workflow_of().arun_episode(engine, ROW)
    (trajectory,) = group.trajectories
    # the first answer wrote its own end token, the second was cut and gets one that is not trained
    assert tokenizer.decode(trajectory.token_ids) == FIRST + "5" + RETRY + "666" + RETRY + "4<e>"
    assert trained_text(trajectory, tokenizer) == "5<e>6664<e>"
    assert trajectory.reward == 0.25
    assert trajectory.finished
    assert group.stats["num_turns"] == 3
    # each context extends the one before, token by token
    contexts = [request.input_ids for request in engine.requests]
    for earlier, later in itertools.pairwise(contexts):
        assert later[: len(earlier)] == earlier
    assert trajectory.token_ids[: len(contexts[2])] == contexts[2]
    assert len({request.group_id for request in engine.requests}) == 1
    assert len({request.request_id for request in engine.requests}) == 3
    for mask, logprob, version in zip(
        trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.output_versions, strict=True
    ):
        assert (logprob < 0, version) == ((True, 7) if mask else (False, -1))


async def test_a_dialogue_has_at_most_max_turns(workflow_of, engine_of):
    engine = engine_of(["5<e>"] * 9)
    group = await workflow_of(max_turns=2).arun_episode(engine, ROW)
    assert len(engine.requests) == 2
    assert group.trajectories[0].reward == 0.0


async def test_a_dialogue_stays_within_max_tokens(workflow_of, engine_of):
    limit = len(FIRST) - 4 + 10  # <s> and <e> are one token each
    engine = engine_of(["5<e>"] * 9)
    group = await workflow_of(max_tokens=limit).arun_episode(engine, ROW)
    assert len(engine.requests) == 1
    assert len(group.trajectories[0].token_ids) <= limit


async def test_each_sample_is_a_separate_dialogue(workflow_of, engine_of, tokenizer):
    engine = engine_of(["4<e>", "5<e>", "4<e>"])
    group = await workflow_of(n_samples=2).arun_episode(engine, ROW)
    assert [t.reward for t in group.trajectories] == [1.0, 0.5]
    assert len({r.request_id for r in engine.requests}) == 3


async def test_wrong_arguments_and_rows(workflow_of, engine_of):
    with raises_code("workflow.invalid_args", "max_turns=0"):
        workflow_of(max_turns=0)
    with raises_code("workflow.invalid_args", "turn_discount=1.5"):
        workflow_of(turn_discount=1.5)
    with raises_code("workflow.missing_column", "'messages'", "['prompt']"):
        await workflow_of().arun_episode(engine_of([]), {"prompt": "2+2="})


async def test_several_functions_score_the_last_attempt_and_the_filter_sees_its_part_discounted(workflow_of, engine_of):
    reward = RewardConfig(workers=1, by_source={"sums": {"exact": 1.0, "format": 8.0}}, filter_on=["exact"])
    engine = engine_of(["5<e>", "4<e>"])
    group = await workflow_of(reward=reward).arun_episode(engine, ROW | {"data_source": "sums"})
    assert [trajectory.reward for trajectory in group.trajectories] == [0.5]
    assert group.filter_rewards == [0.5]
    assert (group.stats["reward/exact"], group.stats["reward/format"], group.stats["num_turns"]) == (1.0, 0.0, 2.0)
    assert group.stats["reward_by_source/sums"] == 0.5
    with raises_code("reward.unknown_source", "row 0 ", "poems"):
        workflow_of(reward=reward).check_rows([ROW | {"data_source": "poems"}])


async def test_a_wrong_answer_with_a_format_reward_is_retried(workflow_of, engine_of, tmp_path):
    form = tmp_path / "form.py"
    form.write_text("def good_form(prompt, completion, prompt_ids, completion_ids, **row):\n    return 1.0\n")
    fns = {"exact": 1.0, f"{form}:good_form": 0.25}
    filtered = RewardConfig(workers=1, fns=fns, filter_on=["exact"])
    group = await workflow_of(reward=filtered).arun_episode(engine_of(["5<e>", "4<e>"]), ROW)
    assert group.stats["num_turns"] == 2.0
    assert [trajectory.reward for trajectory in group.trajectories] == [1.25 * 0.5]
    untold = RewardConfig(workers=1, fns=fns)
    group = await workflow_of(reward=untold).arun_episode(engine_of(["5<e>", "4<e>"]), ROW)
    assert group.stats["num_turns"] == 1.0  # nothing says which function decides: any reward is a success
