"""The divergence from the reference in reward and loss, over a table model: by hand, in any cut, its lasting state."""

import math
from dataclasses import replace

import pytest
import torch

from areal.api.batch import CANDIDATE_IDS
from areal.api.config import KLControlConfig, PPOActorConfig
from areal.api.data import WeightSpec
from areal.api.metrics import metric_values
from areal.trainer.actor import PPOActor
from areal.trainer.kl_term import PROX_CANDIDATES, REF_CANDIDATES, REF_KL
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.policy_update import output_spec
from areal.trainer.ppo_loop import batch_metrics
from areal.trainer.recover import ActorState
from areal.trainer.roles import Reference, ReferenceResets
from tests.expect import raises_code

NAN = float("nan")
ADAPTIVE = {"kl_ctl": 0.5, "kl_control": KLControlConfig(type="adaptive", target=0.1, horizon=20.0)}


def config(**options):
    return PPOActorConfig(**{"path": "table", "kl_ctl": 0.0, "ppo_n_minibatches": 1} | options)


@pytest.fixture
def make(toolbox):
    """make(config, **of the engine) -> engines of policy and reference, and the two roles."""

    class Engine(toolbox.TableEngine):
        """Gives candidates as `OutputSpec.candidates` says."""

        def __init__(self, candidates, *, shift=0.0, **options):
            super().__init__(**options)
            self.candidates = candidates
            generator = torch.Generator().manual_seed(11)
            noise = torch.randn(self.table.shape, dtype=torch.float64, generator=generator)
            self.table.data += shift * noise
            self.resets = []

        def outputs(self, batch):
            result = super().outputs(batch)
            if self.candidates is None:
                return result
            distribution = self.table[batch.input_ids].log_softmax(-1)
            ids = batch.columns.get(CANDIDATE_IDS)
            if ids is None:
                assert self.candidates == 0 or not torch.is_grad_enabled(), "the choice is made in forward only"
                ids = distribution.topk(self.candidates or toolbox.VOCABULARY, dim=-1).indices
                if self.candidates == 0:
                    ids = torch.arange(toolbox.VOCABULARY).expand_as(ids)
            return replace(result, candidate_ids=ids, candidate_logprobs=distribution.gather(-1, ids))

        def forward(self, batch):
            assert PROX_CANDIDATES not in batch.columns, "no pass reads them: they would only travel"
            plain = super().forward(batch)
            with torch.no_grad():
                actual = self.outputs(batch)
            logprobs = None if actual.candidate_logprobs is None else actual.candidate_logprobs.float()
            return replace(plain, candidate_ids=actual.candidate_ids, candidate_logprobs=logprobs)

        def weight_specs(self):
            return [WeightSpec(name="table", shape=list(self.table.shape), dtype="float64")]

        def named_weights(self, *, stored=False):
            yield "table", self.table.detach()

        def load_weights(self, weights):
            self.table.data.copy_(dict(weights)["table"])

        def reset_optimizer(self):
            self.resets.append(self.table.detach().clone())

    def roles(options, **of_engine):
        candidates = output_spec(options).candidates
        policy = Engine(candidates, **of_engine)
        reference = Engine(candidates, shift=0.7, rank=policy.dp_rank, group=policy.group)
        return policy, reference, PPOActor(policy, options), Reference(reference, options)

    return roles


def ready(actor, reference, batch):
    """All stages before the update."""
    batch = reference.with_ref_logprobs(actor.with_prox_logprobs(batch))
    return actor.with_advantages(batch)


def slow_gradient(engine, batch, ref_table, per_token):
    """Of the mean of per_token(log pi over the vocabulary, log ref, next token) over trained tokens, from the table."""
    table = engine.table.detach().clone().requires_grad_()
    total, count = 0.0, 0
    for t, trained in enumerate(batch.trained.tolist()):
        if trained:
            policy, ref = table[batch.input_ids[t]].log_softmax(-1), ref_table[batch.input_ids[t]].log_softmax(-1)
            total, count = total + per_token(policy, ref, int(batch.input_ids[t + 1])), count + 1
    return torch.autograd.grad(total / count, table)[0]


def whole_kl(policy, ref, token):
    return (policy.exp() * (policy - ref)).sum()


def top_two_kl(policy, ref, token):
    chosen = policy.topk(2).indices
    p, q = policy[chosen].exp(), ref[chosen].exp()
    return (p * (p / q).log()).sum() + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()


def k1(policy, ref, token):
    return policy[token] - ref[token]


def k3(policy, ref, token):
    return (ref[token] - policy[token]).exp() - 1 + policy[token] - ref[token]


