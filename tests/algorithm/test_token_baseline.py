"""The optimal token baseline against a loop over answers and positions, numbers of verl, and edges."""

import pytest
import torch

from areal.algorithm.correction_rules import Spans
from areal.algorithm.token_baseline import optimal_token_baseline, score_norms
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
        total, count, found, path = 0.0, 0, [], []
        for t, (on, _, norm, weight) in enumerate(answer):
            total += norm * (weight**2 if weighted else 1.0) if on else 0.0
            found.append((count if over_trained else t - first) if on else None)
            path.append(total)
            count += on
        places.append(found)
        paths.append(path)
    extents = [max([-1, *(p for p in found if p is not None)]) + 1 for found in places]
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
    found = packed(answers, groups, over_trained=over_trained, weighted=weighted)
    assert found == pytest.approx(expected, abs=1e-9)


def on(gain, norm, weight=1.0):
    return (True, gain, norm, weight)


TOOL = (False, 5.0, 5.0, 5.0)


def test_three_numbers_of_verl():
    """compute_optimal_token_baseline_advantage on two answers of one prompt, returns 1 and 0.

    Norms .5, .3, .2 and .1, .7: W = .5, .8, 1 and .1, .8. B_1 = .5 / .6, B_2 = .8 / 1.6, and B_3 = 0, since only the
    longest answer has a third token.
    """
    answers = [[on(1.0, 0.5), on(1.0, 0.3), on(1.0, 0.2)], [on(0.0, 0.1), on(0.0, 0.7)]]
    expected = [1 - 5 / 6, 0.5, 1.0, -5 / 6, -0.5]
    assert packed(answers, [3, 3]) == pytest.approx(expected, abs=1e-6)
    # rollout_is_weights: squared norms times w^2, here 4 for the first token: W = 2, 2.3, ... -> B_1 = 2 / 2.1
    answers[0][0] = on(1.0, 0.5, 2.0)
    assert packed(answers, [3, 3], weighted=True)[:2] == pytest.approx([1 - 2 / 2.1, 1 - 2.3 / 3.1], abs=1e-6)


def test_tool_outputs_shift_positions_only_without_over_trained():
    """compute_multi_turn_optimal_token_baseline_advantage lines up the n-th trained tokens of the answers."""
    answers = [[on(1.0, 0.5), TOOL, on(1.0, 0.3)], [on(0.0, 0.1), on(0.0, 0.7)]]
    by_trained = packed(answers, [0, 0], over_trained=True)
    assert by_trained == pytest.approx([1 - 5 / 6, 0, 0.5, -5 / 6, -0.5], abs=1e-6)
    by_place = packed(answers, [0, 0])
    assert by_place == pytest.approx([1 - 5 / 6, 0, 1.0, -5 / 6, 0.0], abs=1e-6)


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
    found = score_norms(logprobs[2:3], logprobs.exp().square().sum().reshape(1)).detach()
    assert float(found) == pytest.approx(float(gradient.square().sum()))
