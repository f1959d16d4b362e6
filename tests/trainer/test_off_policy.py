"""The correction stage through the real actor: denominators, ranks, micro-batches, short forms, metrics."""

import math
from dataclasses import replace

import pytest
import torch

from areal.api.config import CorrectionRule, PPOActorConfig, RolloutCorrectionConfig
from areal.api.config.validate import problems_of
from areal.api.metrics import merge_metrics, metric_values
from areal.trainer.actor import PPOActor
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.off_policy import BEHAVIOUR_WEIGHTS, correction_of


def config(**options):
    return PPOActorConfig(
        **{"path": "table", "kl_ctl": 0.0, "ppo_n_minibatches": 1, "recompute_logprob": True} | options
    )


def section(**options):
    return RolloutCorrectionConfig(**options)


def step(engine, options, batch):
    """One train step; (batch before the update, all its metrics)."""
    actor = PPOActor(engine, options)
    batch, metrics = actor.with_correction(actor.with_prox_logprobs(batch))
    batch = actor.with_advantages(batch)
    return batch, merge_metrics(metrics, actor.update(batch))


BOUNDS = [
    {"rollout_correction": section(mode="mask", upper=1.3)},
    {"rollout_correction": section(level="sequence", mode="mask", upper=2.0, batch_normalize=True)},
    {"rollout_correction": section(level="segment", upper=1.2, veto_threshold=0.4)},
    {"rollout_correction": section(level="geometric", mode="clamp", upper=1.1, rules=[CorrectionRule(upper=1.6)])},
    {"rollout_correction": section(mode="off", rules=[CorrectionRule(metric="k3", level="sequence_mean", upper=0.1)])},
    {"rollout_correction": section(batch_normalize=True), "m2_threshold": 0.1},
    {"rollout_correction": section(mode="off"), "m2_threshold": 0.05},
]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("bounds", BOUNDS, ids=range(len(BOUNDS)))
def test_ranks_and_micro_batches_make_the_update_of_the_whole_batch(toolbox, bounds, renormalize):
    options = config(**bounds | {"rollout_correction": replace(bounds["rollout_correction"], renormalize=renormalize)})
    batch = toolbox.random_batch(3, 12)
    alone = toolbox.TableEngine()
    whole, metrics = step(alone, options, batch)
    left_out = (whole.loss_mask & (whole.columns[BEHAVIOUR_WEIGHTS] == 0)).sum()
    assert 0 < left_out < whole.loss_mask.sum(), "the bounds of this case leave out some"
    assert alone.denominators == [float(whole.loss_mask.sum() - (left_out if renormalize else 0))]
    shares = [list(range(6)), [], list(range(6, 12))]
    for num_micro_batches in (1, 3):
        group = toolbox.RankGroup(3)

        def rank_main(rank, group=group, num_micro_batches=num_micro_batches):
            engine = toolbox.TableEngine(rank=rank, group=group, num_micro_batches=num_micro_batches)
            share, actual = step(engine, options, toolbox.select(batch, shares[rank]))
            return engine, share, metric_values(reduce_metrics(actual, engine))

        results = group.run(rank_main)
        for engine, _, values in results:
            assert torch.allclose(engine.gradients[0], alone.gradients[0], rtol=0, atol=1e-9)
            assert engine.denominators == alone.denominators
            expected = metric_values(reduce_metrics(metrics, alone))
            assert values.keys() == expected.keys()
            for name in expected.keys() - {"actor/optimizer_steps"}:
                assert values[name] == pytest.approx(expected[name], abs=1e-6), name
        together = torch.cat([share.columns[BEHAVIOUR_WEIGHTS] for _, share, _ in results])
        assert torch.allclose(together, whole.columns[BEHAVIOUR_WEIGHTS], rtol=0, atol=1e-9)


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_denominators_by_hand(toolbox, renormalize):
    """Two tokens, ratios 2 and 1/2, A = 1: the first is left out; gradient -(1/2) d log p over 2 tokens or over 1."""
    engine = toolbox.TableEngine()
    logprobs = engine.table.detach().log_softmax(-1)[1].float()
    rollout = [float(logprobs[2]) - math.log(2), 0.0, float(logprobs[3]) + math.log(2), 0.0]
    batch = toolbox.make_batch([[1, 2], [1, 3]], rewards=[1.0, 1.0], rollout=rollout)
    bound = section(mode="mask", lower=0.0, upper=1.5, renormalize=renormalize)
    trained, metrics = step(engine, config(rollout_correction=bound), batch)
    assert trained.columns[BEHAVIOUR_WEIGHTS].tolist() == pytest.approx([0, 0, 0.5, 0])
    assert trained.trained.tolist() == [not renormalize, False, True, False]
    assert trained.loss_mask.tolist() == [True, False, True, False]
    gradient = torch.zeros_like(engine.gradients[0])
    unit = torch.nn.functional.one_hot(torch.tensor(3), toolbox.VOCABULARY).double()
    gradient[1] = -0.5 * (unit - logprobs.double().exp()) / (1 if renormalize else 2)
    assert torch.allclose(engine.gradients[0], gradient, atol=1e-6)
    values = metric_values(metrics)
    assert values["batch/correction/masked"] == 0.5
    assert values["batch/correction/left_out"] == 0.5
    assert values["batch/correction/weight"] == pytest.approx(0.5)
    assert values["batch/correction/ess"] == pytest.approx(1.0)
    assert values["batch/mismatch/ratio"] == pytest.approx(1.25)
    assert values["batch/mismatch/ratio_max"] == pytest.approx(2.0)