TERMS = {
    "k1": ({"kl_loss_estimator": "k1"}, k1),
    "k3": ({}, k3),
    "k3+": ({"kl_loss_estimator": "k3+"}, lambda policy, ref, token: 0.5 * k1(policy, ref, token) ** 2),
    "top 2": ({"kl_loss_estimator": "full", "kl_top_k": 2}, top_two_kl),
    "whole": ({"kl_loss_estimator": "full", "kl_top_k": 0}, whole_kl),
}


@pytest.mark.parametrize("name", TERMS)
def test_the_gradient_of_the_term_is_that_of_its_formula(toolbox, make, name):
    """No rewards: nothing but the term pulls. One filtered token is neither in the sum nor in the count."""
    options, formula = TERMS[name]
    policy, reference, actor, ref = make(config(kl_loss_coef=0.3, **options))
    batch = toolbox.random_batch(0, 7)
    batch = replace(batch, rewards=torch.zeros(7), policy_mask=batch.loss_mask & (torch.arange(batch.num_tokens) != 2))
    batch = ready(actor, ref, batch)
    expected = slow_gradient(policy, batch, reference.table.detach(), formula)
    values = metric_values(actor.update(batch))
    assert torch.allclose(policy.gradients[0], 0.3 * expected, atol=1e-6)
    assert expected.norm() > 0.01
    assert values["actor/loss"] == 0
    assert math.isfinite(values["actor/kl_loss"])


def test_the_term_by_hand(toolbox, make):
    # one trained token; x = log pi - log ref = 0.2: k3 = e^-0.2 - 1 + 0.2 = 0.018731, gradient 1 - e^-0.2 = 0.181269
    policy, _, actor, _ = make(config(kl_loss_coef=2.0))
    batch = toolbox.make_batch([[1, 2]])
    logprob = policy.forward(batch).logprobs
    batch = actor.with_advantages(replace(batch, ref_logprobs=logprob - torch.tensor([0.2, 0.0])))
    distribution = policy.table.detach()[1].softmax(-1)
    values = metric_values(actor.update(batch))
    assert values["actor/kl_loss"] == pytest.approx(0.018731, abs=1e-6)
    assert values["actor/kl_coef"] == 0  # that of the penalty in the reward
    expected = -2.0 * 0.181269 * distribution
    expected[2] += 2.0 * 0.181269
    assert torch.allclose(policy.gradients[0][1], expected, atol=1e-5)


def test_a_token_that_a_filter_took_is_not_in_the_mean_that_is_logged(toolbox, make):
    policy, _, actor, _ = make(config(kl_loss_coef=1.0))
    batch = toolbox.make_batch([[1, 2, 3]])
    logprob = policy.forward(batch).logprobs
    batch = replace(
        batch, ref_logprobs=logprob - torch.tensor([0.2, 0.9, 0.0]), policy_mask=torch.tensor([True, False, False])
    )
    values = metric_values(actor.update(actor.with_advantages(batch)))
    assert values["actor/kl_loss"] == pytest.approx(0.018731, abs=1e-6)


@pytest.mark.parametrize(("correction", "exponent"), [("none", 0.0), ("old", 0.5), ("rollout", -0.3)])
def test_the_correction_is_by_the_old_policy_or_by_the_one_that_sampled(toolbox, make, correction, exponent):
    policy, _, actor, _ = make(config(kl_loss_coef=1.0, kl_loss_correction=correction, recompute_logprob=True))
    batch = toolbox.make_batch([[1, 2]])
    logprob = policy.forward(batch).logprobs
    only = torch.tensor([1.0, 0.0])
    batch = replace(
        batch,
        ref_logprobs=logprob - 0.2 * only,
        prox_logprobs=logprob - 0.5 * only,
        rollout_logprobs=logprob + 0.3 * only,
    )
    values = metric_values(actor.update(actor.with_advantages(batch)))
    assert values["actor/kl_loss"] == pytest.approx(0.018731 * math.exp(exponent), abs=1e-6)


@pytest.mark.parametrize("name", TERMS)
def test_any_cut_into_micro_batches_and_ranks_gives_the_same_update(toolbox, make, name):
    options = config(kl_loss_coef=0.4, **ADAPTIVE, **TERMS[name][0])
    batch = toolbox.random_batch(1, 10)
    alone, _, actor, ref = make(options)
    whole = ready(actor, ref, batch)
    metrics = metric_values(actor.update(whole) | batch_metrics(whole))
    shares = [list(range(6)), [], [6, 7, 8, 9]]
    group = toolbox.RankGroup(3)

    def rank_main(rank):
        engine, _, actor, ref = make(options, rank=rank, group=group, num_micro_batches=rank + 1)
        share = ready(actor, ref, toolbox.select(batch, shares[rank]))
        metrics = actor.update(share) | batch_metrics(share)
        return engine, metric_values(reduce_metrics(metrics, engine)), actor.state()

    for engine, values, state in group.run(rank_main):
        assert torch.allclose(engine.gradients[0], alone.gradients[0], rtol=0, atol=1e-7)
        assert state.coefficients["kl_ctl"] == pytest.approx(actor.state().coefficients["kl_ctl"], rel=1e-9)
        for key in metrics.keys() - {"actor/optimizer_steps"}:
            assert values[key] == pytest.approx(metrics[key], abs=1e-5, nan_ok=True), key


