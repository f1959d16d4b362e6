"""AdamW with moments in bfloat16 against AdamW."""

import torch

from areal.engine.adam_bf16 import AdamBf16

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def descend(kind, steps: int, seed: int = 0) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """Noisy gradients of a quadratic with curvatures from 0.1 to 10."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.ones(64))
    curvature = torch.logspace(-1, 1, 64)
    optimizer = kind([weight], **OPTIONS)
    for _ in range(steps):
        weight.grad = weight.detach() * curvature + 0.1 * torch.randn(64, generator=generator)
        optimizer.step()
    return weight.detach(), optimizer


def test_it_ends_where_adamw_ends():
    exact, _ = descend(torch.optim.AdamW, 400)
    found, optimizer = descend(AdamBf16, 400)
    assert (found - exact).abs().mean() < 0.02
    state = next(iter(optimizer.state.values()))
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16


def test_the_second_moment_follows_gradients_that_become_smaller():
    """Rounded to nearest, it would stay where it is: one step changes it by less than half of a step of bfloat16."""
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = AdamBf16([weight], **OPTIONS)
    for size, steps in ((1.0, 10), (0.1, 500)):
        for _ in range(steps):
            weight.grad = torch.full_like(weight, size)
            optimizer.step()
    exact = 1 - 0.999**10
    for _ in range(500):
        exact = exact * 0.999 + 0.001 * 0.01
    assert abs(optimizer.state[weight]["exp_avg_sq"].float().mean().item() / exact - 1) < 0.01


def test_equal_steps_are_equal():
    first, second = descend(AdamBf16, 20)[0], descend(AdamBf16, 20)[0]
    assert torch.equal(first, second)
