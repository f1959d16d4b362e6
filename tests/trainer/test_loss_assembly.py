"""The whole policy loss against its formula in loops, in any cut into micro-batches and ranks, with every term on."""

import random
from dataclasses import asdict

import orjson
import pytest
import torch

from areal.algorithm.advantage import RETURNS, VALUES
from areal.api.batch import TokenOutputs
from areal.api.config import AdaptiveEntropyConfig, NormConfig, PPOActorConfig, PPOCriticConfig
from areal.api.config.policy_losses import AGGREGATIONS
from areal.api.metrics import metric_values
from areal.trainer.actor import PPOActor
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.policy_update import output_spec
from areal.trainer.recover import ActorState
from areal.trainer.roles import Critic
from tests.expect import raises_code

GROUP_MEAN = NormConfig(mean_level="group", std_level=None)
SCALED = ("token-sum", "seq-mean-token-sum-norm")
PLAIN = {"use_decoupled_loss": False, "entropy_coef": 0.0, "positive_nll_coef": 0.0}
TERMS = {
    "use_decoupled_loss": True,
    "behav_imp_weight_cap": 1.4,
    "entropy_coef": 0.2,
    "positive_nll_coef": 0.3,
    "mask_truncated": True,
    "dynamic_sampling": True,
    "shared_prefix_min_tokens": 1,
}


def config(**options):
    aggregation = options.get("loss_aggregation", "token-mean")
    scale = {"loss_scale_tokens": 5} if aggregation in SCALED else {}
    defaults = {"path": "table", "kl_ctl": 0.0, "ppo_n_minibatches": 1, "reward_norm": GROUP_MEAN}
    return PPOActorConfig(**defaults | scale | options)


@pytest.fixture
def rich(toolbox):
    """A table engine whose entropy has a gradient, and which gives the clamped one, if it is asked for."""

    class Rich(toolbox.TableEngine):
        clamp = 0.0

        def outputs(self, batch):
            result = super().outputs(batch)
            if self.critic:
                return result
            ends = torch.zeros_like(batch.loss_mask)
            ends[batch.cu_seqlens[1:].long() - 1] = True
            entropy = torch.where(ends, 0.0, entropies(self.table[batch.input_ids], 0))
            dropped = int(self.clamp * toolbox.VOCABULARY)
            clamped = torch.where(ends, 0.0, entropies(self.table[batch.input_ids], dropped))
            return TokenOutputs(
                logprobs=result.logprobs,
                entropy=entropy.detach() if self.clamp else entropy,
                clamped_entropy=clamped if self.clamp else None,
            )

    return Rich


def entropies(rows, num_dropped):
    kept = rows.sort(-1, descending=True).values[:, : rows.shape[1] - num_dropped]
    distribution = kept.log_softmax(-1)
    return -(distribution.exp() * distribution).sum(-1)


def prepared(actor, batch):
    batch = actor.with_prox_logprobs(batch)
    batch, filtered = actor.with_filters(batch)
    batch, _ = actor.with_correction(batch)
    return actor.with_advantages(batch), filtered


def loss_by_formula(table, batch, options, dropped):
    """Token by token from the documentation, for a batch whose advantages and filters are there."""
    bounds = batch.cu_seqlens.tolist()
    sequences = []
    good = []
    for s in range(batch.num_sequences):
        terms = []
        for t in range(bounds[s], bounds[s + 1]):
            if not batch.trained[t]:
                continue
            row = table[int(batch.input_ids[t])]
            log_p = row.log_softmax(-1)[int(batch.input_ids[t + 1])]
            advantage = batch.advantages[t].double()
            if options.use_decoupled_loss:
                old, weight = batch.prox_logprobs[t], (batch.prox_logprobs[t] - batch.rollout_logprobs[t]).exp()
                weight = 0.0 if weight > options.behav_imp_weight_cap else float(weight)
            else:
                old, weight = batch.rollout_logprobs[t], 1.0
            ratio = (log_p - float(old)).exp()
            loss = weight * torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            loss = loss - options.entropy_coef * entropies(row[None], dropped)[0]
            terms.append(loss)
            if batch.rewards[s] > 0:
                good.append(-log_p)
        if terms:
            sequences.append(terms)
    length = options.loss_scale_tokens
    every = [term for terms in sequences for term in terms]
    total = {
        "token-mean": lambda: sum(every) / len(every),
        "token-sum": lambda: sum(every) / length,
        "seq-mean-token-sum": lambda: sum(sum(terms) for terms in sequences) / len(sequences),
        "seq-mean-token-mean": lambda: sum(sum(terms) / len(terms) for terms in sequences) / len(sequences),
        "seq-mean-token-sum-norm": lambda: sum(sum(terms) / length for terms in sequences) / len(sequences),
    }[options.loss_aggregation]()
    return total + options.positive_nll_coef * (sum(good) / len(good) if good else 0.0)