def test_the_penalty_of_whole_distributions_is_in_the_reward(toolbox, make):
    """A = reward to go: the last token's is -kl_ctl KL there."""
    for count, formula in ((0, whole_kl), (2, top_two_kl)):
        options = config(kl_ctl=0.5, kl_estimator="full", kl_top_k=count)
        policy, reference, actor, ref = make(options)
        batch = ready(actor, ref, toolbox.make_batch([[1, 2, 3]]))
        expected = [
            float(formula(policy.table.detach()[t].log_softmax(-1), reference.table.detach()[t].log_softmax(-1), None))
            for t in (1, 2)
        ]
        assert batch.columns[REF_KL].tolist() == pytest.approx([*expected, 0], abs=1e-6)
        assert batch.advantages.tolist() == pytest.approx([-0.5 * sum(expected), -0.5 * expected[1], 0], abs=1e-6)
        assert PROX_CANDIDATES not in batch.columns
        assert REF_CANDIDATES not in batch.columns
        actor.update(batch)
        assert metric_values(batch_metrics(batch))["batch/ref_kl_full"] == pytest.approx(sum(expected) / 2)


def test_candidates_cost_a_forward_pass_and_change_no_old_policy(toolbox, make):
    policy, _, actor, ref = make(config(kl_loss_coef=1.0, kl_loss_estimator="full", kl_top_k=2))
    batch = actor.with_prox_logprobs(toolbox.random_batch(2, 4))
    assert policy.num_forwards == 1
    assert batch.prox_logprobs is None
    assert batch.columns[CANDIDATE_IDS].shape == (batch.num_tokens, 2)
    batch = ref.with_ref_logprobs(batch)
    assert batch.columns[REF_CANDIDATES].shape == (batch.num_tokens, 2)
    whole = make(config(kl_loss_coef=1.0, kl_loss_estimator="full", kl_top_k=0))[2]
    assert CANDIDATE_IDS not in whole.with_prox_logprobs(toolbox.random_batch(2, 4)).columns
    nothing = toolbox.random_batch(2, 4)
    assert make(config(kl_loss_coef=1.0))[2].with_prox_logprobs(nothing) is nothing


def test_a_rank_without_a_trained_token_reports_the_same_names(toolbox, make):
    names = []
    for length in (1, 3):  # of the prompt: with 3 nothing is left to train on, and no step is taken
        _, _, actor, ref = make(config(kl_loss_coef=1.0))
        batch = ready(actor, ref, toolbox.make_batch([[1, 2, 3]], prompt_length=length))
        names.append(actor.update(batch).keys() - {"actor/grad_norm"})
    assert names[0] == names[1]
    assert "actor/kl_loss" in names[0]


def test_a_bad_reference_stops_every_rank_with_one_line(toolbox, make):
    _, _, actor, ref = make(config(kl_loss_coef=1.0, kl_loss_estimator="full", kl_top_k=0))
    batch = ref.with_ref_logprobs(actor.with_prox_logprobs(toolbox.random_batch(3, 4)))
    place = torch.nonzero(batch.loss_mask)[0]
    with raises_code("algorithm.not_finite", "ref_full_kl"):
        actor.with_advantages(batch.with_column(REF_KL, batch.columns[REF_KL].index_fill(0, place, NAN)))


def test_steps_out_of_order_are_named(toolbox, make):
    batch = toolbox.random_batch(4, 3)
    _, _, actor, ref = make(config(kl_loss_coef=1.0))
    with raises_code("training.stage_missing", "ref_logprobs"):
        actor.update(actor.with_advantages(batch))
    _, _, actor, ref = make(config(kl_loss_coef=1.0, kl_loss_estimator="full", kl_top_k=2))
    with raises_code("training.stage_missing", "prox_candidate_logprobs"):
        ref.with_ref_logprobs(batch)
    plain = PPOActor(toolbox.TableEngine(), config(kl_loss_coef=1.0, kl_loss_estimator="full", kl_top_k=2))
    with raises_code("training.stage_missing", "candidate_logprobs"):
        plain.with_prox_logprobs(batch)


# --- the adaptive coefficient


