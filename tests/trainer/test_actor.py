"""The policy's role over a table model: what it computes, how it cuts, what ranks and bad input do."""

import math
from dataclasses import replace

import pytest
import torch

from areal.algorithm.advantage import RETURNS, VALUES
from areal.api.config import NormConfig, PPOActorConfig
from areal.api.errors import ConfigError
from areal.api.metrics import metric_values
from areal.trainer.actor import PPOActor
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.ppo_loop import batch_metrics
from areal.trainer.roles import Reference
from tests.expect import raises_code

GROUP_MEAN = NormConfig(mean_level="group", std_level=None)


def config(**options):
    return PPOActorConfig(**{"path": "table", "kl_ctl": 0.0, "ppo_n_minibatches": 1} | options)


def ready(actor, batch):
    return actor.with_advantages(actor.with_correction(actor.with_prox_logprobs(batch))[0])


@pytest.mark.parametrize(
    ("options", "needed"), [({}, False), ({"recompute_logprob": True}, True), ({"use_decoupled_loss": True}, True)]
)
def test_prox_logprobs_cost_a_forward_pass_only_when_the_loss_needs_them(toolbox, options, needed):
    engine, batch = toolbox.TableEngine(), toolbox.random_batch(0, 4)
    result = PPOActor(engine, config(**options)).with_prox_logprobs(batch)
    assert engine.num_forwards == int(needed)
    assert (result is batch) is not needed
    assert (result.prox_logprobs is not None) is needed


def test_grpo_advantages_by_hand(toolbox):
    # group 4: rewards 1, 0, 0 -> mean 1/3; group 9: 1, 1 -> 0. Prompt token and last position get nothing
    batch = toolbox.make_batch(
        [[1, 2, 3, 4], [1, 2], [5, 0, 1], [1, 3], [5, 2]], rewards=[1.0, 0, 1, 0, 1], group_ids=[4, 4, 9, 4, 9]
    )
    advantages = ready(PPOActor(toolbox.TableEngine(), config(reward_norm=GROUP_MEAN)), batch).advantages
    third = 1 / 3
    expected = [2 * third] * 3 + [0] + [-third, 0] + [0, 0, 0] + [-third, 0] + [0, 0]
    assert advantages.tolist() == pytest.approx(expected)


def test_reward_shaping_comes_before_normalisation_and_unfinished_answers_after(toolbox):
    # (r + 1) * 2 = 4, 2 -> clip 3: 3, 2 -> mean 2.5: 0.5, -0.5 -> the second was cut: 0
    batch = toolbox.make_batch([[1, 2], [1, 3]], rewards=[1.0, 0.0], finished=[True, False])
    options = {"reward_bias": 1.0, "reward_scaling": 2.0, "reward_clip": 3.0, "reward_norm": GROUP_MEAN}
    actor = PPOActor(toolbox.TableEngine(), config(**options, mask_no_eos_with_zero=True))
    assert ready(actor, batch).advantages.tolist() == pytest.approx([0.5, 0, 0, 0])


def test_the_overlong_penalty_is_logged_where_there_is_one(toolbox):
    # answers of 4, 3 and 1 of at most 4 tokens, the tail is 2: penalties 2, 1 and 0 -> mean -1, two of three
    batch = toolbox.make_batch([[1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2]], rewards=[1.0, 0.0, 1.0])
    options = {"overlong_reward_penalty": True, "overlong_tokens": 2, "overlong_penalty_factor": 2.0}
    actor = PPOActor(toolbox.TableEngine(), config(**options), max_new_tokens=4)
    metrics = metric_values(actor.update(ready(actor, batch)))
    assert metrics["actor/overlong_penalty"] == pytest.approx(-1.0)
    assert metrics["actor/overlong_ratio"] == pytest.approx(2 / 3)
    plain = PPOActor(toolbox.TableEngine(), config())
    assert not any("overlong" in name for name in plain.update(ready(plain, batch)))


def test_a_custom_loss_is_checked_before_the_first_batch(toolbox, tmp_path):
    file = tmp_path / "my_loss.py"
    file.write_text(
        "import math\n\n"
        "def bare(tokens, options):\n    return tokens.logprobs\n\n"
        "def wrong(tokens, options):\n    return {}['top']\n"
    )
    engine = toolbox.TableEngine()
    for name, error in (("bare", ConfigError), ("wrong", KeyError), ("math", ConfigError)):
        custom = {"name": "custom", "path": f"{file}:{name}"}
        with pytest.raises(error) as caught:
            PPOActor(engine, config(policy_loss=custom))
        if name == "bare":
            assert caught.value.code == "loss.custom_result"


