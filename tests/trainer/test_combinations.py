"""Options drawn together at random: what the configuration accepts trains, on one rank as on three with an empty share,
whole or in micro-batches, to the same weights and metrics."""

import math
import random
import threading
from dataclasses import replace

import pytest
import torch

from areal.api.config import GRPOConfig, NormConfig, PPOActorConfig
from areal.api.config.load import read
from areal.api.config.policy_losses import SequenceLevelOptions
from areal.api.config.schema import options_without_effect
from areal.api.config.validate import problems_of
from areal.api.data import BASELINE
from areal.api.metrics import merge_metrics, metric_values
from areal.trainer.actor import PPOActor
from areal.trainer.first_pass import may_share_first_pass
from areal.trainer.kl_term import uses_reference
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.ppo_loop import batch_metrics
from areal.trainer.roles import Critic, Reference
from areal.trainer.teacher import Teacher

MODEL = {"path": "x", "optimizer": {}, "ppo_n_minibatches": 1}
GROUP = {"mean_level": "group", "std_level": "group"}
CHOICES = {
    "actor": {
        "adv_estimator": [
            "grpo",
            "rloo",
            "gpg",
            "opo",
            "grpo_passk",
            "remax",
            "lite_ppo",
            "reinforce_plus_plus",
            "otb",
            "otb_tir",
        ],
        "reward_norm": [GROUP, {}],
        "adv_norm": [GROUP, {}, {"mean_leave1out": True}],
        "mask_no_eos_with_zero": [True],
        "discount": [0.9],
        "gae_length_alpha": [0.3],
        "kl_ctl": [0.05],
        "kl_estimator": ["k2", "k3", "abs"],
        "kl_control": [{"type": "adaptive", "target": 0.01, "horizon": 20.0}],
        "kl_loss_coef": [0.3],
        "kl_loss_estimator": ["k1", "k2+", "abs"],
        "kl_loss_correction": ["old", "rollout"],
        "use_decoupled_loss": [True],
        "recompute_logprob": [True],
        "prox_logp_method": ["loglinear", "metrics"],
        "m2_threshold": [0.05],
        "rollout_correction": [
            {"level": "sequence", "upper": 1.5},
            {"level": "segment", "mode": "mask", "upper": 1.2, "renormalize": True},
            {"upper": 1.2, "batch_normalize": True, "veto_threshold": 0.5},
            {"rules": [{"metric": "k3", "level": "sequence_mean", "upper": 0.05}]},
            {"mode": "mask", "lower": 1.0, "upper": 1.001, "renormalize": True},
            {"level": "sequence", "upper": 1.5, "batch_normalize": True, "normalize_by": "units"},
            {"mode": "mask", "upper": 1.2, "drop_from_ratio": True},
            {"mode": "mask", "upper": 1.2, "numerator": "training", "apply_weights": False},
        ],
        "pf_ppo": [{}, {"method": "max_min"}, {"method": "max_random"}],
        "policy_loss": ["gspo", "sapo", "cispo", "aipo", "gmpo", "clip_cov", "kl_cov", "topr", "kimi15", "dppo"],
        "ppo_epochs": [2],
        "loss_aggregation": ["token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
        "loss_scale_tokens": [7],
        "positive_nll_coef": [0.2],
        "mask_truncated": [True],
        "shared_prefix_min_tokens": [1],
        "dynamic_sampling": [True],
    },
    "critic": {"gae_lambda": [0.5], "warmup_steps": [1], "ppo_epochs": [2], "huber_delta": [0.1], "eps_clip": [None]},
    "teacher": {"rl_weight": [0.0], "loss_coef": [0.5], "advantage_coef": [0.3]},
    "ref": {},
}


def drawn(dice: random.Random, chance: float) -> dict:
    """The text of a configuration: some sections, some options of each."""
    tree = {"actor": {**MODEL, "kl_ctl": 0.0}}
    for name, options in CHOICES.items():
        if name == "actor" or dice.random() < 0.4:
            section = tree.setdefault(name, {**MODEL} if name == "critic" else {"path": "x"})
            section |= {key: dice.choice(values) for key, values in options.items() if dice.random() < chance}
    common = {"experiment_name": "a", "trial_name": "b", "allocation_mode": "native:d1+fsdp:d1", "reward_fn": "exact"}
    sampling = {"gconfig": {"n_samples": 4}, "train_dataset": {"path": "rows", "batch_size": 8}}
    return common | sampling | tree


def accepted(seed: int, *, workflow: str = "rlvr", fixed: dict | None = None) -> GRPOConfig:
    """The first configuration of the draw that has no problems; one that has loses what is complained of.

    `fixed`: options of the actor that no draw changes.
    """
    dice = random.Random(seed)
    tree = drawn(dice, dice.choice([0.1, 0.2, 0.3])) | {"workflow": workflow}
    for _ in range(200):
        tree["actor"] |= fixed or {}
        reading = read(GRPOConfig, tree)
        result = reading.problems
        if not result:
            return reading.config
        section, _, key = result[0].path.partition(".")
        if not key:
            del tree[section]
            continue
        name = key.split(".")[0].split("[")[0]
        if name == "kl_ctl":
            tree[section] |= {"kl_ctl": 0.0}
            name = "kl_control" if "kl_control" in tree[section] else "kl_loss_correction"
        is_free = name in tree[section] and name not in (fixed or {})
        tree[section].pop(name if is_free else dice.choice(list(CHOICES[section])), None)
    raise AssertionError(f"the problems of {tree} do not end: {result}")


def batch_of(toolbox, step: int):
    """Interleaved groups, tools in between, mixed versions, NaN where nothing is trained."""
    batch = toolbox.random_batch(40 + step, 12)
    dice = torch.Generator().manual_seed(step)
    mask = batch.loss_mask & (torch.rand(batch.num_tokens, generator=dice) > 0.15)
    return replace(
        batch,
        loss_mask=mask,
        rollout_logprobs=torch.where(mask, batch.rollout_logprobs, float("nan")),
        output_versions=torch.where(mask, torch.randint(0, 3, mask.shape, generator=dice), -1),
        version=2,
        group_ids=torch.tensor([7, 3, 7, 3, 9, 9, 9, 7, 3, 4, 4, 5]),
        columns={BASELINE: torch.rand(12, generator=dice)},
    )


def train(toolbox, config: GRPOConfig, *, ranks: int, num_micro_batches: int, shares_first_pass: bool = False):
    """Two steps on all ranks -> (the policy's table, metrics of each step, state of the role) of each rank."""
    group = toolbox.RankGroup(ranks)
    group._barrier = threading.Barrier(ranks, timeout=20)
    shares = [[7, 9], [], [3, 4, 5]] if ranks == 3 else [[7, 9, 3, 4, 5]]

    def on_rank(rank):
        def engine(**options):
            return toolbox.TableEngine(num_micro_batches=num_micro_batches, rank=rank, group=group, **options)

        def others(by):
            made = engine()
            made.table = (made.table.detach() + by * torch.arange(6.0, dtype=torch.float64)).requires_grad_()
            return made

        policy, critic = engine(), config.critic
        warmup, own_lambda = (critic.warmup_steps, critic.gae_lambda) if critic else (0, None)
        actor = PPOActor(
            policy,
            config.actor,
            seed=1,
            frozen_steps=warmup,
            critic_lambda=own_lambda,
            teacher=config.teacher,
            shares_first_pass=shares_first_pass,
        )
        values = Critic(engine(critic=True), critic, seed=1) if critic else None
        reference = Reference(others(0.2), config.actor) if config.ref and uses_reference(config.actor) else None
        teacher = Teacher(others(-0.3), config.teacher, policy=others(-0.3)) if config.teacher else None
        logged = []
        for step in range(2):
            whole = batch_of(toolbox, step)
            mine = [i for i, group_id in enumerate(whole.group_ids.tolist()) if group_id in shares[rank]]
            batch, filtered = actor.with_filters(toolbox.select(whole, mine))
            batch = actor.with_prox_logprobs(batch)
            batch = reference.with_ref_logprobs(batch) if reference else batch
            batch = teacher.with_teacher_logprobs(batch) if teacher else batch
            batch = values.with_values(batch) if values else batch
            batch, mismatch = actor.with_correction(batch)
            batch = actor.with_advantages(batch)
            batch, taught = teacher.with_advantages(batch) if teacher else (batch, {})
            chosen, resampled = actor.with_resampling(batch)
            result = resampled | actor.update(chosen, step=step)
            result |= values.update(chosen, step=step) if values else {}
            batch, measured = actor.after_update(batch)
            result = merge_metrics(result, filtered, mismatch, measured, taught, batch_metrics(batch))
            logged.append(metric_values(reduce_metrics(result, policy)))
        return policy.table.detach(), logged, actor.state()

    return group.run(on_rank)


@pytest.mark.parametrize("seed", range(24))
def test_what_is_accepted_trains_alike_however_it_is_cut(toolbox, seed):
    config = accepted(seed)
    (table, logged, state) = train(toolbox, config, ranks=1, num_micro_batches=1)[0]
    assert table.isfinite().all()
    for other_table, other_logged, other_state in train(toolbox, config, ranks=3, num_micro_batches=2):
        torch.testing.assert_close(other_table, table, rtol=1e-5, atol=1e-6)
        assert other_state.coefficients == pytest.approx(state.coefficients, rel=1e-6)
        for mine, others in zip(logged, other_logged, strict=True):
            assert mine.keys() == others.keys()
            assert not [name for name, value in mine.items() if math.isnan(value)]
            assert others == pytest.approx(mine, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("seed", range(60, 72))
def test_the_pass_of_the_first_minibatch_is_shared_without_another_result(toolbox, seed):
    around = {"use_decoupled_loss": True} if seed % 3 else {"recompute_logprob": True}
    around |= {"ppo_epochs": 1, "prox_logp_method": "recompute", "m2_threshold": None, "pf_ppo": None}
    around["ppo_n_minibatches"] = 1 + seed % 3
    draws = (accepted(seed + 1000 * number, fixed=around) for number in range(100))
    config = next(filter(may_share_first_pass, draws))
    for ranks in (1, 3):
        both = [
            train(toolbox, config, ranks=ranks, num_micro_batches=2, shares_first_pass=shares)
            for shares in (False, True)
        ]
        for (table, logged, _), (other_table, other_logged, _) in zip(*both, strict=True):
            torch.testing.assert_close(other_table, table, rtol=1e-6, atol=1e-7)
            for mine, others in zip(logged, other_logged, strict=True):
                assert mine.keys() == others.keys()
                assert others == pytest.approx(mine, rel=1e-5, abs=1e-6)


def test_one_minibatch_alone_needs_no_proximal_pass(toolbox):
    config = PPOActorConfig(path="x", use_decoupled_loss=True, kl_ctl=0.0, ppo_n_minibatches=1)
    assert may_share_first_pass(GRPOConfig(actor=config))
    batch, computed = batch_of(toolbox, 0), []
    for number in (1, 2, 4):
        engine = toolbox.TableEngine()
        actor = PPOActor(engine, replace(config, ppo_n_minibatches=number), shares_first_pass=True)
        result = actor.with_prox_logprobs(batch)
        computed.append(engine.num_forwards)
        assert result.prox_logprobs is None or result.prox_logprobs[batch.loss_mask].isfinite().all()
    assert computed == [0, 1, 1]


def with_default(config, path: str):
    """`config` with the option at `path` at its default."""
    name, _, rest = path.partition(".")
    default = getattr(type(config)(), name)
    return replace(config, **{name: with_default(getattr(config, name), rest) if rest else default})


OFTEN_WITHOUT_EFFECT = {
    "c_clip": 3.0,
    "eps_clip_higher": 0.3,
    "importance_sampling_level": "sequence",
    "sequence_level": SequenceLevelOptions(gradient="own", max_log_ratio=0.1),
    "behav_imp_weight_cap": 1.01,
    "gae_lambda": 0.5,
    "overlong_tokens": 3,
    "overlong_penalty_factor": 2.0,
    "entropy_clamp": 0.4,
    "kl_top_k": 2,
    "prox_logp_method": "metrics",
    "adv_norm": NormConfig(),
}


@pytest.mark.parametrize("seed", range(40))
def test_an_option_without_effect_changes_no_weight(toolbox, seed):
    dice, config = random.Random(seed), accepted(1000 + seed)
    names = [name for name in OFTEN_WITHOUT_EFFECT if dice.random() < 0.6]
    inputs = replace(config, actor=replace(config.actor, **{name: OFTEN_WITHOUT_EFFECT[name] for name in names}))
    config = config if list(problems_of(inputs)) else inputs
    plain = config
    for entry in options_without_effect(config):
        plain = with_default(plain, entry.path)
    assert not options_without_effect(plain)
    table, without = (train(toolbox, each, ranks=1, num_micro_batches=1)[0][0] for each in (config, plain))
    assert torch.equal(table, without), [item.path for item in options_without_effect(config)]