def test_a_batch_is_penalised_with_the_coefficient_that_those_before_it_made(toolbox, make):
    """k1 of 0.5 and 0.2 (mean 0.35 above the target of 0.1: e = 0.2), one sequence: beta 0.5 -> 0.5 (1 + 0.2 / 20)."""
    _, _, actor, _ = make(config(**ADAPTIVE))
    batch = replace(toolbox.make_batch([[1, 2, 3]], rewards=[1.0]), ref_logprobs=torch.tensor([-2.0, -1.7, 0.0]))
    first, second = actor.with_advantages(batch), actor.with_advantages(batch)
    assert first.advantages.tolist() == pytest.approx([1 - 0.5 * 0.7, 1 - 0.5 * 0.2, 0])
    assert second.advantages.tolist() == pytest.approx([1 - 0.505 * 0.7, 1 - 0.505 * 0.2, 0])
    assert metric_values(actor.update(second))["actor/kl_coef"] == pytest.approx(0.505)
    assert actor.state().coefficients == {"kl_ctl": pytest.approx(0.505 * 1.01)}


def test_the_measure_decides_what_the_target_is_compared_with(toolbox, make):
    """Mean token 0.35, whole answer 0.7: a target of 0.5 lies between."""
    result = {}
    for measure in ("token-mean", "sequence-sum"):
        control = KLControlConfig(type="adaptive", target=0.5, horizon=20.0, measure=measure)
        _, _, actor, _ = make(config(kl_ctl=0.5, kl_control=control))
        batch = replace(toolbox.make_batch([[1, 2, 3]]), ref_logprobs=torch.tensor([-2.0, -1.7, 0.0]))
        actor.with_advantages(batch)
        result[measure] = actor.state().coefficients["kl_ctl"]
    assert result == {"token-mean": pytest.approx(0.5 * (1 - 0.2 / 20)), "sequence-sum": pytest.approx(0.5 * 1.01)}


def test_only_adaptive_coefficients_are_saved_and_they_continue(toolbox, make):
    _, _, actor, ref = make(config(**ADAPTIVE))
    for seed in range(3):
        ready(actor, ref, toolbox.random_batch(seed, 5))
    state = actor.state()
    assert state.coefficients["kl_ctl"] != 0.5
    again = make(config(**ADAPTIVE))[2]
    again.load_state(state)
    assert again.state() == state
    again.load_state(ActorState())
    assert again.state().coefficients == {"kl_ctl": 0.5}
    fixed = make(config(kl_ctl=0.5))[2]
    fixed.load_state(state)
    assert fixed.state() == ActorState()


# --- resets


def test_the_reference_is_reset_to_the_policy_every_n_steps(toolbox, make):
    policy, reference, actor, _ = make(config(kl_ctl=0.1))
    for with_optimizer in (False, True):
        resets = ReferenceResets(policy=policy, every_steps=2, with_optimizer=with_optimizer)
        ref = Reference(reference, config(), resets=resets)
        assert not ref.is_frozen
        for step in range(4):
            before = reference.table.detach().clone()
            actor.update(ready(actor, ref, toolbox.random_batch(step, 5)), step=step)
            is_due = step in (1, 3)
            assert ref.after_update(step + 1)["ref/reset"].value == is_due
            assert torch.equal(reference.table, policy.table if is_due else before)
        assert len(policy.resets) == (2 if with_optimizer else 0)


def test_without_resets_nothing_is_copied_and_nothing_logged(make):
    _, reference, _, ref = make(config(kl_ctl=0.1))
    before = reference.table.detach().clone()
    assert ref.is_frozen
    assert ref.after_update(1) == {}
    assert torch.equal(reference.table, before)


def test_a_reference_of_another_shape_cannot_be_reset(toolbox, make):
    policy, reference, _, _ = make(config(kl_ctl=0.1))
    reference.table = torch.zeros(2, 2)
    with raises_code("model.weights_do_not_fit", "ref_reset_steps"):
        Reference(reference, config(), resets=ReferenceResets(policy=policy, every_steps=1, with_optimizer=False))


def test_distance_metrics_by_hand(toolbox):
    # k1: 0.5, 0.2 | 1.0; k3 = e^-x - 1 + x
    batch = toolbox.make_batch([[1, 2, 3], [1, 2], [4]])
    batch = replace(batch, ref_logprobs=torch.tensor([-2.0, -1.7, 0.0, -2.5, 0.0, 0.0]))
    values = metric_values(batch_metrics(batch))
    assert values["batch/ref_kl_k1"] == pytest.approx(1.7 / 3, abs=1e-6)
    assert values["batch/ref_kl"] == pytest.approx((0.106531 + 0.018731 + 0.367879) / 3, abs=1e-6)
    assert values["batch/ref_kl_sequence"] == pytest.approx(1.7 / 2, abs=1e-6)
    assert values["batch/ref_kl_sequence_max"] == pytest.approx(1.0, abs=1e-6)
