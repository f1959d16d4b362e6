"""What the tests of the policy losses share: small batches, slow references, and what every loss must do."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from areal.algorithm.losses import policy_loss
from areal.algorithm.policy_loss import CHOSEN, PolicyTokens
from areal.api.config import PPOActorConfig
from areal.api.registry import entries, registered

STEP = 1e-6
"""Of the central finite differences."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A batch as plain lists, for a reference that loops. `fixed` is theta where a gradient must not go through."""

    theta: list
    fixed: list
    old: list
    advantages: list
    mask: list
    sequence: list
    chosen: list

    def trained(self, sequence):
        """Positions of the trained tokens of a sequence."""
        return [t for t, s in enumerate(self.sequence) if s == sequence and self.mask[t]]

    def mean(self, values, t):
        """Mean of `values` over the trained tokens of the sequence of t."""
        places = self.trained(self.sequence[t])
        return sum(values[u] for u in places) / len(places)


def make_tokens(logprobs, old=None, advantages=None, mask=None, sequence=None, chosen=None, rollout=None):
    """One sequence of trained tokens with advantage 1 and old log-probability 0, but for what is given."""
    logprobs = torch.as_tensor(logprobs)
    zeros = torch.zeros_like(logprobs).detach()

    def or_default(values, default):
        return default if values is None else torch.as_tensor(values)

    index = or_default(sequence, torch.zeros_like(zeros, dtype=torch.int64))
    return PolicyTokens(
        logprobs=logprobs,
        old_logprobs=or_default(old, zeros),
        rollout_logprobs=or_default(rollout, zeros),
        advantages=or_default(advantages, torch.ones_like(zeros)),
        mask=or_default(mask, torch.ones_like(zeros, dtype=torch.bool)),
        sequence_index=index,
        num_sequences=int(index.max()) + 1 if index.numel() else 0,
        columns={CHOSEN: or_default(chosen, torch.zeros_like(zeros, dtype=torch.bool))},
    )