def test_kl_penalty_is_in_the_reward_to_go(toolbox):
    # k1 of the two trained tokens: -1.5 + 2 = 0.5 and -1.5 + 1.7 = 0.2; task reward 1 at the second
    # A_2 = 1 - 0.1 * 0.2 = 0.98; A_1 = -0.1 * 0.5 + A_2 = 0.93
    batch = replace(toolbox.make_batch([[1, 2, 3]], rewards=[1.0]), ref_logprobs=torch.tensor([-2.0, -1.7, 0.0]))
    assert ready(PPOActor(toolbox.TableEngine(), config(kl_ctl=0.1)), batch).advantages.tolist() == pytest.approx(
        [0.93, 0.98, 0]
    )
    assert ready(PPOActor(toolbox.TableEngine(), config()), batch).advantages.tolist() == [1, 1, 0]


def test_reference_equal_to_the_policy_costs_no_reward(toolbox):
    engine = toolbox.TableEngine()
    batch = Reference(toolbox.TableEngine()).with_ref_logprobs(toolbox.random_batch(1, 5))
    with_ref = ready(PPOActor(engine, config(kl_ctl=5.0, recompute_logprob=True)), batch)
    without = ready(PPOActor(engine, config(recompute_logprob=True)), batch)
    assert torch.allclose(with_ref.advantages, without.advantages, atol=1e-6)


def test_a_cut_answer_bootstraps_only_when_its_reward_is_withheld(toolbox):
    # discount 1, lambda 1, values 0.25 and 0.75: finished or rewarded: A = 1 - V. Withheld: A = 0.75 - V
    batch = toolbox.make_batch([[1, 2, 3]], rewards=[1.0], finished=[False])
    batch = batch.with_column(VALUES, torch.tensor([0.25, 0.75, 0.0]))
    rewarded = ready(PPOActor(toolbox.TableEngine(), config()), batch)
    assert rewarded.advantages.tolist() == [0.75, 0.25, 0]
    assert rewarded.columns[RETURNS].tolist() == [1, 1, 0]
    withheld = ready(PPOActor(toolbox.TableEngine(), config(mask_no_eos_with_zero=True)), batch)
    assert withheld.advantages.tolist() == [0.5, 0, 0]
    whole = ready(
        PPOActor(toolbox.TableEngine(), config(mask_no_eos_with_zero=True)),
        replace(batch, finished=torch.tensor([True])),
    )
    assert whole.advantages.tolist() == [0.75, 0.25, 0]


def test_advantage_normalisation_is_over_trained_tokens(toolbox):
    # tokens with advantage 1, 1, 1 and 0: mean 0.75, population std sqrt(3)/4
    batch = toolbox.make_batch([[1, 2, 3, 4], [1, 2]], rewards=[1.0, 0.0])
    norm = NormConfig(std_unbiased=False, eps=0.0)
    advantages = ready(PPOActor(toolbox.TableEngine(), config(adv_norm=norm)), batch).advantages
    assert advantages.tolist() == pytest.approx([1 / math.sqrt(3)] * 3 + [0, -math.sqrt(3), 0])


def test_first_gradient_by_hand(toolbox):
    """On policy with one trained token per sequence the gradient is -mean A * d log p."""
    engine = toolbox.TableEngine()
    batch = toolbox.make_batch([[1, 2], [1, 3]], rewards=[1.0, 0.0])
    actor = PPOActor(engine, config(recompute_logprob=True, reward_norm=GROUP_MEAN))
    actor.update(ready(actor, batch))
    # A = +-0.5 and d log p(x) = e_x - p: -(0.5 * (e_2 - p) - 0.5 * (e_3 - p)) / 2 = -0.25 e_2 + 0.25 e_3
    expected = torch.zeros_like(engine.table).detach()
    expected[1, 2], expected[1, 3] = -0.25, 0.25
    assert torch.allclose(engine.gradients[0], expected, atol=1e-7)


@pytest.mark.parametrize(("is_trained", "gradients_before"), [(True, 1), (False, 0)])
def test_what_needs_the_weights_before_the_update_is_called_once_before_the_first_step(
    toolbox, is_trained, gradients_before
):
    engine, seen = toolbox.TableEngine(), []
    batch = toolbox.make_batch([[1, 2], [1, 3]], rewards=[1.0, 0.0])
    batch = batch if is_trained else replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    actor, before = PPOActor(engine, config(ppo_n_minibatches=2)), engine.table.detach().clone()
    actor.update(
        ready(actor, batch),
        before_step=lambda: seen.append((len(engine.denominators), torch.equal(engine.table, before))),
    )
    assert seen == [(gradients_before, True)]
    assert len(engine.gradients) == (2 if is_trained else 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute_logprob": True}, {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.1, "c_clip": 2.0}],
)
def test_any_number_of_micro_batches_gives_the_same_gradient_and_metrics(toolbox, options):
    batch = toolbox.random_batch(2, 11)
    result = []
    for num_micro_batches in (1, 2, 5, 11, 13):
        engine = toolbox.TableEngine(num_micro_batches=num_micro_batches)
        actor = PPOActor(engine, config(**options, reward_norm=GROUP_MEAN))
        metrics = actor.update(ready(actor, batch))
        result.append((engine.gradients[0], metric_values(metrics)))
    for gradient, values in result[1:]:
        assert torch.allclose(gradient, result[0][0], rtol=0, atol=1e-9)
        assert values == pytest.approx(result[0][1], abs=1e-6)


