"""TOPR: negative answers taper off."""

import math

import pytest
import torch


def slow_topr(rows, t, ratio, positive=1.0, negative=1.0):
    a = rows.advantages[t]
    places = rows.trained(rows.sequence[t]) if ratio == "trajectory" else [t]
    product = math.prod(math.exp(rows.fixed[u] - rows.old[u]) for u in places)
    weight = positive if a >= 0 else negative * min(product, 1.0)
    return -weight * a * rows.theta[t]


@pytest.mark.parametrize("ratio", ["trajectory", "token"])
def test_it_conforms(kit, ratio):
    kit.conforms(
        lambda rows, t: slow_topr(rows, t, ratio, 0.5, 2.0),
        policy_loss=kit.section("topr", ratio=ratio, positive_weight=0.5, negative_weight=2.0),
    )
    kit.conforms(lambda rows, t: slow_topr(rows, t, "trajectory"), policy_loss="topr")


def test_by_hand(kit):
    # ratios 0.5 and 0.5 in a negative answer: their product 0.25; 2 and 2: cut to 1; a positive one: 1 whatever
    logprobs = torch.tensor([0.1, 0.1, 0.4, 0.4, 0.1]).log().requires_grad_()
    tokens = kit.make_tokens(
        logprobs, old=torch.full((5,), 0.2).log(), advantages=[-1.0, -1, -1, -1, 3], sequence=[0, 0, 1, 1, 2]
    )
    ones = torch.ones(5)
    assert kit.gradient_of(tokens, ones, policy_loss="topr").tolist() == pytest.approx([0.25, 0.25, 1, 1, -3])
    by_token = {"policy_loss": kit.section("topr", ratio="token")}
    assert kit.gradient_of(tokens, ones, **by_token).tolist() == pytest.approx([0.5, 0.5, 1, 1, -3])
    assert kit.loss_of(tokens, policy_loss="topr").stats["clip_ratio"].values.tolist() == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert kit.loss_of(tokens, policy_loss="topr").losses[4].item() == pytest.approx(-3 * math.log(0.1))
