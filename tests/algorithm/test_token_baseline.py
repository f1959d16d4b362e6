"""The optimal token baseline against a loop over answers and positions, numbers of verl, and edges."""

import pytest
import torch

from areal.algorithm.advantage import optimal_token_baseline, score_norms
from areal.algorithm.correction import Spans
from tests.expect import raises_code


def packed(answers, groups, *, over_trained=False, weighted=False):
    """Answers are lists of (mask, return, norm, weight), one per token."""
    flat = [token for answer in answers for token in answer]
    lengths = torch.tensor([len(answer) for answer in answers], dtype=torch.int64)
    index = torch.arange(len(answers)).repeat_interleave(lengths)
    mask, *columns = zip(*flat, strict=True) if flat else ((), (), (), ())
    returns, norms, weights = (torch.tensor(column, dtype=torch.float64) for column in columns)
    spans = Spans(torch.tensor(mask, dtype=torch.bool), index, len(answers))
    return optimal_token_baseline(
        returns,
        norms,
        torch.tensor(groups, dtype=torch.int64),
        spans,
        over_trained=over_trained,
        weights=weights if weighted else None,
    ).tolist()


def slow(answers, groups, *, over_trained, weighted):
    """verl's loops: cumulative squared norms, one baseline per position of a group, none in the tail."""
    places, paths = [], []
    for answer in answers:
        first = next((t for t, token in enumerate(answer) if token[0]), 0)
        total, count, actual, path = 0.0, 0, [], []
        for t, (on, _, norm, weight) in enumerate(answer):
            total += norm * (weight**2 if weighted else 1.0) if on else 0.0
            actual.append((count if over_trained else t - first) if on else None)
            path.append(total)
            count += on
        places.append(actual)
        paths.append(path)
    extents = [max([-1, *(p for p in item if p is not None)]) + 1 for item in places]
    result = []
    for i, answer in enumerate(answers):
        members = [j for j in range(len(answers)) if groups[j] == groups[i]]
        others = sorted(extents[j] for j in members if j != i)
        for t, (on, gain, _, _) in enumerate(answer):
            if not on:
                result.append(0.0)
                continue
            place, baseline = places[i][t], 0.0
            if others and place < max(others[-1], extents[i] if others[-1] >= extents[i] else others[-1]):
                same = [(j, u) for j in members for u, p in enumerate(places[j]) if p == place]
                total = sum(paths[j][u] for j, u in same)
                baseline = sum(answers[j][u][1] * paths[j][u] for j, u in same) / (total + 1e-8)
            result.append(gain - baseline)
    return result