def test_ranks_together_make_the_gradient_of_the_whole_batch(toolbox):
    """Three ranks, unequal shares, one empty; statistics and denominators are global."""
    batch = toolbox.random_batch(3, 10)
    options = {
        "use_decoupled_loss": True,
        "reward_norm": NormConfig(mean_level="group", std_level="batch"),
        "adv_norm": NormConfig(),
    }
    alone = toolbox.TableEngine()
    actor = PPOActor(alone, config(**options))
    whole = ready(actor, batch)
    metrics = metric_values(actor.update(whole) | batch_metrics(whole))
    shares = [list(range(6)), [], [6, 7, 8, 9]]
    group = toolbox.RankGroup(3)

    def rank_main(rank):
        engine = toolbox.TableEngine(rank=rank, group=group, num_micro_batches=rank + 1)
        actor = PPOActor(engine, config(**options))
        share = ready(actor, toolbox.select(batch, shares[rank]))
        metrics = actor.update(share) | batch_metrics(share)
        return engine, metric_values(reduce_metrics(metrics, engine)), share.advantages

    results = group.run(rank_main)
    for engine, values, _ in results:
        assert torch.allclose(engine.gradients[0], alone.gradients[0], rtol=0, atol=1e-7)
        assert engine.denominators == alone.denominators
        for name in metrics.keys() - {"actor/optimizer_steps"}:
            assert values[name] == pytest.approx(metrics[name], abs=1e-5, nan_ok=True), name
    assert torch.allclose(torch.cat([a for _, _, a in results]), whole.advantages, atol=1e-6)


def test_every_rank_takes_the_same_number_of_steps(toolbox):
    group = toolbox.RankGroup(2)
    shares = [toolbox.random_batch(4, 9), toolbox.random_batch(5, 2)]

    def rank_main(rank):
        engine = toolbox.TableEngine(rank=rank, group=group)
        actor = PPOActor(engine, config(ppo_n_minibatches=4))
        metrics = actor.update(ready(actor, shares[rank]))
        return engine, metrics

    (first, metrics), (second, other) = group.run(rank_main)
    assert len(first.gradients) == len(second.gradients) == 4
    assert first.denominators == second.denominators
    assert torch.equal(first.table, second.table)
    assert metrics.keys() == other.keys()
    assert metrics["actor/optimizer_steps"].value == 4


def test_minibatches_cover_the_batch_once_and_are_balanced(toolbox):
    engine, batch = toolbox.TableEngine(lr=0.0), toolbox.random_batch(6, 40)
    actor = PPOActor(engine, config(ppo_n_minibatches=4))
    actor.update(ready(actor, batch))
    sizes = [mini.num_tokens for mini in engine.minibatches]
    assert sum(sizes) == batch.num_tokens
    assert max(sizes) - min(sizes) <= 9
    assert sum(engine.denominators) == batch.loss_mask.sum()
    again = toolbox.TableEngine(lr=0.0)
    PPOActor(again, config(ppo_n_minibatches=4)).update(ready(actor, batch))
    assert all(
        torch.equal(a.input_ids, b.input_ids) for a, b in zip(engine.minibatches, again.minibatches, strict=True)
    )


def test_minibatches_without_trained_tokens_take_no_step(toolbox):
    engine = toolbox.TableEngine()
    actor = PPOActor(engine, config(ppo_n_minibatches=4))
    metrics = actor.update(ready(actor, toolbox.make_batch([[1, 2, 3]], rewards=[1.0])))
    assert metrics["actor/optimizer_steps"].value == 1
    before = engine.table.detach().clone()
    masked = toolbox.make_batch([[1, 2, 3]], prompt_length=3, rewards=[1.0])
    metrics = actor.update(ready(actor, masked))
    assert metrics["actor/optimizer_steps"].value == 0
    assert metrics["actor/loss"].count == 0
    assert torch.equal(engine.table, before)


