"""The policy that a loss is around, recomputed or guessed from versions, and what a batch must hold for the guess."""

import math
from dataclasses import replace

import pytest
import torch

from areal.algorithm.aggregate import identity_reduce
from areal.algorithm.policy_loss import CHOSEN
from areal.api.config import PPOActorConfig
from areal.api.config.schema import options_without_effect
from areal.api.metrics import metric_values
from areal.api.registry import entries
from areal.trainer.actor import PPOActor, with_chosen_tokens
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.off_policy import old_logprobs
from tests.expect import raises_code

GUESS = {"use_decoupled_loss": True, "prox_logp_method": "loglinear"}


def config(**options):
    return PPOActorConfig(**{"path": "table", "kl_ctl": 0.0, "ppo_n_minibatches": 1} | options)


def stale_batch(toolbox, seed=0, count=9):
    """Step 3, tokens of versions 0 to 3."""
    batch = toolbox.random_batch(seed, count)
    generator = torch.Generator().manual_seed(seed)
    versions = torch.randint(0, 4, (batch.num_tokens,), generator=generator)
    return replace(batch, version=3, output_versions=torch.where(batch.loss_mask, versions, -1))


def updated(actor, batch):
    batch = actor.with_prox_logprobs(batch)
    batch, result = actor.with_correction(batch)
    batch = actor.with_advantages(batch)
    return actor.update(batch) | result


def problems(**options):
    return {path: text for path, text, *_ in config(**options).problems()}


def test_by_hand(toolbox):
    # half way through update 3; tokens of version 3 and 1: alpha 0 and 2 / 2.5
    batch = toolbox.make_batch([[1, 2, 3]], rollout=[math.log(0.2), math.log(0.2), 0.0])
    batch = replace(batch, version=3, update_progress=0.5, output_versions=torch.tensor([3, 1, -1]))
    now = torch.tensor([0.8, 0.8, 1.0]).log()
    assert old_logprobs(batch, config(**GUESS), now).exp().tolist() == pytest.approx([0.2, 0.2 * 4**0.8, 1.0])
    assert old_logprobs(batch, config(), now) is batch.rollout_logprobs
    with raises_code("training.stage_missing", "prox_logprobs"):
        old_logprobs(batch, config(use_decoupled_loss=True), now)


@pytest.mark.parametrize(
    "options",
    [
        {"use_decoupled_loss": True},
        {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.2},
        {"recompute_logprob": True},
    ],
)
def test_on_the_first_minibatch_the_guess_is_exact_and_costs_no_forward_pass(toolbox, options):
    batch = stale_batch(toolbox)
    gradients = []
    for method, forwards in (("recompute", 1), ("loglinear", 0)):
        engine = toolbox.TableEngine()
        updated(PPOActor(engine, config(**options, prox_logp_method=method)), batch)
        assert engine.num_forwards == forwards
        gradients.append(engine.gradients[0])
    assert torch.allclose(*gradients, rtol=0, atol=1e-6)
    assert gradients[0].abs().max() > 1e-3


def test_a_minibatch_knows_how_far_the_update_is(toolbox):
    engine = toolbox.TableEngine(lr=0.01)
    updated(PPOActor(engine, config(**GUESS, ppo_n_minibatches=2, ppo_epochs=2)), stale_batch(toolbox))
    assert [mini.update_progress for mini in engine.minibatches] == [0.0, 0.25, 0.5, 0.75]
    assert {mini.version for mini in engine.minibatches} == {3}


def test_any_number_of_micro_batches_gives_the_same_update(toolbox):
    batch = stale_batch(toolbox, 1, 11)
    result = []
    for num_micro_batches in (1, 3, 11):
        engine = toolbox.TableEngine(num_micro_batches=num_micro_batches)
        actor = PPOActor(engine, config(**GUESS, behav_imp_weight_cap=1.3, ppo_n_minibatches=3))
        result.append((metric_values(updated(actor, batch)), engine.table.detach().clone()))
    for values, table in result[1:]:
        assert torch.allclose(table, result[0][1], rtol=0, atol=1e-9)
        assert values == pytest.approx(result[0][0], abs=1e-6)
    assert 0 < result[0][0]["actor/correction/masked"] < 1


def test_every_rank_reports_the_same_names_also_without_tokens(toolbox):
    batch, group = stale_batch(toolbox, 2, 6), toolbox.RankGroup(2)
    for options in (GUESS | {"behav_imp_weight_cap": 1.3}, GUESS | {"prox_logp_method": "metrics"}):

        def rank_main(rank, options=options):
            engine = toolbox.TableEngine(rank=rank, group=group)
            share = toolbox.select(batch, [range(6), range(0)][rank])
            metrics = updated(PPOActor(engine, config(**options)), share)
            return sorted(metrics), metric_values(reduce_metrics(metrics, engine))

        (names, values), (others, same) = group.run(rank_main)
        assert names == others
        assert values == same


@pytest.mark.parametrize(
    "options",
    [
        GUESS | {"behav_imp_weight_cap": 1.3},
        GUESS | {"prox_logp_method": "metrics"},
        *({"policy_loss": name} for name in entries("losses") if name != "custom"),
    ],
)
def test_a_step_without_any_trained_token_reports_the_names_of_one_with(toolbox, options):
    batch = stale_batch(toolbox, 6, 4)
    names = updated(PPOActor(toolbox.TableEngine(), config(**options)), batch).keys()
    nothing = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert names - updated(PPOActor(toolbox.TableEngine(), config(**options)), nothing).keys() <= {"actor/grad_norm"}