def shares_of(batch, world_size, dice):
    """Whole groups dealt to the ranks by chance; with more than two ranks one of them gets nothing."""
    owners = range(world_size - 1 if world_size > 2 else world_size)
    owner = {group: dice.choice(owners) for group in batch.group_ids.tolist()}
    places = [owner[group] for group in batch.group_ids.tolist()]
    return [[s for s, rank in enumerate(places) if rank == r] for r in range(world_size)]


@pytest.mark.parametrize("terms", [PLAIN, TERMS, TERMS | {"entropy_clamp": 0.4}], ids=["plain", "terms", "clamped"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_cut_gives_the_gradient_of_the_formula(toolbox, rich, aggregation, terms):
    options = config(loss_aggregation=aggregation, **terms)
    batch, dice = toolbox.random_batch(11, 16), random.Random(5)
    clamp = options.entropy_clamp
    table = toolbox.TableEngine().table
    whole, filtered = prepared(PPOActor(toolbox.TableEngine(), options), batch)
    loss_by_formula(table, whole, options, int(clamp * toolbox.VOCABULARY)).backward()
    assert terms is PLAIN or 0 < int(whole.trained.sum()) < int(batch.loss_mask.sum())
    expected_metrics = None
    for world_size in (1, 2, 3, 4):
        shares = shares_of(batch, world_size, dice)
        group = toolbox.RankGroup(world_size)

        def rank_main(rank, shares=shares, group=group):
            engine = rich(rank=rank, group=group, num_micro_batches=1 + (rank * 2 + len(shares)) % 5)
            engine.clamp = clamp
            actor = PPOActor(engine, options)
            share, filtered = prepared(actor, toolbox.select(batch, shares[rank]))
            metrics = actor.update(share) | filtered
            return engine, metric_values(reduce_metrics(metrics, engine))

        results = group.run(rank_main)
        expected_metrics = expected_metrics or results[0][1]
        for engine, values in results:
            assert torch.allclose(engine.gradients[0], table.grad, rtol=0, atol=1e-6)
            assert values == pytest.approx(expected_metrics, abs=1e-6)
    assert {name: metric.value for name, metric in filtered.items()} == {
        name: value for name, value in expected_metrics.items() if name.startswith("filter/")
    }


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_cut_gives_the_critic_the_gradient_of_the_formula(toolbox, aggregation):
    scale = {"loss_scale_tokens": 5} if aggregation in SCALED else {}
    options = PPOCriticConfig(
        path="table", ppo_n_minibatches=1, loss_aggregation=aggregation, huber_delta=0.8, eps_clip=None, **scale
    )
    generator = torch.Generator().manual_seed(3)
    batch = toolbox.random_batch(4, 9)
    returns = torch.randn(batch.num_tokens, generator=generator)
    batch = batch.with_column(VALUES, torch.zeros(batch.num_tokens)).with_column(RETURNS, returns)
    table = toolbox.TableEngine(critic=True).table
    sums = []
    for s in range(batch.num_sequences):
        rows = [t for t in range(batch.num_tokens) if batch.sequence_index[t] == s and batch.loss_mask[t]]
        errors = [(table[int(batch.input_ids[t])] - returns[t].double()).abs() for t in rows]
        sums.append([e**2 / 2 if e <= 0.8 else 0.8 * (e - 0.4) for e in errors])
    every = sum(len(terms) for terms in sums)
    total = {
        "token-mean": lambda: sum(map(sum, sums)) / every,
        "token-sum": lambda: sum(map(sum, sums)) / 5,
        "seq-mean-token-sum": lambda: sum(map(sum, sums)) / len(sums),
        "seq-mean-token-mean": lambda: sum(sum(terms) / len(terms) for terms in sums) / len(sums),
        "seq-mean-token-sum-norm": lambda: sum(map(sum, sums)) / 5 / len(sums),
    }[aggregation]()
    total.backward()
    for shares in ([list(range(9))], [[0, 5, 6], [1, 2, 3, 4, 7, 8]], [[], [3], [0, 1, 2, 4, 5, 6, 7, 8]]):
        group = toolbox.RankGroup(len(shares))

        def rank_main(rank, shares=shares, group=group):
            engine = toolbox.TableEngine(critic=True, rank=rank, group=group, num_micro_batches=2 + rank)
            Critic(engine, options).update(toolbox.select(batch, shares[rank]))
            return engine.gradients[0]

        for gradient in group.run(rank_main):
            assert torch.allclose(gradient, table.grad, rtol=0, atol=1e-6)


def test_the_terms_by_hand(toolbox, rich):
    # one token each after token 1, uniform over 6: H = -log pi = log 6; A = +-0.5, ratio 1: policy losses -0.5, 0.5
    engine = rich()
    with torch.no_grad():
        engine.table.zero_()
    actor = PPOActor(engine, config(recompute_logprob=True, entropy_coef=0.1, positive_nll_coef=0.5))
    batch, _ = prepared(actor, toolbox.make_batch([[1, 2], [1, 3]], rewards=[1.0, 0.0]))
    metrics = metric_values(actor.update(batch))
    log_6 = torch.tensor(6.0).log().item()
    assert metrics["actor/loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/bonus_entropy"] == pytest.approx(log_6, rel=1e-6)
    assert metrics["actor/positive_nll"] == pytest.approx(log_6, rel=1e-6)
    # entropy is stationary at the uniform distribution. Policy: -0.25 (e_2 - p) + 0.25 (e_3 - p). NLL of the first
    # answer only, whose own count is 1: -0.5 (e_2 - p) with p = 1/6
    expected = torch.zeros(6, dtype=torch.float64) + 0.5 / 6
    expected[2] -= 0.25 + 0.5
    expected[3] += 0.25
    assert torch.allclose(engine.gradients[0][1], expected, atol=1e-7)


def test_good_answers_without_trained_tokens_divide_nothing(toolbox, rich):
    """All positive answers are filtered away: the term is absent, not 0 / 0."""
    engine = rich()
    actor = PPOActor(engine, config(positive_nll_coef=0.5, mask_truncated=True))
    batch = toolbox.make_batch([[1, 2, 3], [1, 3, 2]], rewards=[1.0, 0.0], finished=[False, True])
    metrics = metric_values(actor.update(prepared(actor, batch)[0]))
    assert engine.gradients[0].isfinite().all()
    assert metrics["actor/optimizer_steps"] == 1


def test_the_engine_must_give_what_the_bonus_needs(toolbox, rich):
    batch = toolbox.random_batch(1, 4)
    for options in ({"entropy_coef": 0.1}, {"entropy_coef": 0.1, "entropy_clamp": 0.3}):
        actor = PPOActor(toolbox.TableEngine(), config(**options))
        with raises_code("training.stage_missing", "entropy"):
            actor.update(prepared(actor, batch)[0])
    assert not output_spec(config()).entropy_grad
    assert output_spec(config(entropy_coef=0.1)).entropy_grad
    spec = output_spec(config(entropy_coef=0.1, entropy_clamp=0.3))
    assert (spec.entropy_grad, spec.entropy_clamp) == (False, 0.3)
    assert output_spec(config(adaptive_entropy=AdaptiveEntropyConfig(coef_low=0.0))).entropy_grad


def test_the_bonus_flattens_the_distribution(toolbox, rich):
    engine = rich(lr=2.0)
    actor = PPOActor(engine, config(entropy_coef=1.0))
    batch = toolbox.make_batch([[1, 2], [1, 3]], rewards=[1.0, 1.0])
    before = metric_values(actor.update(prepared(actor, batch)[0]))["actor/entropy"]
    for _ in range(30):
        after = metric_values(actor.update(prepared(actor, batch)[0]))["actor/entropy"]
    assert before < after
    assert after == pytest.approx(torch.tensor(6.0).log().item(), abs=1e-3)


def test_the_adaptive_coefficient_is_the_same_on_every_rank_and_waits_for_its_first_step(toolbox, rich):
    adaptive = AdaptiveEntropyConfig(
        entropy_low=5.0, entropy_high=6.0, coef_lr=0.01, coef_low=0.0, coef_high=1.0, warmup_steps=1
    )
    options = config(entropy_coef=0.5, adaptive_entropy=adaptive)
    whole = toolbox.random_batch(3, 8)
    shares = [[0, 1], [2, 3, 4, 5, 6, 7], []]
    group = toolbox.RankGroup(3)

    def rank_main(rank):
        engine = rich(rank=rank, group=group, lr=0.0)
        actor = PPOActor(engine, options)
        batch = prepared(actor, toolbox.select(whole, shares[rank]))[0]
        return [metric_values(reduce_metrics(actor.update(batch, step=step), engine)) for step in range(4)]

    results = group.run(rank_main)
    entropy = results[0][0]["actor/bonus_entropy"]
    for values in results:
        coefs = [step["actor/entropy_coef"] for step in values]
        # the coefficient of a step moves after it; step 0 is the warm-up
        assert coefs == pytest.approx([0.5, 0.5, 0.5 + 0.01 * (5 - entropy), 0.5 + 0.02 * (5 - entropy)])


def test_nothing_to_learn_from_leaves_everything_on_every_rank_but_the_critic(toolbox, rich):
    """All groups uniform: no step of the policy, no move of the coefficient; values are learned all the same."""
    adaptive = AdaptiveEntropyConfig(entropy_low=5.0, entropy_high=6.0, coef_low=0.0, coef_high=1.0)
    options = config(entropy_coef=0.5, adaptive_entropy=adaptive, dynamic_sampling=True, ppo_n_minibatches=2)
    group = toolbox.RankGroup(2)
    batches = [
        toolbox.make_batch([[1, 2, 3], [1, 3, 2]], rewards=[1.0, 1.0]),
        toolbox.select(toolbox.random_batch(0, 2), []),
    ]

    def rank_main(rank):
        engine, critic_engine = rich(rank=rank, group=group), toolbox.TableEngine(critic=True, rank=rank, group=group)
        actor, critic = PPOActor(engine, options), Critic(critic_engine, PPOCriticConfig(path="t", ppo_n_minibatches=2))
        before = engine.table.detach().clone()
        batch, filtered = prepared(actor, critic.with_values(batches[rank]))
        metrics = metric_values(reduce_metrics(actor.update(batch) | filtered | critic.update(batch), engine))
        assert torch.equal(engine.table, before)
        assert len(critic_engine.gradients) > 0
        return metrics, metric_values(reduce_metrics(actor.update(batch, step=1), engine))

    for first, second in group.run(rank_main):
        assert (first["actor/update_skipped"], first["actor/optimizer_steps"]) == (1, 0)
        assert (first["filter/uniform_group_sequences"], first["filter/kept_tokens"]) == (2, 0)
        assert first["critic/optimizer_steps"] > 0
        assert second["actor/entropy_coef"] == 0.5


def test_training_goes_on_to_the_bit_from_the_state_of_a_step(toolbox, rich):
    """Weights, step and `state()` are all that an update depends on: epochs, coefficient and all."""
    adaptive = AdaptiveEntropyConfig(entropy_low=5.0, entropy_high=6.0, coef_lr=0.01, coef_low=0.0, coef_high=1.0)
    options = config(entropy_coef=0.1, adaptive_entropy=adaptive, ppo_n_minibatches=3, ppo_epochs=2)

    def steps(engine, actor, first, last):
        for step in range(first, last):
            actor.update(prepared(actor, toolbox.random_batch(step, 9))[0], step=step)
        return engine.table.detach().clone()

    engine = rich(lr=0.3)
    actor = PPOActor(engine, options, seed=7)
    middle = steps(engine, actor, 0, 2)
    state = ActorState(**orjson.loads(orjson.dumps(asdict(actor.state()))))
    unbroken = steps(engine, actor, 2, 4)

    def recovered(state, seed=7):
        engine = rich(lr=0.3)
        with torch.no_grad():
            engine.table.copy_(middle)
        actor = PPOActor(engine, options, seed=seed)
        actor.load_state(state)
        return steps(engine, actor, 2, 4)

    assert torch.equal(recovered(state), unbroken)
    assert state.coefficients["entropy_coef"] > 0.1
    assert not torch.equal(recovered(ActorState()), unbroken)
    assert not torch.equal(recovered(state, seed=8), unbroken)