RATIO_CASES = [(renormalize, drop) for renormalize in (False, True) for drop in (None, False, True)]


@pytest.mark.parametrize(("renormalize", "drop"), RATIO_CASES)
def test_rejected_tokens_leave_denominator_and_ratio_apart(toolbox, renormalize, drop):
    """GSPO on one answer of two tokens, the first rejected. AReaL 1.0: out of the ratio, kept in the denominator.

    The gradient of s A over the denominator: s = 1, so each token in the ratio's mean of n gets w A d log p / n, where
    w = 1/2 of the kept token is the factor of the only term that is left in the loss.
    """
    engine = toolbox.TableEngine()
    logprobs = engine.table.detach().log_softmax(-1).float()
    rollout = [float(logprobs[1, 2]) - math.log(2), float(logprobs[2, 3]) + math.log(2), 0.0]
    batch = toolbox.make_batch([[1, 2, 3]], rewards=[1.0], rollout=rollout)
    bound = section(mode="mask", lower=0.0, upper=1.5, renormalize=renormalize, drop_from_ratio=drop)
    options = config(rollout_correction=bound, policy_loss="gspo", eps_clip=-1.0)
    step(engine, options, batch)
    drops = renormalize if drop is None else drop
    gradient = torch.zeros_like(engine.gradients[0])
    for token, following in ((2, 3),) if drops else ((1, 2), (2, 3)):
        unit = torch.nn.functional.one_hot(torch.tensor(following), toolbox.VOCABULARY).double()
        share = 0.5 / (1 if drops else 2) / (1 if renormalize else 2)
        gradient[token] = -share * (unit - logprobs[token].double().exp())
    assert torch.allclose(engine.gradients[0], gradient, atol=1e-6)
    assert engine.denominators == [1.0 if renormalize else 2.0]


BYPASS = [
    {"policy_loss": "gpg", "rollout_correction": section(numerator="training", upper=1.2)},
    {"policy_loss": "gpg", "rollout_correction": section(numerator="training", level="sequence", upper=1.5)},
    {"rollout_correction": section(numerator="training", mode="mask", upper=1.4, apply_weights=False)},
    {
        "policy_loss": "gspo",
        "rollout_correction": section(
            numerator="training", mode="off", rules=[CorrectionRule(metric="k3", upper=0.05)], drop_from_ratio=True
        ),
    },
]


@pytest.mark.parametrize("options", BYPASS, ids=range(len(BYPASS)))
def test_bypass_mode_needs_no_forward_pass_and_no_cut(toolbox, options):
    """verl's bypass_mode: the weights and rejections are of the policy in training against the rollout policy."""
    options = config(**options | {"recompute_logprob": False, "ppo_epochs": 2})
    assert not list(problems_of(options))
    batch = toolbox.random_batch(3, 12)
    alone = toolbox.TableEngine()
    _, metrics = step(alone, options, batch)
    assert alone.num_forwards == 0
    assert "actor/correction/left_out" in metrics
    shares = [list(range(6)), [], list(range(6, 12))]
    group = toolbox.RankGroup(3)

    def rank_main(rank):
        engine = toolbox.TableEngine(rank=rank, group=group, num_micro_batches=3)
        step(engine, options, toolbox.select(batch, shares[rank]))
        return engine

    for engine in group.run(rank_main):
        for actual, expected in zip(engine.gradients, alone.gradients, strict=True):
            assert torch.allclose(actual, expected, rtol=0, atol=1e-9)


