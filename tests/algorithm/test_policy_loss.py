"""Policy losses against slow float64 references, numbers worked by hand, finite differences, and hostile inputs."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from areal.algorithm.correction import correct, weighted
from areal.algorithm.importance import log_ratio
from areal.algorithm.policy_loss import PolicyTokens, policy_loss
from areal.api.config import PPOActorConfig
from areal.trainer.off_policy import correction_of


def ppo_clip_loss(tokens, **options):
    return policy_loss(tokens, PPOActorConfig(path="x", **options))


def decoupled_ppo_loss(tokens, *, weight_cap=None, **options):
    correction = correction_of(PPOActorConfig(path="x", use_decoupled_loss=True, behav_imp_weight_cap=weight_cap))
    spans = (tokens.mask, tokens.sequence_index, tokens.num_sequences)
    found = correct(tokens.old_logprobs, tokens.rollout_logprobs, *spans, correction)
    return weighted(ppo_clip_loss(tokens, **options), found.weights)


def make_tokens(logprobs, old=None, rollout=None, advantages=None, mask=None):
    logprobs = torch.as_tensor(logprobs)
    zeros = torch.zeros_like(logprobs).detach()
    return PolicyTokens(
        logprobs=logprobs,
        old_logprobs=zeros if old is None else torch.as_tensor(old),
        rollout_logprobs=zeros if rollout is None else torch.as_tensor(rollout),
        advantages=torch.ones_like(zeros) if advantages is None else torch.as_tensor(advantages),
        mask=torch.ones_like(zeros, dtype=torch.bool) if mask is None else torch.as_tensor(mask),
        sequence_index=torch.zeros_like(zeros, dtype=torch.int64),
        num_sequences=1,
    )


def random_tokens(seed, size=64):
    generator = torch.Generator().manual_seed(seed)

    def draw(scale):
        return torch.randn(size, dtype=torch.float64, generator=generator) * scale

    return make_tokens(
        draw(0.4).requires_grad_(), draw(0.4), draw(0.4), draw(1.0), torch.rand(size, generator=generator) > 0.25
    )


def slow_ppo(tokens, t, eps, higher, c_clip):
    ratio = math.exp(tokens.logprobs[t].item() - tokens.old_logprobs[t].item())
    a = tokens.advantages[t].item()
    high = eps if higher is None else higher
    loss = max(-a * ratio, -a * min(max(ratio, 1 - eps), 1 + high))
    return min(loss, c_clip * abs(a)) if c_clip is not None else loss


@pytest.mark.parametrize(("higher", "c_clip"), [(None, None), (0.5, None), (None, 1.5), (0.3, 1.2)])
def test_ppo_equals_the_formula(higher, c_clip):
    tokens = random_tokens(1)
    losses = ppo_clip_loss(tokens, eps_clip=0.2, eps_clip_higher=higher, c_clip=c_clip).losses
    expected = [slow_ppo(tokens, t, 0.2, higher, c_clip) if tokens.mask[t] else 0.0 for t in range(64)]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("cap", [None, 1.3])
def test_decoupled_equals_the_formula(cap):
    tokens = random_tokens(2)
    losses = decoupled_ppo_loss(tokens, eps_clip=0.2, weight_cap=cap).losses
    expected = []
    for t in range(64):
        weight = math.exp(tokens.old_logprobs[t].item() - tokens.rollout_logprobs[t].item())
        kept = bool(tokens.mask[t]) and (cap is None or weight <= cap)
        expected.append(weight * slow_ppo(tokens, t, 0.2, None, None) if kept else 0.0)
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)


def test_ppo_by_hand():
    # ratios 1.5, 1.5, 0.5, 0.5 with A = 2, -2, 2, -2, clip to [0.8, 1.2]
    # A=2, 1.5: max(-3, -2.4) = -2.4 clipped;  A=-2, 1.5: max(3, 2.4) = 3
    # A=2, 0.5: max(-1, -1.6) = -1;            A=-2, 0.5: max(1, 1.6) = 1.6 clipped
    logprobs = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    result = ppo_clip_loss(make_tokens(logprobs, advantages=[2.0, -2.0, 2.0, -2.0]), eps_clip=0.2)
    assert result.losses.tolist() == pytest.approx([-2.4, 3.0, -1.0, 1.6])
    assert result.stats["clip_ratio"].values.tolist() == [True, False, False, True]


def test_dual_clip_by_hand():
    # ratio 5, A = -2: max(10, 2.4) = 10, bounded by 3 * 2 = 6; A = +2 is never bounded
    result = ppo_clip_loss(
        make_tokens(torch.tensor([5.0, 5.0]).log(), advantages=[-2.0, 2.0]), eps_clip=0.2, c_clip=3.0
    )
    assert result.losses.tolist() == pytest.approx([6.0, -2.4])
    assert result.stats["dual_clip_ratio"].values.tolist() == [True, False]


def test_decoupled_by_hand():
    # prox / rollout = 0.5 / 0.25 = 2; theta / prox = 0.55 / 0.5 = 1.1 (inside the clip): loss = -1 * 1.1 * 2 = -2.2
    tokens = make_tokens(
        torch.tensor([0.55]).log(), torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), torch.tensor([1.0])
    )
    assert decoupled_ppo_loss(tokens, eps_clip=0.2).losses.item() == pytest.approx(-2.2, abs=1e-5)
    capped = decoupled_ppo_loss(tokens, eps_clip=0.2, weight_cap=1.9)
    assert capped.losses.item() == 0.0


def test_a_negative_epsilon_removes_its_side():
    logprobs, advantages = torch.tensor([3.0, 0.1]).log(), [1.0, -1.0]
    only_low = ppo_clip_loss(make_tokens(logprobs, advantages=advantages), eps_clip=0.2, eps_clip_higher=-1.0)
    assert only_low.losses.tolist() == pytest.approx([-3.0, 0.8])
    only_high = ppo_clip_loss(make_tokens(logprobs, advantages=advantages), eps_clip=-1.0, eps_clip_higher=0.2)
    assert only_high.losses.tolist() == pytest.approx([-1.2, 0.1])


def test_decoupled_with_equal_policies_is_ppo():
    tokens = random_tokens(3)
    same = make_tokens(tokens.logprobs, tokens.old_logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask)
    assert torch.equal(
        decoupled_ppo_loss(same, eps_clip=0.2, weight_cap=5.0).losses, ppo_clip_loss(same, eps_clip=0.2).losses
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda tokens: ppo_clip_loss(tokens, eps_clip=0.2, eps_clip_higher=0.3, c_clip=1.4),
        lambda tokens: decoupled_ppo_loss(tokens, eps_clip=0.2, c_clip=1.4, weight_cap=1.5),
    ],
)
def test_gradient_equals_finite_differences(loss):
    fixed = random_tokens(4)

    def total(logprobs):
        tokens = make_tokens(logprobs, fixed.old_logprobs, fixed.rollout_logprobs, fixed.advantages, fixed.mask)
        return loss(tokens).losses

    assert gradcheck(total, (fixed.logprobs,))


def test_only_the_new_policy_gets_gradients():
    old, rollout = torch.zeros(3, requires_grad=True), torch.full((3,), 0.1, requires_grad=True)
    advantages = torch.ones(3)
    tokens = make_tokens(torch.zeros(3, requires_grad=True), old, rollout, advantages)
    decoupled_ppo_loss(tokens, eps_clip=0.2).losses.sum().backward()
    assert old.grad is None
    assert rollout.grad is None
    # at theta = prox the gradient of -A w rho is -A w = -exp(-0.1)
    assert tokens.logprobs.grad.tolist() == pytest.approx([-math.exp(-0.1)] * 3)


def test_masked_garbage_reaches_neither_loss_nor_gradient():
    nan, inf = float("nan"), float("inf")
    logprobs = torch.tensor([nan, 0.05, -inf, inf], requires_grad=True)
    tokens = make_tokens(
        logprobs, [inf, 0.0, nan, -inf], [nan, 0.0, inf, nan], [nan, 1.0, inf, nan], [False, True] + [False] * 2
    )
    for loss in (ppo_clip_loss(tokens, eps_clip=0.2), decoupled_ppo_loss(tokens, eps_clip=0.2, weight_cap=2.0)):
        logprobs.grad = None
        assert loss.losses.tolist() == pytest.approx([0, -math.exp(0.05), 0, 0])
        loss.losses.sum().backward()
        assert logprobs.grad.tolist() == pytest.approx([0, -math.exp(0.05), 0, 0])


def test_a_trained_nan_shows_in_the_loss():
    tokens = make_tokens([float("nan"), 0.0])
    assert ppo_clip_loss(tokens, eps_clip=0.2).losses[0].isnan()


def test_huge_ratios_stay_finite():
    tokens = make_tokens(torch.tensor([800.0, float("inf")]), advantages=[-1.0, -1.0])
    assert ppo_clip_loss(tokens, eps_clip=0.2).losses.tolist() == pytest.approx([math.exp(20)] * 2)


def test_all_masked_and_empty():
    masked = make_tokens([0.1, 0.2], mask=[False, False])
    assert decoupled_ppo_loss(masked, eps_clip=0.2).losses.tolist() == [0, 0]
    empty = make_tokens(torch.zeros(0))
    assert ppo_clip_loss(empty, eps_clip=0.2).losses.tolist() == []


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        make_tokens([0.0, 0.0], advantages=[1.0])


def test_c_clip_must_exceed_one():
    with pytest.raises(ValueError, match="above 1"):
        ppo_clip_loss(make_tokens([0.0]), eps_clip=0.2, c_clip=1.0)


def test_log_ratio_is_cut_and_keeps_nan():
    mask = torch.tensor([True, True, False, True])
    ratio = log_ratio(torch.tensor([30.0, -1.0, 5.0, float("nan")]), torch.zeros(4), mask)
    assert ratio[:3].tolist() == [20, -1, 0]
    assert ratio[3].isnan()
