"""A teacher beside the policy: what it adds to advantages and loss, and that ranks and cuts do not matter."""

import math

import pytest
import torch

from areal.api.batch import CANDIDATE_IDS, TokenOutputs
from areal.api.config import PPOActorConfig, TeacherConfig, TeacherServersConfig
from areal.api.config.schema import options_without_effect
from areal.api.errors import StageError
from areal.api.metrics import metric_values
from areal.trainer.actor import PPOActor
from areal.trainer.teacher import Teacher, distillation_loss
from areal.trainer.teacher_servers import TEACHER_IDS, TEACHER_LOGPROBS, TEACHER_TOP
from tests.expect import raises_code


def teacher_config(**options):
    return TeacherConfig(**{"path": "table"} | options)


def actor_config(**options):
    return PPOActorConfig(
        **{"path": "table", "kl_ctl": 0.0, "ppo_n_minibatches": 1, "recompute_logprob": True} | options
    )


def another_table(toolbox, **options):
    engine = toolbox.TableEngine(**options)
    with torch.no_grad():
        engine.table.copy_(torch.randn(engine.table.shape, generator=torch.Generator().manual_seed(1)).double())
    return engine


def prepared(toolbox, engine, batch, config, *, teacher_engine):
    actor = PPOActor(engine, actor_config(), teacher=config)
    teacher = Teacher(teacher_engine, config, policy=engine)
    batch = teacher.with_teacher_logprobs(actor.with_prox_logprobs(batch))
    batch, metrics = teacher.with_advantages(actor.with_advantages(batch))
    return actor, batch, metrics


def test_a_teacher_equal_to_the_policy_changes_nothing(toolbox):
    batch = toolbox.random_batch(1, 5)
    config = teacher_config(advantage_coef=3.0, loss_coef=2.0)
    plain, taught = toolbox.TableEngine(), toolbox.TableEngine()
    actor = PPOActor(plain, actor_config())
    alone = actor.with_advantages(actor.with_prox_logprobs(batch))
    actor.update(alone)
    pupil, with_teacher, metrics = prepared(toolbox, taught, batch, config, teacher_engine=toolbox.TableEngine())
    pupil.update(with_teacher)
    assert torch.allclose(with_teacher.advantages, alone.advantages, atol=1e-6)
    assert torch.allclose(taught.gradients[0], plain.gradients[0], atol=1e-6)
    assert metric_values(metrics)["teacher/kl"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("options", [{"advantage_coef": 1.0}, {"advantage_coef": 0.0, "loss_coef": 1.0}])
def test_learning_from_the_teacher_alone_lowers_the_divergence(toolbox, options):
    config = teacher_config(rl_weight=0.0, **options)
    engine, teacher_engine = toolbox.TableEngine(lr=0.5), another_table(toolbox)
    result = []
    for _ in range(6):
        actor, batch, metrics = prepared(
            toolbox, engine, toolbox.random_batch(2, 40), config, teacher_engine=teacher_engine
        )
        actor.update(batch)
        result.append(metric_values(metrics)["teacher/kl"])
    assert result == sorted(result, reverse=True)
    assert result[-1] < 0.9 * result[0]


def test_the_loss_term_has_the_gradient_of_its_estimator(toolbox):
    # k2: x grad log pi with x = log pi - log T = -1 - -3 = 2, times the coefficient 5
    logprobs = torch.tensor([-1.0, 0.0], requires_grad=True)
    batch = toolbox.make_batch([[1, 2]], rewards=[1.0]).with_column(TEACHER_LOGPROBS, torch.tensor([-3.0, 0.0]))
    losses, stats = distillation_loss(TokenOutputs(logprobs=logprobs), batch, teacher_config(loss_coef=5.0))
    losses.sum().backward()
    assert logprobs.grad.tolist() == [10.0, 0.0]
    assert stats["teacher_loss"].values.tolist() == [2.0, 0.0]


def test_any_cut_gives_the_same_gradient_and_names(toolbox):
    batch, config = toolbox.random_batch(4, 9), teacher_config(loss_coef=0.5)
    result = []
    for count in (1, 3, 11):
        engine = toolbox.TableEngine(num_micro_batches=count)
        actor, ready, _ = prepared(toolbox, engine, batch, config, teacher_engine=another_table(toolbox))
        metrics = actor.update(ready)
        result.append((engine.gradients[0], metric_values(metrics)))
    for gradient, values in result[1:]:
        assert torch.allclose(gradient, result[0][0], rtol=0, atol=1e-9)
        assert values == pytest.approx(result[0][1], abs=1e-6)
    assert "actor/teacher_loss" in result[0][1]


def test_a_rank_without_sequences_reports_the_same_names(toolbox):
    batch, config = toolbox.random_batch(4, 3), teacher_config(loss_coef=0.5)
    names = []
    for share in (batch, toolbox.select(batch, [])):
        actor, ready, metrics = prepared(
            toolbox, toolbox.TableEngine(), share, config, teacher_engine=another_table(toolbox)
        )
        names.append(set(metrics) | set(actor.update(ready)))
    assert names[0] - {"actor/grad_norm"} == names[1] - {"actor/grad_norm"}


def test_numbers_that_are_not_finite_stop_the_run(toolbox):
    batch = toolbox.make_batch([[1, 2]], rewards=[1.0])
    actor = PPOActor(toolbox.TableEngine(), actor_config(), teacher=teacher_config())
    batch = actor.with_prox_logprobs(batch).with_column(TEACHER_LOGPROBS, torch.tensor([float("nan"), 0.0]))
    with raises_code("algorithm.not_finite", "teacher_logprobs"):
        actor.with_advantages(batch)


def test_a_teacher_without_effect_is_refused():
    assert "advantage_coef" in {path for path, *_ in teacher_config(advantage_coef=0.0).problems()}
    assert [item.path for item in options_without_effect(teacher_config(loss_estimator="k3"))] == ["loss_estimator"]
    assert not list(teacher_config().problems())


def test_the_loss_over_top_tokens_is_their_divergence_and_that_of_the_rest(toolbox):
    # policy (.5, .3, rest .2), teacher (.25, .5, rest .25)
    policy = torch.tensor([[0.5, 0.3], [1.0, 1.0]]).log().requires_grad_()
    batch = toolbox.make_batch([[1, 2]], rewards=[1.0])
    batch = batch.with_column(TEACHER_TOP, torch.tensor([[0.25, 0.5], [1.0, 1.0]]).log())
    servers = [TeacherServersConfig(server_addrs=["localhost:1"])]
    config = TeacherConfig(servers=servers, top_k=2, loss_coef=2.0)
    losses, stats = distillation_loss(TokenOutputs(candidate_logprobs=policy), batch, config)
    expected = 0.5 * math.log(2) + 0.3 * math.log(0.6) + 0.2 * math.log(0.8)
    assert stats["teacher_loss"].values.tolist() == pytest.approx([expected, 0.0], abs=1e-6)
    losses.sum().backward()
    # d/d log p of p (log p - log q) + r (log r - log s) with r = 1 - sum p: p (log(p/q) - log(r/s))
    gradient = [2 * 0.5 * (math.log(2) - math.log(0.8)), 2 * 0.3 * (math.log(0.6) - math.log(0.8))]
    assert policy.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)


