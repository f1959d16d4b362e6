"""The update of a session does not depend on how it is cut into rows, for what the configuration accepts."""

import itertools
import random

import pytest
import torch

from areal.algorithm.aggregate import local_denominator, loss_scale, loss_weights
from areal.api.batch import TokenOutputs
from areal.api.config import GRPOConfig
from areal.api.config.load import read
from areal.api.config.policy_losses import AGGREGATIONS
from areal.api.metrics import merge_metrics, metric_values
from areal.api.registry import entries
from areal.data.pack import SESSION_IDS, SESSION_TOKENS, with_session_tokens
from areal.trainer.actor import PPOActor
from areal.trainer.kl_term import uses_reference
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.ppo_loop import batch_metrics
from areal.trainer.roles import Critic, Reference
from areal.trainer.teacher import Teacher
from tests.trainer import test_combinations
from tests.trainer.session_cases import CUTS, VOCABULARY, batch_of, batch_of_two

ESTIMATORS = tuple(name for name in entries("estimators") if name != "custom")
MEDIAN = {"name": "custom", "path": "areal.algorithm.advantage:median_baseline", "args": {"scale": 2.0}}
OF_LOSS = {name: {"policy_loss": {"name": name, "ratio": "token"}} for name in ("topr", "kimi15")}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """On tensors of some dozens of numbers the threads of torch cost five times the computation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(actor: dict, *, workflow: str = "agent", critic: dict | None = None, ref: bool = False):
    """-> (configuration, problems)"""
    tree = {
        "experiment_name": "a",
        "trial_name": "b",
        "allocation_mode": "native:d1+fsdp:d1",
        "workflow": workflow,
        "gconfig": {"n_samples": 4, "max_new_tokens": 12},
        "train_dataset": {"path": "rows", "batch_size": 8},
        "actor": {"path": "x", "optimizer": {}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, **actor},
    }
    tree |= {"critic": {"path": "x", "optimizer": {}, "ppo_n_minibatches": 1, **critic}} if critic is not None else {}
    tree |= {"ref": {"path": "x"}} if ref else {}
    reading = read(GRPOConfig, tree)
    return reading.config, reading.problems


def prefix_engine(toolbox, *, shift: float = 0.0, critic: bool = False):
    """log p(next | all tokens so far) in float64: a logit table of the last token plus one of the mean of all."""

    class PrefixEngine(toolbox.TableEngine):
        def logits(self, batch):
            rows = []
            for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
                each = self.table[batch.input_ids[start:end]]
                count = torch.arange(1, end - start + 1, dtype=torch.float64).reshape(-1, *[1] * (each.dim() - 1))
                rows.append(each + torch.tanh(each.cumsum(0) / count))
            return torch.cat(rows) if rows else self.table[batch.input_ids]

        def outputs(self, batch):
            ids = batch.input_ids
            last = torch.zeros_like(batch.loss_mask)
            last[batch.cu_seqlens[1:].long() - 1] = True
            if self.critic:
                return TokenOutputs(values=torch.where(last, 0.0, self.logits(batch)))
            distribution = self.logits(batch).log_softmax(-1)
            logprobs = distribution.gather(1, ids.roll(-1)[:, None]).squeeze(1)
            entropy = -(distribution.exp() * distribution).sum(-1)
            return TokenOutputs(
                logprobs=torch.where(last, 0.0, logprobs),
                entropy=torch.where(last, 0.0, entropy),
                squared_sums=torch.where(last, 0.0, distribution.exp().square().sum(-1).detach()),
            )

        def forward(self, batch):
            with torch.no_grad():
                return self.outputs(batch)

    engine = PrefixEngine(critic=critic, num_micro_batches=3, lr=0.5)
    table = engine.table.detach()
    engine.table = (table + shift * torch.arange(float(VOCABULARY), dtype=torch.float64)).requires_grad_()
    return engine


def train(toolbox, config, cut: str, **of_batch):
    """One step on the batch -> (policy's table, critic's table, metrics)."""
    policy, critic = prefix_engine(toolbox), prefix_engine(toolbox, critic=True)
    batch = batch_of(cut, **of_batch)
    actor = PPOActor(policy, config.actor, seed=1, max_new_tokens=12, teacher=config.teacher)
    values = Critic(critic, config.critic, seed=1) if config.critic else None
    reference = None
    if config.ref and uses_reference(config.actor):
        reference = Reference(prefix_engine(toolbox, shift=0.2), config.actor)
    batch = actor.with_prox_logprobs(actor.with_filters(batch)[0])
    batch = reference.with_ref_logprobs(batch) if reference else batch
    teacher = Teacher(prefix_engine(toolbox, shift=-0.3), config.teacher, policy=policy) if config.teacher else None
    batch = teacher.with_teacher_logprobs(batch) if teacher else batch
    batch = values.with_values(batch) if values else batch
    batch, mismatch = actor.with_correction(batch)
    batch = actor.with_advantages(batch)
    batch, taught = teacher.with_advantages(batch) if teacher else (batch, {})
    result = actor.update(batch, step=5)
    result |= values.update(batch, step=5) if values else {}
    result = merge_metrics(result, mismatch, taught, batch_metrics(batch))
    of_rows = ("batch/num_sequences", "batch/num_tokens", "batch/sequence_length", "batch/sequence_length_max")
    metrics = metric_values(reduce_metrics(result, policy))
    return policy.table.detach(), critic.table.detach(), {k: v for k, v in metrics.items() if k not in of_rows}


def assert_invariant(toolbox, config, *, moves: bool = True, **of_batch) -> None:
    start = prefix_engine(toolbox).table.detach()
    first = train(toolbox, config, CUTS[0], **of_batch)
    assert first[0].isfinite().all()
    for cut in CUTS[1:]:
        other = train(toolbox, config, cut, **of_batch)
        torch.testing.assert_close(other[0], first[0], rtol=0, atol=1e-7)
        torch.testing.assert_close(other[1], first[1], rtol=0, atol=1e-7)
        assert other[2] == pytest.approx(first[2], rel=1e-6, abs=1e-9)
    assert not moves or not torch.equal(first[0], start)


def combination(estimator: str, loss: str, aggregation: str) -> dict:
    actor = {"adv_estimator": estimator, "policy_loss": loss, "loss_aggregation": aggregation, "loss_scale_tokens": 7}
    actor |= {"adv_estimator": MEDIAN} if estimator == "custom" else {}
    actor |= {"policy_loss": {"name": "custom", "path": "areal.algorithm.losses.ppo:loss"}} if loss == "custom" else {}
    return actor | OF_LOSS.get(loss, {})


INVARIANT_LOSSES = [name for name in entries("losses") if name not in ("gspo", "gmpo")]


DIAGONAL = [
    (estimator, INVARIANT_LOSSES[i % len(INVARIANT_LOSSES)], AGGREGATIONS[i % len(AGGREGATIONS)])
    for i, estimator in enumerate(ESTIMATORS)
]
"""Every estimator, loss and aggregation at least once."""


class TestEachOption:
    @pytest.mark.parametrize(("estimator", "loss", "aggregation"), DIAGONAL)
    def test_estimators_losses_and_aggregations(self, toolbox, estimator, loss, aggregation):
        config, _ = config_of(combination(estimator, loss, aggregation) | {"recompute_logprob": True})
        assert_invariant(toolbox, config, with_turn_rewards=estimator != "grpo", mask_before=1)

    def test_the_critic_counts_sessions(self, toolbox):
        config, _ = config_of({"adv_estimator": "gae"}, critic={"loss_aggregation": "seq-mean-token-mean"})
        assert_invariant(toolbox, config)

    def test_gae_with_a_critic(self, toolbox):
        actor = {"adv_estimator": "gae", "gae_lambda": 0.7, "discount": 0.9, "mask_no_eos_with_zero": True}
        config, problems = config_of(actor, critic={})
        assert not problems
        assert_invariant(toolbox, config, with_turn_rewards=True)

    def test_several_minibatches_keep_sessions_whole(self, toolbox):
        config, _ = config_of({"adv_estimator": "grpo", "ppo_n_minibatches": 3, "ppo_epochs": 2})
        assert_invariant(toolbox, config)

    def test_rows_count_when_the_user_wants_it(self, toolbox):
        config, _ = config_of({"loss_aggregation": "seq-mean-token-mean", "loss_unit": "row"})
        tables = [train(toolbox, config, cut)[0] for cut in ("tree", "per_turn")]
        assert not torch.allclose(*tables, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [  # 6 and 2 trained tokens, 2 sessions, L = 4
        ("token-mean", [6 / 8, 2 / 8]),
        ("token-sum", [6 / 4, 2 / 4]),
        ("seq-mean-token-mean", [1 / 2, 1 / 2]),
        ("seq-mean-token-sum", [6 / 2, 2 / 2]),
        ("seq-mean-token-sum-norm", [6 / (4 * 2), 2 / (4 * 2)]),
    ],
)
def test_the_weight_of_a_session_does_not_depend_on_its_rows(aggregation, weights, cut):
    """The table of docs/agents.md."""
    batch = batch_of_two(cut)
    assert batch.num_sequences == (4 if cut == "per_turn" else 3)
    batch = with_session_tokens(batch, batch.loss_mask)
    places = batch.loss_mask, batch.sequence_index, batch.num_sequences, aggregation
    denominator = float(local_denominator(*places, 4, batch.columns[SESSION_TOKENS]))
    scale = loss_scale(aggregation, denominator, 4) / denominator
    of_token = loss_weights(*places, batch.columns[SESSION_TOKENS]).double() * scale
    owners = torch.unique(batch.columns[SESSION_IDS], return_inverse=True)[1][batch.sequence_index]
    assert torch.zeros(2, dtype=torch.float64).index_add(0, owners, of_token).tolist() == pytest.approx(weights)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_combination(toolbox, estimator):
    for loss, aggregation in itertools.product(INVARIANT_LOSSES, AGGREGATIONS):
        config, _ = config_of(combination(estimator, loss, aggregation) | {"recompute_logprob": True})
        assert_invariant(toolbox, config, seed=len(loss), with_turn_rewards=True)


def check_random(toolbox, seed: int) -> None:
    """An accepted combination of random options."""
    config = test_combinations.accepted(seed, workflow="agent")
    floor = random.Random(seed).randrange(2)
    of_batch = {"seed": seed % 3, "with_turn_rewards": bool(seed % 2), "mask_before": floor}
    assert_invariant(toolbox, config, moves=False, **of_batch)  # a filter may remove every token


@pytest.mark.parametrize("seed", range(4))
def test_what_is_accepted_for_agents_does_not_depend_on_the_cut(toolbox, seed):
    check_random(toolbox, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 200))
def test_many_accepted_combinations(toolbox, seed):
    check_random(toolbox, seed)


@pytest.mark.parametrize(
    ("actor", "path"),
    [
        ({"policy_loss": "gspo"}, "policy_loss"),
        ({"policy_loss": "gmpo"}, "policy_loss"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"policy_loss": "topr"}, "policy_loss.ratio"),
        ({"policy_loss": "kimi15"}, "policy_loss.ratio"),
        ({"shared_prefix_min_tokens": 1}, "shared_prefix_min_tokens"),
        ({"pf_ppo": {}}, "pf_ppo"),
        (
            {"rollout_correction": {"numerator": "training", "veto_threshold": 0.1, "apply_weights": False}},
            "rollout_correction.veto_threshold",
        ),
        (
            {"recompute_logprob": True, "prox_logp_method": "loglinear", "rollout_correction": {"level": "sequence"}},
            "rollout_correction.level",
        ),
    ],
)
def test_what_depends_on_the_cut_is_refused_for_agents_only(actor, path):
    _, problems = config_of(actor)
    assert [(problem.path, problem.code) for problem in problems] == [(f"actor.{path}", "agent.cut_not_invariant")]
    _, problems = config_of(actor, workflow="rlvr")
    assert "agent.cut_not_invariant" not in {problem.code for problem in problems}