def test_bypass_mode_equals_verl(toolbox):
    """compute_policy_loss_bypass_mode, one token, A = 1, log-ratio to the rollout policy log 2, threshold 1.5.

    reinforce: gradient -sg(min(2, 1.5)) d log p. ppo_clip: -min(2, 1.2), no gradient above the clip; with a clip of 2
    it is -2 d log p; and a token that token_k1 rejects (ratio above 1.5) has none, in the denominator of 1.
    """

    def factor(**options):
        engine = toolbox.TableEngine()
        logprobs = engine.table.detach().log_softmax(-1)[1].float()
        batch = toolbox.make_batch([[1, 2]], rewards=[1.0], rollout=[float(logprobs[2]) - math.log(2), 0.0])
        step(engine, config(**{"recompute_logprob": False} | options), batch)
        unit = torch.nn.functional.one_hot(torch.tensor(2), toolbox.VOCABULARY).double()
        return float(engine.gradients[0][1, 2] / (unit - logprobs.double().exp())[2])

    weights = section(numerator="training", upper=1.5)
    assert factor(policy_loss="gpg", rollout_correction=weights) == pytest.approx(-1.5, abs=1e-5)
    logged = section(numerator="training", upper=1.5, apply_weights=False)
    assert factor(rollout_correction=logged) == pytest.approx(0.0, abs=1e-5)
    assert factor(rollout_correction=logged, eps_clip=2.0) == pytest.approx(-2.0, abs=1e-5)
    rejecting = replace(logged, rules=[CorrectionRule(upper=1.5)])
    assert factor(rollout_correction=rejecting, eps_clip=2.0) == 0.0


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"policy_loss": "ppo"}, "rollout_correction.apply_weights"),
        ({"policy_loss": "gpg", "use_decoupled_loss": True}, "rollout_correction.numerator"),
        ({"policy_loss": "gpg", "m2_threshold": 0.1}, "m2_threshold"),
    ],
)
def test_bypass_mode_refuses_what_it_cannot_do(options, path):
    options = config(**{"recompute_logprob": False, "rollout_correction": section(numerator="training")} | options)
    assert path in [problem.path for problem in problems_of(options)]


@pytest.mark.parametrize(
    ("short", "written_out"),
    [
        ({"use_decoupled_loss": True}, {"rollout_correction": section()}),
        (
            {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.2},
            {"rollout_correction": section(mode="mask", lower=0.0, upper=1.2)},
        ),
        ({"m2_threshold": 0.05}, {"rollout_correction": section(mode="off"), "m2_threshold": 0.05}),
    ],
)
def test_the_short_forms_are_settings_of_the_section(toolbox, short, written_out):
    result = []
    for options in (short, written_out):
        engine = toolbox.TableEngine()
        _, metrics = step(engine, config(**options), toolbox.random_batch(5, 8))
        result.append((engine.gradients[0], metric_values(metrics)))
    assert torch.equal(result[0][0], result[1][0])
    assert result[0][1] == result[1][1]
    assert correction_of(config(**short)) == written_out["rollout_correction"]


def test_weights_that_are_only_logged_change_nothing(toolbox):
    batch = toolbox.random_batch(6, 8)
    plain, logged = toolbox.TableEngine(), toolbox.TableEngine()
    _, without = step(plain, config(), batch)
    options = config(rollout_correction=section(mode="clamp", upper=1.5, apply_weights=False))
    _, metrics = step(logged, options, batch)
    assert torch.equal(plain.gradients[0], logged.gradients[0])
    values = metric_values(metrics)
    assert 0 < values["batch/correction/clamped"] < 1
    assert values["batch/correction/weight_max"] <= 1.5
    assert values["batch/correction/weight_min"] == pytest.approx(1 / 1.5)
    assert values["batch/correction/ess"] < 1
    assert not any(name.startswith("batch/correction") for name in without)
    assert {name for name in without if name.startswith("batch/mismatch")} <= set(metrics)


