"""Every advantage estimator through the whole stage: against loops in Python floats, on any number of ranks."""

import math
import random
from dataclasses import replace

import pytest
import torch

from areal.api.config import NormConfig, PPOActorConfig
from areal.api.config.schema import options_without_effect
from areal.api.data import BASELINE, reward_part
from areal.api.registry import entries
from areal.trainer.actor import PPOActor
from tests.expect import raises_code

EPS = 1e-5
DISCOUNT = 0.9


def config(**options):
    return PPOActorConfig(**{"path": "table", "kl_ctl": 0.0} | options)


def sequences_of(batch):
    """Per sequence: reward, group, greedy reward, positions of its trained tokens."""
    result = []
    for s in range(batch.num_sequences):
        places = [t for t in range(batch.num_tokens) if batch.sequence_index[t] == s and batch.loss_mask[t]]
        result.append((float(batch.rewards[s]), int(batch.group_ids[s]), float(batch.columns[BASELINE][s]), places))
    return result


def mean(values):
    return sum(values) / len(values)


def unbiased_std(values):
    centre = mean(values)
    return math.sqrt(sum((x - centre) ** 2 for x in values) / max(len(values) - 1, 1))


def divided(x, std):
    return x if std == 0 else x / (std + EPS)


def slow_sequence_advantage(name, s, rows):
    """What the paper of each estimator puts in place of the reward of sequence s."""
    reward, group, greedy, _ = rows[s]
    members = [row for row in rows if row[1] == group]
    rewards = [row[0] for row in members]
    centred = reward - mean(rewards)
    if name in ("reinforce", "reinforce_plus_plus"):
        return reward
    if name in ("reinforce_plus_plus_baseline", "dr_grpo"):
        return centred
    if name == "grpo":
        return divided(centred, unbiased_std(rewards))
    if name == "rloo":
        others = len(rewards) - 1
        return reward - ((sum(rewards) - reward) / others if others else 0.0)
    if name == "lite_ppo":
        return divided(centred, unbiased_std([row[0] for row in rows]))
    if name == "gpg":
        valid = [row for row in rows if len({other[0] for other in rows if other[1] == row[1]}) > 1]
        return centred * (len(rows) / len(valid) if valid else 1.0)
    if name == "opo":
        total = sum(len(row[3]) for row in members)
        return reward - (sum(len(row[3]) * row[0] for row in members) / total if total else 0.0)
    if name == "gdpo":  # one reward function, whitened below
        return divided(centred, unbiased_std(rewards))
    if name == "grpo_passk":
        ordered = sorted(rewards, reverse=True)
        return ordered[0] - ordered[1] if len(ordered) > 1 and reward == ordered[0] else 0.0
    assert name == "remax", name
    return reward - greedy


def slow_advantages(name, batch):
    rows = sequences_of(batch)
    result = [0.0] * batch.num_tokens
    for s, (_, _, _, places) in enumerate(rows):
        value = slow_sequence_advantage(name, s, rows)
        for distance, t in enumerate(reversed(places)):
            result[t] = value * DISCOUNT**distance
    if name.startswith("reinforce_plus_plus") or name == "gdpo":
        trained = [result[t] for row in rows for t in row[3]]
        centre, std = mean(trained), unbiased_std(trained)
        for row in rows:
            for t in row[3]:
                result[t] = divided(result[t] - centre, std)
    return result


def make_case(toolbox, seed, size=11):
    """Unequal, interleaved groups of answers of unequal lengths; some groups have one reward, one has one answer."""
    rng = random.Random(seed)
    lengths = [rng.randint(2, 6) for _ in range(size)]
    sequences = [[rng.randrange(6) for _ in range(length)] for length in lengths]
    ids = [rng.choice([2, 2, 9, 9, 9, 30]) for _ in range(size - 1)] + [77]
    rewards = [rng.choice([0.0, 1.0, 1.0, -0.5]) for _ in range(size)]
    batch = toolbox.make_batch(sequences, rewards=rewards, group_ids=ids)
    greedy = torch.tensor([{2: 0.5, 9: 1.0, 30: 0.0, 77: -0.5}[g] for g in ids])
    return batch.with_column(BASELINE, greedy)


