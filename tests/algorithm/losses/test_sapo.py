"""SAPO's soft gate."""

import math

import pytest
import torch


def slow_sapo(rows, t, tau_pos, tau_neg, *, by_sequence=False):
    log_ratios = [a - b for a, b in zip(rows.theta, rows.old, strict=True)]
    a = rows.mean(rows.advantages, t) if by_sequence else rows.advantages[t]
    ratio = math.exp(rows.mean(log_ratios, t) if by_sequence else log_ratios[t])
    tau = tau_pos if a > 0 else tau_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def test_it_conforms(kit):
    kit.conforms(lambda rows, t: slow_sapo(rows, t, 1.0, 1.05), policy_loss="sapo")
    section = kit.section("sapo", tau_pos=2.0, tau_neg=0.5)
    kit.conforms(lambda rows, t: slow_sapo(rows, t, 2.0, 0.5), policy_loss=section)
    kit.conforms(
        lambda rows, t: slow_sapo(rows, t, 2.0, 0.5, by_sequence=True),
        policy_loss=section,
        importance_sampling_level="sequence",
    )


def test_by_hand(kit):
    # rho = 1: the gate is 4 / tau / 2: -2 * 2 with tau 1; +1 * 2 / 0.5 with tau 0.5
    # rho = 3, tau 1: sigmoid(2) = 0.880797: -4 * 0.880797
    tokens = kit.make_tokens([0.0, 0.0, math.log(3)], advantages=[2.0, -1.0, 1.0])
    losses = kit.loss_of(tokens, policy_loss=kit.section("sapo", tau_pos=1.0, tau_neg=0.5)).losses
    assert losses.tolist() == pytest.approx([-4.0, 4.0, -3.523188])


def test_on_policy_its_gradient_is_that_of_ppo(kit):
    tokens = kit.make_tokens(torch.zeros(3, requires_grad=True), advantages=[1.0, -2.0, 0.0])
    gradient = kit.gradient_of(tokens, torch.ones(3), policy_loss="sapo")
    assert gradient.tolist() == pytest.approx([-1.0, 2.0, 0.0])