def random_tokens(seed, lengths=(5, 1, 9, 7, 2, 12), *, equal_advantages=False):
    """float64; the last token of each sequence and a quarter of the others are masked."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def draw(scale, shift=0.0):
        return torch.randn(size, dtype=torch.float64, generator=generator) * scale + shift

    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    last = torch.tensor(lengths).cumsum(0) - 1
    mask = torch.rand(size, generator=generator) > 0.25
    mask[last] = False
    advantages = draw(1.0)[sequence] if equal_advantages else draw(1.0)
    return make_tokens(
        draw(0.4, -1.5).requires_grad_(),
        draw(0.4, -1.5),
        advantages,
        mask,
        sequence,
        torch.rand(size, generator=generator) > 0.6,
        draw(0.4, -1.5),
    )


def rows_of(tokens, theta=None):
    now = tokens.logprobs.tolist()
    return Rows(
        theta=now if theta is None else theta,
        fixed=now,
        old=tokens.old_logprobs.tolist(),
        advantages=tokens.advantages.tolist(),
        mask=tokens.mask.tolist(),
        sequence=tokens.sequence_index.tolist(),
        chosen=tokens.columns[CHOSEN].tolist(),
    )


def loss_of(tokens, **options):
    return policy_loss(tokens, PPOActorConfig(path="x", **options))


def gradient_of(tokens, weights, **options):
    tokens.logprobs.grad = None
    (weights * loss_of(tokens, **options).losses).sum().backward()
    return tokens.logprobs.grad.clone()


def select(tokens, sequences):
    """The sequences at these places, packed anew."""
    rows = [t for s in sequences for t in (tokens.sequence_index == s).nonzero().flatten().tolist()]
    index = torch.tensor([new for new, s in enumerate(sequences) for t in tokens.sequence_index.tolist() if t == s])
    picked = {
        name: getattr(tokens, name)[rows]
        for name in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask")
    }
    columns = {CHOSEN: tokens.columns[CHOSEN][rows]}
    return replace(tokens, **picked, columns=columns, sequence_index=index.long(), num_sequences=len(sequences)), rows


class Kit:
    """Builders, and the checks that hold for every loss."""

    make_tokens = staticmethod(make_tokens)
    random_tokens = staticmethod(random_tokens)
    rows_of = staticmethod(rows_of)
    loss_of = staticmethod(loss_of)
    gradient_of = staticmethod(gradient_of)

    @staticmethod
    def section(name, **values):
        """The options of one loss, as they stand in the configuration."""
        if name in entries("losses"):
            return registered("losses", name).options(name=name, **values)
        return type(getattr(PPOActorConfig(path="x"), name))(**values)

    def conforms(self, slow, **options):
        """Everything below. `slow(rows, t, options)` is the loss of trained token t from the paper's formula."""
        self.equals_the_formula(slow, **options)
        self.gradient_equals_finite_differences(slow, **options)
        self.any_cut_gives_the_same(**options)
        self.garbage_outside_the_mask_reaches_nothing(**options)
        self.edges(**options)
        self.only_the_new_policy_learns(**options)

    def equals_the_formula(self, slow, **options):
        for seed in range(3):
            tokens = random_tokens(seed, equal_advantages=seed == 2)
            rows = rows_of(tokens)
            expected = [slow(rows, t) if trained else 0.0 for t, trained in enumerate(rows.mask)]
            assert loss_of(tokens, **options).losses.tolist() == pytest.approx(expected, abs=1e-10)

    def gradient_equals_finite_differences(self, slow, **options):
        """Of a weighted sum, so that it matters which token a gradient belongs to."""
        tokens = random_tokens(7)
        weights = torch.linspace(0.5, 2.0, tokens.mask.numel(), dtype=torch.float64)
        result = gradient_of(tokens, weights, **options)
        now = tokens.logprobs.tolist()

        def total(theta):
            rows = rows_of(tokens, theta)
            return math.fsum(float(weights[t]) * slow(rows, t) for t, trained in enumerate(rows.mask) if trained)

        for u in range(len(now)):
            up, down = list(now), list(now)
            up[u], down[u] = now[u] + STEP, now[u] - STEP
            assert float(result[u]) == pytest.approx((total(up) - total(down)) / (2 * STEP), abs=1e-7)
        assert result.abs().sum() > 0

    def any_cut_gives_the_same(self, **options):
        tokens = random_tokens(8)
        weights = torch.linspace(0.5, 2.0, tokens.mask.numel(), dtype=torch.float64)
        whole, gradient = loss_of(tokens, **options), gradient_of(tokens, weights, **options)
        for cut in ([[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [], [1, 2, 4]]):
            losses, gradients = torch.zeros_like(whole.losses), torch.zeros_like(gradient)
            for part in cut:
                micro, rows = select(tokens, part)
                micro = replace(micro, logprobs=micro.logprobs.detach().requires_grad_())
                losses[rows] = loss_of(micro, **options).losses.detach()
                gradients[rows] = gradient_of(micro, weights[rows], **options)
            assert torch.allclose(losses, whole.losses, rtol=0, atol=1e-12)
            assert torch.allclose(gradients, gradient, rtol=0, atol=1e-12)

    def garbage_outside_the_mask_reaches_nothing(self, **options):
        tokens = random_tokens(9)
        weights = torch.ones_like(tokens.advantages)
        clean, gradient = loss_of(tokens, **options), gradient_of(tokens, weights, **options)
        assert (gradient[~tokens.mask] == 0).all()
        for bad in (float("nan"), float("inf"), float("-inf")):
            hostile = replace(
                tokens,
                logprobs=torch.where(tokens.mask, tokens.logprobs.detach(), bad).requires_grad_(),
                old_logprobs=torch.where(tokens.mask, tokens.old_logprobs, bad),
                rollout_logprobs=torch.where(tokens.mask, tokens.rollout_logprobs, bad),
                advantages=torch.where(tokens.mask, tokens.advantages, bad),
                columns={CHOSEN: tokens.columns[CHOSEN] | ~tokens.mask},
            )
            result = loss_of(hostile, **options)
            assert torch.equal(result.losses, clean.losses)
            assert torch.equal(gradient_of(hostile, weights, **options), gradient)
            for name, stat in result.stats.items():
                before = clean.stats[name]
                assert torch.equal(stat.values[stat.mask], before.values[before.mask]), name

    def edges(self, **options):
        names = list(loss_of(random_tokens(1), **options).stats)
        assert "approx_kl" in names  # target_kl goes by it
        assert len(names) > 2
        empty = loss_of(make_tokens(torch.zeros(0)), **options)
        masked = loss_of(make_tokens([0.1, 0.2], mask=[False, False]), **options)
        single = loss_of(make_tokens([-0.5], old=[-0.4]), **options)
        one_sequence = loss_of(random_tokens(2, lengths=(6,)), **options)
        for result in (empty, masked, single, one_sequence):
            assert list(result.stats) == names
            assert all(stat.values.shape == stat.mask.shape for stat in result.stats.values())
            assert result.losses.isfinite().all()
        assert empty.losses.tolist() == []
        assert masked.losses.tolist() == [0, 0]
        far = torch.tensor([800.0, -800.0, 800.0, -800.0])  # float32
        assert loss_of(make_tokens(far, advantages=[1.0, 1, -1, -1]), **options).losses.isfinite().all()
        for name in ("logprobs", "advantages"):
            broken = random_tokens(3)
            first = int(broken.mask.nonzero()[0])
            hurt = getattr(broken, name).detach().clone()
            hurt[first] = float("nan")
            broken = replace(broken, columns={CHOSEN: torch.zeros_like(broken.mask)}, **{name: hurt})
            losses = loss_of(broken, **options).losses
            assert losses[first].isnan(), name
            others = (broken.sequence_index != broken.sequence_index[first]) & broken.mask
            assert losses[others].isfinite().all(), name

    def only_the_new_policy_learns(self, **options):
        tokens = random_tokens(4)
        others = {name: getattr(tokens, name).clone().requires_grad_() for name in ("old_logprobs", "rollout_logprobs")}
        loss_of(replace(tokens, **others), **options).losses.sum().backward()
        assert all(tensor.grad is None for tensor in others.values())


@pytest.fixture(scope="session")
def kit():
    return Kit()