TOKEN_BASELINES = ("otb", "otb_tir")
NAMED = [name for name in entries("estimators") if name not in ("gae", "custom")]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [name for name in NAMED if name not in TOKEN_BASELINES])
def test_every_estimator_equals_its_formula(toolbox, name, seed):
    batch = make_case(toolbox, seed)
    actor = PPOActor(toolbox.TableEngine(), config(adv_estimator=name, discount=DISCOUNT))
    assert actor.with_advantages(batch).advantages.tolist() == pytest.approx(slow_advantages(name, batch), abs=2e-6)


@pytest.mark.parametrize("name", NAMED)
def test_ranks_share_their_statistics(toolbox, name):
    """Groups are whole on a rank; one rank has nothing."""
    batch = make_case(toolbox, 9)
    ids = batch.group_ids.tolist()
    shares = [[s for s, g in enumerate(ids) if g in (2, 77)], [], [s for s, g in enumerate(ids) if g in (9, 30)]]
    group = toolbox.RankGroup(3)

    def rank_main(rank):
        engine = toolbox.TableEngine(rank=rank, group=group)
        actor = PPOActor(engine, config(adv_estimator=name))
        return actor.with_advantages(actor.with_prox_logprobs(toolbox.select(batch, shares[rank]))).advantages

    actor = PPOActor(toolbox.TableEngine(), config(adv_estimator=name))
    alone = actor.with_advantages(actor.with_prox_logprobs(batch))
    for rank, actual in enumerate(group.run(rank_main)):
        expected = toolbox.select(alone, shares[rank]).advantages
        assert torch.allclose(actual, expected, rtol=0, atol=1e-6)


def test_grpo_is_the_composition_that_the_docs_give(toolbox):
    batch = make_case(toolbox, 3)
    named = PPOActor(toolbox.TableEngine(), config(adv_estimator="grpo")).with_advantages(batch)
    norm = NormConfig(mean_level="group", std_level="group")
    composed = PPOActor(toolbox.TableEngine(), config(reward_norm=norm)).with_advantages(batch)
    assert torch.equal(named.advantages, composed.advantages)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("name", TOKEN_BASELINES)
def test_the_token_baseline_reads_the_policy_before_the_update(toolbox, name, decoupled):
    """W = 1 - 2 p + sum p^2 of the trainer's policy, times w^2 with decoupled weights; no KL is added by the pass."""
    batch = make_case(toolbox, 5)
    options = config(adv_estimator=name, discount=DISCOUNT, use_decoupled_loss=decoupled)
    engine = toolbox.TableEngine()
    actor = PPOActor(engine, options)
    batch = actor.with_prox_logprobs(batch)
    assert (batch.prox_logprobs is not None) == decoupled
    actual = actor.with_advantages(actor.with_correction(batch)[0])
    table = engine.table.detach().log_softmax(-1).exp()
    ids = batch.input_ids
    probability = table[ids, ids.roll(-1)]
    norms = 1 - 2 * probability + table[ids].square().sum(-1)
    if decoupled:
        norms = norms * (probability.log() - batch.rollout_logprobs.double()).exp().square()
    gains, path, places = torch.zeros(batch.num_tokens).double(), torch.zeros(batch.num_tokens).double(), {}
    for s, (reward, group, _, trained) in enumerate(sequences_of(batch)):
        for count, t in enumerate(trained):
            gains[t] = reward * DISCOUNT ** (len(trained) - 1 - count)
            path[t] = norms[trained[: count + 1]].sum()
            places.setdefault((group, count), []).append((s, t))
    expected = gains.clone()
    for (group, count), members in places.items():
        ends = sorted(len(row[3]) for row in sequences_of(batch) if row[1] == group)
        for _, t in members:
            in_tail = len(ends) == 1 or count >= ends[-2]
            total = sum(path[u] for _, u in members)
            expected[t] -= 0.0 if in_tail else sum(gains[u] * path[u] for _, u in members) / (total + 1e-8)
    assert actual.advantages.tolist() == pytest.approx(expected.tolist(), abs=2e-5)


