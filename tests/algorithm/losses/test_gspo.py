"""GSPO: the ratio of a sequence, in every form that another system gives it."""

import math

import pytest
import torch


def slow_gspo(rows, t, *, advantage="mean", gradient="shared", cap=math.inf, low=0.2, high=0.2, c_clip=None):
    """Eq. 5 and 7 of the paper; own: eq. 14, sg(s) pi / sg(pi)."""
    log_ratios = [(rows.theta if gradient == "shared" else rows.fixed)[u] - rows.old[u] for u in range(len(rows.old))]
    log_s = rows.mean(log_ratios, t)
    if gradient == "own":
        log_s += rows.theta[t] - rows.fixed[t]
    s = math.exp(min(log_s, cap))
    a = rows.mean(rows.advantages, t) if advantage == "mean" else rows.advantages[t]
    loss = max(-a * s, -a * min(max(s, 1 - low), 1 + high))
    return loss if c_clip is None else min(loss, c_clip * abs(a))


@pytest.mark.parametrize("name", [{"policy_loss": "gspo"}, {"importance_sampling_level": "sequence"}])
@pytest.mark.parametrize("advantage", ["mean", "token"])
@pytest.mark.parametrize("gradient", ["shared", "own"])
def test_it_conforms(kit, name, advantage, gradient):
    kit.conforms(
        lambda rows, t: slow_gspo(rows, t, advantage=advantage, gradient=gradient, low=0.1, high=0.3),
        **name,
        eps_clip=0.1,
        eps_clip_higher=0.3,
        sequence_level=kit.section("sequence_level", advantage=advantage, gradient=gradient),
    )


@pytest.mark.parametrize("gradient", ["shared", "own"])
def test_the_cap_and_the_dual_clip_conform(kit, gradient):
    kit.conforms(
        lambda rows, t: slow_gspo(rows, t, gradient=gradient, cap=0.05, low=0.05, high=-1 + math.inf, c_clip=1.01),
        policy_loss="gspo",
        eps_clip=0.05,
        eps_clip_higher=-1.0,
        c_clip=1.01,
        sequence_level=kit.section("sequence_level", gradient=gradient, max_log_ratio=0.05),
    )


def test_by_hand(kit):
    # log-ratios log 4 and 0 (a third, 9, is masked): s = exp(log 4 / 2) = 2, cut to 1.2; A = (1 + 2) / 2 = 1.5
    # second sequence: log-ratio log 0.9, A = 2: -1.8
    tokens = kit.make_tokens(
        [math.log(4), 0.0, 9.0, math.log(0.9)],
        advantages=[1.0, 2.0, 5.0, 2.0],
        mask=[True, True, False, True],
        sequence=[0, 0, 0, 1],
    )
    result = kit.loss_of(tokens, policy_loss="gspo")
    assert result.losses.tolist() == pytest.approx([-1.8, -1.8, 0.0, -1.8])
    assert result.stats["clip_ratio"].values.tolist() == [True, True, False, False]
    assert result.stats["importance_weight"].values.tolist() == pytest.approx([2.0, 2.0, 1.0, 0.9])
    # k3 of each token whatever the level: (4 - 1) - log 4 and 0
    assert result.stats["approx_kl"].values[:2].tolist() == pytest.approx([3 - math.log(4), 0.0])
    capped = kit.loss_of(
        tokens, policy_loss="gspo", eps_clip=-1.0, sequence_level=kit.section("sequence_level", max_log_ratio=0.5)
    )
    assert capped.losses.tolist() == pytest.approx([-1.5 * math.exp(0.5)] * 2 + [0, -1.8])


def test_all_forms_are_one_loss_when_advantages_are_equal_within_a_sequence(kit):
    tokens = kit.random_tokens(11, equal_advantages=True)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)[tokens.sequence_index]  # equal within a sequence
    forms = [
        {"sequence_level": kit.section("sequence_level", advantage=a, gradient=g)}
        for a in ("mean", "token")
        for g in ("shared", "own")
    ]
    first, *others = [
        (
            kit.loss_of(tokens, policy_loss="gspo", **form).losses,
            kit.gradient_of(tokens, weights, policy_loss="gspo", **form),
        )
        for form in forms
    ]
    for losses, gradient in others:
        assert torch.allclose(losses, first[0], atol=1e-12)
        assert torch.allclose(gradient, first[1], atol=1e-12)


def test_one_trained_token_a_sequence_is_ppo(kit):
    tokens = kit.random_tokens(12, lengths=(1,) * 20)
    tokens.mask[:] = True
    assert torch.allclose(kit.loss_of(tokens, policy_loss="gspo").losses, kit.loss_of(tokens).losses, atol=1e-14)