def random_answers(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.rand(n, generator=generator).tolist()

    answers = []
    for _ in range(9):
        n = int(torch.randint(1, 8, (1,), generator=generator))
        mask = [u > 0.3 for u in draw(n)]
        answers.append(list(zip(mask, [4 * u - 2 for u in draw(n)], draw(n), [2 * u for u in draw(n)], strict=True)))
    groups = [int(u * 3) for u in draw(8)] + [77]
    return answers, groups


@pytest.mark.parametrize("over_trained", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_loop(seed, over_trained, weighted):
    answers, groups = random_answers(seed)
    expected = slow(answers, groups, over_trained=over_trained, weighted=weighted)
    actual = packed(answers, groups, over_trained=over_trained, weighted=weighted)
    assert actual == pytest.approx(expected, abs=1e-9)


def on(gain, norm, weight=1.0):
    return (True, gain, norm, weight)


TOOL = (False, 5.0, 5.0, 5.0)


P = [0.5, 0.25, 0.8, 0.4, 0.6, 0.9, 0.3, 0.2, 0.7, 0.55, 0.35, 0.45]
SQUARES = [0.4, 0.3, 0.7, 0.3, 0.5, 0.85, 0.25, 0.2, 0.6, 0.4, 0.3, 0.35]
"""Probabilities of twelve tokens, and the sums of squares of their distributions."""


def answers_of(lengths, gains, weights=None):
    """Answers of these many tokens, each with one return for all of its tokens."""
    norms = score_norms(torch.tensor(P, dtype=torch.float64).log(), torch.tensor(SQUARES)).tolist()
    tokens = iter(zip(norms, weights or [1.0] * len(P), strict=True))
    return [[on(gain, *next(tokens)) for _ in range(n)] for n, gain in zip(lengths, gains, strict=True)]


def test_token_baselines_equal_verl():
    """verl 0.9.1, compute_optimal_token_baseline_advantage, without and with rollout_is_weights.

    Answers of 3, 2, 4, 1 and 2 tokens with returns 1, 0, 5, 20 and 32, the first three to one prompt.
    """
    place = ([3, 2, 4, 1, 2], [1.0, 0.0, 5.0, 20.0, 32.0])
    expected = [0.315789153969, -0.740740817691, -2.142857174968, -0.684210846031, -1.740740817691, 4.315789153969]
    expected += [3.259259182309, 1.857142825032, 5.0, -7.999999953798, 4.000000046202, 32.0]
    assert packed(answers_of(*place), [0, 0, 0, 1, 1]) == pytest.approx(expected, abs=1e-6)
    weights = [1.0, 0.5, 1.5, 1.0, 2.0, 1.0, 0.8, 1.2, 1.0, 1.0, 0.7, 1.0]
    expected = [0.315789153969, -0.059291562367, -2.649201949905, -0.684210846031, -1.059291562367, 4.315789153969]
    expected += [3.940708437633, 1.350798050095, 5.0, -5.939393698528, 6.060606301472, 32.0]
    assert packed(answers_of(*place, weights), [0, 0, 0, 1, 1], weighted=True) == pytest.approx(expected, abs=1e-6)


def test_token_baselines_around_tool_outputs_equal_verl():
    """verl 0.9.1, compute_multi_turn_optimal_token_baseline_advantage: it lines up the n-th trained tokens of answers.

    Masks 101, 11 and 10011, returns 1, 0 and 5. compute_optimal_token_baseline_advantage lines up positions.
    """
    first, second, third = answers_of([2, 2, 3], [1.0, 0.0, 5.0])
    answers = [[first[0], TOOL, first[1]], second, [third[0], TOOL, TOOL, *third[1:]]]

    def trained(result):
        return [x for x, (is_on, *_) in zip(result, [t for answer in answers for t in answer], strict=True) if is_on]

    expected = [-1.374999909777, -0.372093076833, -2.374999909777, -1.372093076833, 2.625000090223, 3.627906923167, 5.0]
    assert trained(packed(answers, [0] * 3, over_trained=True)) == pytest.approx(expected, abs=1e-6)
    expected = [-1.374999909777, 8.333e-09, -2.374999909777, 0.0, 2.625000090223, 5.0, 5.0]
    assert trained(packed(answers, [0] * 3)) == pytest.approx(expected, abs=1e-6)


def test_a_group_of_one_answer_has_no_baseline():
    assert packed([[TOOL, on(2.0, 0.5), on(1.0, 0.1)], [on(3.0, 0.2)]], [1, 2]) == [0, 2, 1, 3]


def test_nothing_at_all_and_unequal_shapes():
    assert packed([], []) == []
    assert packed([[TOOL], [TOOL]], [0, 0]) == [0, 0]
    spans = Spans(torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1)
    with raises_code("algorithm.shapes_differ"):
        optimal_token_baseline(torch.zeros(2), torch.zeros(1), torch.zeros(1).long(), spans, over_trained=False)


def test_the_score_norm_is_the_squared_gradient_of_log_p():
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    logprobs = logits.log_softmax(0)
    (gradient,) = torch.autograd.grad(logprobs[2], logits, retain_graph=True)
    result = score_norms(logprobs[2:3], logprobs.exp().square().sum().reshape(1)).detach()
    assert float(result) == pytest.approx(float(gradient.square().sum()))