def test_scores_of_servers_need_no_engine(toolbox):
    servers = [TeacherServersConfig(server_addrs=["localhost:1"])]
    teacher = Teacher(None, TeacherConfig(servers=servers, top_k=2, loss_coef=1.0), policy=toolbox.TableEngine())
    batch = toolbox.make_batch([[1, 2]], rewards=[1.0])
    batch = batch.with_column(TEACHER_IDS, torch.tensor([[3, 4], [0, 0]], dtype=torch.int32))
    ids = teacher.with_teacher_logprobs(batch).column(CANDIDATE_IDS)
    assert (ids.dtype, ids.tolist()) == (torch.int64, [[3, 4], [0, 0]])
    with pytest.raises(StageError, match="teacher_logprobs"):
        teacher.with_advantages(batch)


class Weights:
    """An engine with one weight."""

    def __init__(self, *values: float) -> None:
        self.values = torch.tensor(values)

    def named_weights(self, *, stored):
        assert stored
        yield "w", self.values

    def load_weights(self, weights):
        self.values = dict(weights)["w"]


def test_an_average_follows_the_policy():
    policy, average, frozen = Weights(1.0, -1.0), Weights(0.0, 1.0), Weights(0.0, 1.0)
    teacher = Teacher(average, teacher_config(average_decay=0.75, dtype="float32"), policy=policy)
    for _ in range(2):
        teacher.after_update()
        Teacher(frozen, teacher_config(), policy=policy).after_update()
    assert average.values.tolist() == [1 - 0.75**2, -1 + 2 * 0.75**2]
    assert frozen.values.tolist() == [0.0, 1.0]
    assert teacher.is_average