def test_the_errors_of_the_guesses_are_logged(toolbox):
    options = {"use_decoupled_loss": True, "prox_logp_method": "metrics"}
    first = metric_values(updated(PPOActor(toolbox.TableEngine(), config(**options)), stale_batch(toolbox)))
    # one minibatch: theta is the proximal policy, and each guess is theta, but for what came from no version
    assert first["actor/prox_error/loglinear"] == pytest.approx(0, abs=1e-6)
    assert first["actor/prox_error/linear_max"] == pytest.approx(0, abs=1e-6)
    assert first["actor/prox_error/rollout"] > 0.1
    later = PPOActor(toolbox.TableEngine(), config(**options, ppo_n_minibatches=4))
    values = metric_values(updated(later, stale_batch(toolbox)))
    assert 0 < values["actor/prox_error/loglinear"] < values["actor/prox_error/loglinear_max"]


def test_on_a_straight_path_the_guess_beats_the_old_policy(toolbox):
    """The table moves on one line in log-probability: versions 0 .. 3 and the update go the same way."""
    batch = stale_batch(toolbox, 4, 30)
    start, slope = torch.linspace(-3, -1, batch.num_tokens), torch.linspace(-0.2, 0.2, batch.num_tokens)
    behaviour = start + slope * batch.output_versions.clamp(min=0)
    batch = replace(batch, rollout_logprobs=behaviour, update_progress=0.5)
    guess = old_logprobs(batch, config(**GUESS), start + slope * 3.5)
    stale = batch.loss_mask & (batch.output_versions < 4)
    assert torch.allclose(guess[stale], (start + slope * 3)[stale], atol=1e-6)


def test_what_cannot_work_is_refused_by_name(toolbox):
    for method in ("loglinear", "metrics"):
        assert not problems(prox_logp_method=method)
        assert [item.path for item in options_without_effect(config(prox_logp_method=method))] == ["prox_logp_method"]
    assert not problems(**GUESS)
    assert not problems(recompute_logprob=True, prox_logp_method="loglinear")
    assert list(problems(**GUESS, m2_threshold=0.1)) == ["m2_threshold"]
    assert not problems(**GUESS | {"prox_logp_method": "metrics"}, m2_threshold=0.1)


def test_covariances_are_those_of_the_recomputed_policy_where_there_is_one(toolbox):
    # advantages rise from token to token; the servers' log-probabilities too, the trainer's fall
    rising = torch.arange(4.0)
    batch = replace(
        toolbox.make_batch([[1, 2, 3, 4, 5]], rollout=[*rising.tolist(), 0.0]),
        advantages=torch.cat([rising, torch.zeros(1)]),
    )
    options = config(policy_loss={"name": "kl_cov", "ratio": 0.5})
    of_servers = with_chosen_tokens(batch, options, reduce=identity_reduce).columns[CHOSEN]
    assert of_servers.tolist() == [True, False, False, True, False]
    fall = torch.tensor([0.0, -4.0, 0.0, -4.0, 0.0])
    of_trainer = with_chosen_tokens(replace(batch, prox_logprobs=fall), options, reduce=identity_reduce).columns[CHOSEN]
    assert of_trainer.tolist() == [False, True, True, False, False]  # -3, 1, 1, -3 by hand
    with raises_code("training.stage_missing", "advantages"):
        with_chosen_tokens(replace(batch, advantages=None), options, reduce=identity_reduce)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_of_high_covariance_are_the_same_in_any_cut(toolbox, name):
    batch = replace(stale_batch(toolbox, 5, 12), group_ids=torch.arange(12) // 2)
    section = {"clip_cov": {"ratio": 0.3, "low": 0.0, "high": 9.0}, "kl_cov": {"ratio": 0.2}}[name]
    options = {"policy_loss": {"name": name, **section}, "ppo_n_minibatches": 2}
    alone = toolbox.TableEngine()
    values = metric_values(updated(PPOActor(alone, config(**options)), batch))
    assert 0.1 < values["actor/covariance_chosen_ratio"] < 0.35
    cut = toolbox.TableEngine(num_micro_batches=5)
    assert metric_values(updated(PPOActor(cut, config(**options)), batch)) == pytest.approx(values, abs=1e-6)
    assert torch.allclose(cut.table, alone.table, rtol=0, atol=1e-9)
    group, shares = toolbox.RankGroup(3), [[0, 1, 2, 3, 4, 5], [], [6, 7, 8, 9, 10, 11]]

    def rank_main(rank):
        engine = toolbox.TableEngine(rank=rank, group=group)
        actor = PPOActor(engine, config(**options | {"ppo_n_minibatches": 1}))
        metrics = updated(actor, toolbox.select(batch, shares[rank]))
        return metric_values(reduce_metrics(metrics, engine)), engine.table.detach()

    whole = toolbox.TableEngine()
    expected = metric_values(updated(PPOActor(whole, config(**options | {"ppo_n_minibatches": 1})), batch))
    for actual, table in group.run(rank_main):
        assert actual["actor/covariance_chosen_ratio"] == pytest.approx(expected["actor/covariance_chosen_ratio"])
        assert torch.allclose(table, whole.table, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["loglinear", "metrics"])
def test_around_the_rollout_policy_the_method_has_no_effect(toolbox, method):
    batch = stale_batch(toolbox)
    plain = updated(PPOActor(toolbox.TableEngine(), config()), batch)
    assert updated(PPOActor(toolbox.TableEngine(), config(prox_logp_method=method)), batch).keys() == plain.keys()