def test_gdpo_equals_verl(toolbox):
    """compute_gdpo_outcome_advantage: scores {1, 0} and {0, 10} of a group, weights 1 and 2, one token each.

    Each function gives (0.7071, -0.7071) whatever its scale, so the sums are -+0.7071; whitened with n - 1: -+0.7071.
    With GRPO the second function decides: rewards 1 and 20. A function that did not score a group counts 0 there.
    """
    nan = float("nan")
    exact, length = torch.tensor([1.0, 0.0, 0.0, 4.0]), torch.tensor([0.0, 10.0, nan, nan])
    plain = toolbox.make_batch([[1, 2], [1, 3], [1, 4], [1, 5]], rewards=[1.0, 20.0, 0.0, 4.0], group_ids=[0, 0, 1, 1])
    batch = replace(plain, columns={reward_part("exact"): exact, reward_part("length"): length})

    def advantages(batch, **options):
        actor = PPOActor(toolbox.TableEngine(), config(adv_estimator={"name": "gdpo", **options}))
        return actor.with_advantages(batch).advantages[::2].tolist()

    half = math.sqrt(0.5)
    one_group = toolbox.select(batch, [0, 1])
    assert advantages(one_group, weights={"exact": 1.0, "length": 2.0}) == pytest.approx([-half, half], abs=1e-4)
    assert advantages(one_group, weights={"exact": 1.0}) == pytest.approx([half, -half], abs=1e-4)
    sums = [-half, half, -half, half]  # group 1: exact alone
    std = math.sqrt(4 * 0.5 / 3)
    result = advantages(batch, weights={"exact": 1.0, "length": 2.0})
    assert result == pytest.approx([x / std for x in sums], abs=1e-4)
    # "format" scores another data source, of which this batch has no row
    further = {reward_part(f"exact/{spec.name}"): values for spec, values in one_group.columns.items()}
    mapping = replace(one_group, columns=further)  # numbers of one function: the reward counts
    assert advantages(mapping) == advantages(replace(one_group, columns={}))
    exact_only = advantages(one_group, weights={"exact": 1.0, "format": 2.0})
    assert exact_only == pytest.approx([half, -half], abs=1e-4)
    with raises_code("algorithm.no_reward_parts") as caught:
        advantages(batch, weights={"format": 2.0})
    assert "format" in str(caught.value)


def test_remax_by_hand(toolbox):
    # (1 + 0.5) * 2 = 3 against the greedy answer's (0.25 + 0.5) * 2 = 1.5
    batch = toolbox.make_batch([[1, 2]], rewards=[1.0]).with_column(BASELINE, torch.tensor([0.25]))
    actor = PPOActor(toolbox.TableEngine(), config(adv_estimator="remax", reward_bias=0.5, reward_scaling=2.0))
    assert actor.with_advantages(batch).advantages.tolist() == [1.5, 0]


@pytest.mark.parametrize("baselines", [None, torch.tensor([float("nan")])])
def test_remax_without_greedy_answers_stops_with_one_line(toolbox, baselines):
    batch = toolbox.make_batch([[1, 2]], rewards=[1.0])
    batch = batch if baselines is None else batch.with_column(BASELINE, baselines)
    with raises_code("algorithm.not_finite", "baseline"):
        PPOActor(toolbox.TableEngine(), config(adv_estimator="remax")).with_advantages(batch)


def test_the_overlong_penalty_comes_before_bias_and_scale(toolbox):
    # 3 of at most 4 tokens, tail 2: -1 * 1/2; (1 - 0.5 + 1) * 2 = 3. Two tokens: no penalty: (1 + 1) * 2 = 4
    batch = toolbox.make_batch([[1, 2, 3, 4], [1, 2, 3]], rewards=[1.0, 1.0])
    options = config(
        overlong_reward_penalty=True,
        overlong_tokens=2,
        overlong_penalty_factor=1.0,
        reward_bias=1.0,
        reward_scaling=2.0,
    )
    actor = PPOActor(toolbox.TableEngine(), options, max_new_tokens=4)
    assert actor.with_advantages(batch).advantages.tolist() == pytest.approx([3, 3, 3, 0, 4, 4, 0])


def test_options_fixed_by_an_estimator_have_no_effect():
    norm = NormConfig(mean_level="group")
    fixed = options_without_effect(config(adv_estimator="grpo", reward_norm=norm, adv_norm=norm, gae_lambda=0.5))
    assert {item.path for item in fixed} == {"reward_norm", "adv_norm", "gae_lambda"}
    assert not options_without_effect(config(reward_norm=norm, adv_norm=norm, gae_lambda=0.5))


def test_the_overlong_penalty_needs_its_size():
    result = config(overlong_reward_penalty=True).advantage_problems()
    assert {problem[0] for problem in result} == {"overlong_tokens", "overlong_penalty_factor"}
