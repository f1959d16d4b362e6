"""A reward model scores rollouts: the score of the whole sequence joins the reward, in its own tokens if need be."""

import itertools

import torch

from areal.api.batch import TokenOutputs
from areal.api.config import RewardModelConfig
from areal.api.metrics import metric_values
from areal.trainer.reward_model import RewardModel, recoded, recoder
from tests.expect import raises_code


class SumOfTokens:
    """Scores a position by the sum of the ids of its sequence so far; notes what it was asked."""

    def __init__(self):
        self.asked = []

    def forward(self, batch):
        self.asked.append(batch)
        scores, bounds = torch.zeros(batch.num_tokens), batch.cu_seqlens.tolist()
        for start, end in itertools.pairwise(bounds):
            scores[start:end] = batch.input_ids[start:end].cumsum(0).float()
        return TokenOutputs(scores=scores)


class Letters:
    """Token 1 is `a`, 2 is `b` ...; 0 is special."""

    def __init__(self, offset=0):
        self.offset = offset

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(chr(96 + t) for t in token_ids if t or not skip_special_tokens)

    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) - 96 + self.offset for c in text]


def config(**options):
    return RewardModelConfig(**{"path": "x"} | options)


def test_the_score_of_the_last_token_is_added_by_hand(toolbox):
    # 1 + 0.5 * (1 + 2 + 3) = 4; 0 + 0.5 * (4 + 5) = 4.5
    batch = toolbox.make_batch([[1, 2, 3], [4, 5]], rewards=[1.0, 0.0])
    result, metrics = RewardModel(SumOfTokens(), config(weight=0.5)).with_scores(batch)
    assert result.rewards.tolist() == [4.0, 4.5]
    values = metric_values(metrics)
    assert values["reward_model/score"] == 7.5
    assert values["reward_model/score_max"] == 9
    assert values["reward_model/function_reward"] == 0.5
    assert batch.rewards.tolist() == [1.0, 0.0]


def test_answers_are_read_in_the_tokens_of_the_reward_model(toolbox):
    batch = toolbox.make_batch([[1, 2, 0], [3, 0]], rewards=[0.0, 0.0])
    engine = SumOfTokens()
    reward_model = RewardModel(engine, config(tokenizer_path="own"), recode=recoder(Letters(), Letters(offset=10)))
    result, _ = reward_model.with_scores(batch)
    assert engine.asked[0].input_ids.tolist() == [11, 12, 13]
    assert engine.asked[0].sequence_lengths == [2, 1]
    assert result.rewards.tolist() == [23.0, 13.0]


def test_a_share_without_sequences(toolbox):
    nothing = toolbox.select(toolbox.make_batch([[1, 2]], rewards=[1.0]), [])
    for recode in (None, recoder(Letters(), Letters())):
        result, metrics = RewardModel(SumOfTokens(), config(), recode=recode).with_scores(nothing)
        assert result.rewards.tolist() == []
        assert set(metrics) == {f"reward_model/{n}" for n in ("score", "score_max", "score_min", "function_reward")}


def test_the_recoded_batch_holds_one_row_a_sequence(toolbox):
    batch = recoded(toolbox.make_batch([[1, 2], [3, 4, 5]]), lambda ids: ids[::-1])
    assert batch.input_ids.tolist() == [2, 1, 5, 4, 3]
    assert not batch.loss_mask.any()


def test_another_head_is_refused(toolbox):
    with raises_code("training.stage_missing", "scores"):
        RewardModel(toolbox.TableEngine(), config()).with_scores(toolbox.make_batch([[1, 2]], rewards=[1.0]))