def test_filters_do_not_change_rewards_and_advantages(toolbox):
    batch = toolbox.random_batch(7, 8)
    corrected, _ = step(toolbox.TableEngine(), config(m2_threshold=0.01), batch)
    plain, _ = step(toolbox.TableEngine(), config(), batch)
    assert (corrected.columns[BEHAVIOUR_WEIGHTS][corrected.loss_mask] == 0).any()
    assert torch.equal(corrected.advantages, plain.advantages)


def test_the_weights_are_those_of_the_start_of_the_update(toolbox):
    """Minibatches of one step train on weights decided before the first of them moved the policy."""
    engine, batch = toolbox.TableEngine(lr=5.0), toolbox.random_batch(8, 12)
    whole, _ = step(engine, config(ppo_n_minibatches=3, use_decoupled_loss=True), batch)
    expected = (whole.prox_logprobs - whole.rollout_logprobs).exp() * whole.loss_mask
    assert torch.allclose(whole.columns[BEHAVIOUR_WEIGHTS], expected)
    parts = torch.cat([mini.columns[BEHAVIOUR_WEIGHTS] for mini in engine.minibatches])
    assert parts.sort().values.tolist() == whole.columns[BEHAVIOUR_WEIGHTS].sort().values.tolist()


def test_a_batch_that_is_left_out_as_a_whole_takes_no_step(toolbox):
    bound = CorrectionRule(metric="k2", level="sequence_max", upper=1e-12)
    for renormalize in (False, True):
        engine = toolbox.TableEngine()
        options = config(rollout_correction=section(mode="off", rules=[bound], renormalize=renormalize))
        before = engine.table.detach().clone()
        _, metrics = step(engine, options, toolbox.random_batch(9, 6))
        assert metrics["actor/optimizer_steps"].value == (0 if renormalize else 1)
        assert torch.equal(engine.table, before)
        assert metric_values(metrics)["batch/correction/rule0_masked"] == 1


def test_tokens_of_an_earlier_filter_stay_removed(toolbox):
    batch = toolbox.random_batch(10, 6)
    policy_mask = batch.loss_mask & (torch.arange(batch.num_tokens) % 2 == 0)
    engine = toolbox.TableEngine()
    options = config(rollout_correction=section(mode="mask", upper=1.4, renormalize=True))
    whole, _ = step(engine, options, replace(batch, policy_mask=policy_mask))
    assert not (whole.policy_mask & ~policy_mask).any()
    assert whole.policy_mask.sum() < policy_mask.sum()
    assert (whole.columns[BEHAVIOUR_WEIGHTS][~policy_mask] == 0).all()


def test_a_loss_around_the_rollout_policy_may_be_measured(toolbox):
    """One forward pass more, the same update bit by bit: also with a KL penalty, whose policy stays the servers'."""
    batch = replace(
        toolbox.random_batch(12, 8), ref_logprobs=torch.full((toolbox.random_batch(12, 8).num_tokens,), -2.0)
    )
    plain, measured = toolbox.TableEngine(), toolbox.TableEngine()
    options = {"recompute_logprob": False, "kl_ctl": 0.3}
    _, without = step(plain, config(**options), batch)
    trained, metrics = step(measured, config(**options, rollout_correction=section(apply_weights=False)), batch)
    assert torch.equal(plain.gradients[0], measured.gradients[0])
    assert (plain.num_forwards, measured.num_forwards) == (0, 1)
    assert trained.prox_logprobs is None
    assert BEHAVIOUR_WEIGHTS not in trained.columns
    assert {name for name in metrics if name.startswith("batch/mismatch")}
    assert metrics["batch/correction/weight"].value == pytest.approx(metrics["batch/mismatch/ratio"].value)
    assert without.keys() == {name for name in metrics if name.startswith("actor/")}


def test_without_log_probabilities_of_the_trainer_nothing_is_known(toolbox):
    batch = toolbox.random_batch(11, 4)
    same, metrics = PPOActor(toolbox.TableEngine(), config(recompute_logprob=False)).with_correction(batch)
    assert same is batch
    assert metrics == {}
