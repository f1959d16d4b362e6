"""The log-ratio of trained tokens, split by cause: each cause alone appears alone."""

import math

import pytest
import torch

from areal.algorithm.ratio_causes import ScoredTokens, kept_mass, ratio_parts

CAUSES = ("numerics", "staleness", "sampling", "drift")
VOCABULARY, TOKENS = 12, 64


def policy(seed: int) -> torch.Tensor:
    """Logits [TOKENS, VOCABULARY] of one version."""
    return torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return (logits / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def scored(
    *,
    noise: float = 0.0,
    drift: float = 0.0,
    is_old: bool = False,
    top_p: float = 1.0,
    temperature: float = 1.0,
    changed: bool = False,
) -> ScoredTokens:
    """Tokens of a server that holds `policy(0)`, with causes: `noise` of the trainer, an old version, a top-p, tokens
    that the workflow changed."""
    now, tokens = policy(0), torch.arange(TOKENS) % VOCABULARY
    then = now + 0.1 * policy(1) if is_old else now
    other = now + noise * policy(2)
    sampled = (tokens + 1) % VOCABULARY if changed else tokens
    ordered = now.log_softmax(-1).sort(-1, descending=True).values
    scales = (now.log_softmax(-1) / temperature).logsumexp(-1)
    mass = [
        kept_mass(row, scale, temperature=temperature, top_k=VOCABULARY, top_p=top_p)
        for row, scale in zip(ordered.tolist(), scales.tolist(), strict=True)
    ]
    return ScoredTokens(
        trainer=of(other, tokens, temperature),
        trainer_raw=of(other, tokens),
        server_raw=of(now, tokens),
        recorded=of(then, sampled, temperature),
        is_current=torch.full((TOKENS,), not is_old),
        kept_mass=torch.tensor(mass),
    )


@pytest.mark.parametrize(
    ("cause", "injected"),
    [
        ("numerics", {"noise": 0.05}),
        ("staleness", {"is_old": True}),
        ("sampling", {"top_p": 0.7}),
        ("drift", {"changed": True}),
    ],
)
def test_each_cause_alone_appears_alone(cause, injected):
    parts = ratio_parts(scored(**injected), "float32")
    sizes = {name: getattr(parts, name).abs().mean().item() for name in CAUSES}
    assert sizes.pop(cause) > 0.02
    assert max(sizes.values()) < 1e-12


def test_the_parts_of_each_token_sum_to_the_whole():
    parts = ratio_parts(scored(noise=0.05, is_old=True, top_p=0.7, temperature=0.6), "float32")
    total = sum(getattr(parts, name) for name in CAUSES)
    assert (total - parts.whole).abs().max() < 1e-6
    assert min(getattr(parts, name).abs().mean() for name in ("numerics", "staleness", "sampling")) > 0.01


def test_a_temperature_that_both_sides_know_is_no_cause():
    parts = ratio_parts(scored(temperature=0.5), "float32")
    assert parts.whole.abs().max() < 1e-12


def test_the_rounding_of_a_server_between_decoding_and_prompt_is_numerics_and_not_drift():
    tokens = scored()
    rounded = ScoredTokens(
        trainer=tokens.trainer,
        trainer_raw=tokens.trainer_raw,
        server_raw=tokens.server_raw,
        recorded=tokens.recorded + 0.01,
        is_current=tokens.is_current,
        kept_mass=tokens.kept_mass,
    )
    in_16_bit, in_32_bit = ratio_parts(rounded, "bfloat16"), ratio_parts(rounded, "float32")
    assert in_16_bit.numerics.tolist() == pytest.approx([-0.01] * TOKENS, abs=1e-6)
    assert in_16_bit.drift.abs().max() == 0
    assert in_32_bit.drift.tolist() == pytest.approx([-0.01] * TOKENS, abs=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "mass"),
    [
        (None, 1.0, 1.0),
        (2, 1.0, 0.7),  # 0.4 + 0.3
        (None, 0.5, 0.7),  # 0.4 is below 0.5, therefore the second one is kept
        (None, 0.4, 0.4),
        (3, 0.5, 0.7),  # of 0.9, 0.45 are needed: 0.4 is below it
        (None, 0.98, 0.98),  # more tokens than are known
        (9, 1.0, 0.95),  # taken as 4
    ],
)
def test_the_mass_of_the_kept_tokens_by_hand(top_k, top_p, mass):
    top = [math.log(share) for share in (0.4, 0.3, 0.2, 0.05)]
    assert kept_mass(top, 0.0, temperature=1.0, top_k=top_k, top_p=top_p) == pytest.approx(mass)


def test_rounding_at_a_low_temperature_is_no_mass_above_1():
    assert kept_mass([-0.1, -3.0], -900.0, temperature=0.05, top_k=1, top_p=1.0) == 1.0


def test_the_mass_at_another_temperature_by_hand():
    # At temperature 1/2 the weights are the squares: 0.64 and 0.04, whose sum is 0.68.
    top = [math.log(0.8), math.log(0.2)]
    mass = kept_mass(top, math.log(0.68), temperature=0.5, top_k=1, top_p=1.0)
    assert mass == pytest.approx(0.64 / 0.68)
