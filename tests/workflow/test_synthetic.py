"""Synthetic episodes of a benchmark."""

from areal.api.config import GenerationHyperparameters
from areal.workflow.synthetic import SyntheticWorkflow


async def test_answers_have_the_drawn_lengths_and_do_not_end_early(tokenizer, engine_of):
    gconfig = GenerationHyperparameters(n_samples=3, stop_token_ids=[1], temperature=0.5)
    workflow = SyntheticWorkflow(gconfig, tokenizer, length="uniform(2,9)", prompt_length=5)
    engines = [engine_of(["abc"] * 3) for _ in range(3)]
    groups = [await workflow.arun_episode(engine, {"index": k}) for engine, k in zip(engines, (4, 4, 5), strict=True)]
    requests = [[(item.input_ids, item.gconfig.max_new_tokens) for item in engine.requests] for engine in engines]
    assert requests[0] == requests[1] != requests[2]
    for prompt_ids, length in requests[0]:
        assert len(prompt_ids) == 5
        assert 2 <= length <= 9
    for request in engines[0].requests:
        assert request.gconfig.ignore_eos
        assert request.gconfig.stop_token_ids == []
        assert request.gconfig.temperature == 0.5
    rewards = [[trajectory.reward for trajectory in group.trajectories] for group in groups]
    assert rewards[0] == rewards[1]
    assert {*rewards[0], *rewards[2]} <= {0.0, 1.0}
    assert [sum(each.loss_mask) for each in groups[0].trajectories] == [3, 3, 3]