@pytest.mark.parametrize("field", ["rewards", "rollout_logprobs", "values"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_stop_every_rank_with_one_line(toolbox, field, bad):
    group = toolbox.RankGroup(2)
    good = toolbox.random_batch(7, 4).with_column(VALUES, torch.zeros(toolbox.random_batch(7, 4).num_tokens))
    broken = (good.column(VALUES) if field == "values" else getattr(good, field)).clone()
    broken[torch.nonzero(good.loss_mask)[0] if field != "rewards" else 0] = bad
    changed = good.with_column(VALUES, broken) if field == "values" else replace(good, **{field: broken})
    shares = [good, changed]

    def rank_main(rank):
        actor = PPOActor(toolbox.TableEngine(rank=rank, group=group), config())
        with raises_code("algorithm.not_finite", field):
            actor.with_advantages(shares[rank])

    group.run(rank_main)


def test_bad_numbers_outside_the_mask_do_not_matter(toolbox):
    batch = toolbox.make_batch([[1, 2, 3]], prompt_length=2, rewards=[1.0])
    batch = replace(batch, rollout_logprobs=torch.tensor([float("nan"), -1.0, float("inf")]))
    engine = toolbox.TableEngine()
    actor = PPOActor(engine, config(use_decoupled_loss=True))
    actor.update(ready(actor, batch))
    assert engine.gradients[0].isfinite().all()


def test_steps_out_of_order_are_named(toolbox):
    batch = toolbox.random_batch(8, 2)
    with raises_code("training.stage_missing", "advantages"):
        PPOActor(toolbox.TableEngine(), config()).update(batch)
    actor = PPOActor(toolbox.TableEngine(), config(use_decoupled_loss=True))
    with raises_code("training.stage_missing", "prox_logprobs"):
        actor.update(actor.with_advantages(batch))
    with raises_code("training.stage_missing", "prox_logprobs"):
        actor.with_correction(batch)
    with raises_code("training.stage_missing", "behaviour_weights"):
        actor.update(actor.with_advantages(actor.with_prox_logprobs(batch)))
    with raises_code("training.stage_missing", "logprobs"):
        PPOActor(toolbox.TableEngine(critic=True), config(recompute_logprob=True)).with_prox_logprobs(batch)


def test_batch_metrics_by_hand(toolbox):
    batch = toolbox.make_batch(
        [[1, 2, 3, 4], [1, 2], [5, 0, 1]], rewards=[1.0, 0.0, 3.0], group_ids=[0, 0, 1], finished=[True, False, True]
    )
    batch = replace(batch, prox_logprobs=batch.rollout_logprobs + 0.5 * batch.loss_mask)
    values = metric_values(batch_metrics(batch))
    expected = {
        "num_sequences": 3, "num_tokens": 9, "num_trained_tokens": 6, "reward": 4 / 3, "reward_max": 3, "reward_min": 0,
        "sequence_length": 3, "sequence_length_max": 4, "answer_length": 2, "answer_length_max": 3,
        "answer_length_min": 1, "answer_length_rewarded": 2.5, "answer_length_unrewarded": 1, "unfinished_ratio": 1 / 3,
        "uniform_reward_ratio": 1 / 3, "rollout_logprobs": -1.5, "prox_logprobs": -1.0, "prox_rollout_gap_abs": 0.5,
        "prox_rollout_gap_max": 0.5,
    }  # fmt: skip
    assert values == pytest.approx({f"batch/{name}": value for name, value in expected.items()})


def test_policy_metrics_of_an_on_policy_step(toolbox):
    engine = toolbox.TableEngine()
    actor = PPOActor(engine, config(use_decoupled_loss=True))
    batch = ready(actor, toolbox.random_batch(9, 6))
    values = metric_values(actor.update(batch))
    assert values["actor/importance_weight"] == pytest.approx(1.0, abs=1e-6)
    assert values["actor/approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert values["actor/clip_ratio"] == 0
    assert 0 < values["actor/entropy"] < math.log(toolbox.VOCABULARY)


def test_it_learns_to_prefer_the_rewarded_token(toolbox):
    """After token 1, token 3 is rewarded: 60 rounds of sampling and updating make it certain."""
    engine = toolbox.TableEngine(lr=4.0)
    actor = PPOActor(engine, config(ppo_n_minibatches=2, use_decoupled_loss=True, reward_norm=GROUP_MEAN))
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        distribution = engine.table.detach()[1].log_softmax(-1)
        tokens = torch.multinomial(distribution.exp(), 16, replacement=True, generator=generator).tolist()
        batch = toolbox.make_batch(
            [[1, token] for token in tokens],
            rewards=[float(token == 3) for token in tokens],
            rollout=[x for token in tokens for x in (distribution[token].item(), 0.0)],
        )
        actor.update(ready(actor, batch))
    assert engine.table.detach()[1].softmax(-1)[3] > 0.95
