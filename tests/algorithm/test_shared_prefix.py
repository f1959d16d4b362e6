"""The shared-prefix filter against every pair of answers compared token by token, and by hand."""

from itertools import accumulate

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from areal.algorithm.shared_prefix import contested_prefixes
from tests.expect import raises_code


def packed(rows):
    """rows of (group, reward, prompt, answer tokens, answer mask) -> tensors; position t speaks about token t+1."""
    ids, mask, lengths = [], [], []
    for _, _, prompt, answer, trained in rows:
        ids += prompt + answer
        mask += [False] * (len(prompt) - 1) + [bool(flag) for flag in trained] + [False]
        lengths.append(len(prompt) + len(answer))
    return {
        "input_ids": torch.tensor(ids, dtype=torch.int64),
        "loss_mask": torch.tensor(mask, dtype=torch.bool),
        "sequence_index": torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        "group_ids": torch.tensor([row[0] for row in rows], dtype=torch.int64),
        "rewards": torch.tensor([row[1] for row in rows], dtype=torch.float32),
    }


def found_in(rows, min_tokens):
    """Answer tokens taken out of each row."""
    batch = packed(rows)
    flags = contested_prefixes(**batch, min_tokens=min_tokens).tolist()
    result, start = [], 0
    for _, _, prompt, answer, _ in rows:
        first = start + len(prompt) - 1
        result.append([k for k in range(len(answer)) if flags[first + k]])
        start += len(prompt) + len(answer)
        assert sum(flags[start - len(prompt) - len(answer) : start]) == len(result[-1])
    return result


def by_brute_force(rows, min_tokens):
    """For every pair of one group and prompt with different rewards, token by token."""
    result = []
    for i, (group, reward, prompt, answer, trained) in enumerate(rows):
        end = max((k + 1 for k in range(len(answer)) if trained[k]), default=0)
        begin = next((k for k in range(len(answer)) if trained[k]), 0)
        longest = []
        for j, (other_group, other_reward, other_prompt, other, other_trained) in enumerate(rows):
            other_end = max((k + 1 for k in range(len(other)) if other_trained[k]), default=0)
            if i == j or group != other_group or reward == other_reward or not other_end:
                continue
            if (
                prompt + answer[:begin]
                != other_prompt + other[: next(k for k in range(len(other)) if other_trained[k])]
            ):
                continue
            shift = len(other_prompt) - len(prompt)
            common = []
            for k in range(begin, end):
                m = k - shift
                if m >= other_end or answer[k] != other[m] or trained[k] != other_trained[m]:
                    break
                if trained[k]:
                    common.append(k)
            if len(common) > len(longest):
                longest = common
        whole = len(longest) == sum(trained)
        result.append([] if whole or len(longest) < min_tokens else longest)
    return result


def row(group, reward, answer, *, prompt=(9, 9), trained=None):
    return (group, reward, list(prompt), list(answer), [1] * len(answer) if trained is None else list(trained))


def test_by_hand():
    rows = [
        row(1, 1.0, [1, 2, 3, 4]),
        row(1, 0.0, [1, 2, 3, 5]),  # three in common with the first
        row(2, 1.0, [1, 2, 3, 5]),  # another group
        row(1, 0.0, [1, 2, 6]),  # two in common with the first, which loses three
        row(1, 0.0, [1, 2, 3]),  # the whole answer is shared: nothing would be left
        row(1, 0.0, [7, 2, 3]),
    ]
    assert found_in(rows, 2) == [[0, 1, 2], [0, 1, 2], [], [0, 1], [], []]
    assert found_in(rows, 3) == [[0, 1, 2], [0, 1, 2], [], [], [], []]
    assert found_in(rows, 4) == [[]] * 6


def test_equal_rewards_contest_nothing():
    assert found_in([row(1, 1.0, [1, 2, 3]), row(1, 1.0, [1, 2, 4])], 1) == [[], []]


def test_a_longer_beginning_shared_with_an_equal_reward_does_not_hide_the_contested_one():
    rows = [row(1, 1.0, [1, 2, 3, 4, 5]), row(1, 1.0, [1, 2, 3, 4, 6]), row(1, 0.0, [1, 2, 8])]
    assert found_in(rows, 1) == [[0, 1], [0, 1], [0, 1]]


def test_other_prompts_are_other_answers():
    assert found_in([row(1, 1.0, [1, 2, 3]), row(1, 0.0, [1, 2, 4], prompt=(9, 8))], 1) == [[], []]
    assert found_in([row(1, 1.0, [1, 2, 3]), row(1, 0.0, [1, 2, 4], prompt=(9, 9, 9))], 1) == [[], []]


def test_tokens_of_tools_must_agree_and_are_not_counted():
    rows = [
        row(1, 1.0, [1, 50, 2, 3], trained=[1, 0, 1, 1]),
        row(1, 0.0, [1, 50, 2, 4], trained=[1, 0, 1, 1]),
        row(1, 0.0, [1, 51, 2, 5], trained=[1, 0, 1, 1]),
    ]
    assert found_in(rows, 2) == [[0, 2], [0, 2], []]
    assert found_in(rows, 3) == [[], [], []]


def test_large_ids():
    rows = [row(1, 1.0, [255, 1, 7]), row(1, 0.0, [256, 1, 7]), row(1, 0.0, [255, 1, 8]), row(1, 1.0, [151_000, 1, 2])]
    assert found_in(rows, 1) == by_brute_force(rows, 1) == [[0, 1], [], [0, 1], []]


def test_nothing_to_compare():
    assert found_in([row(1, 1.0, [1, 2])], 1) == [[]]
    assert found_in([row(1, 1.0, [1, 2], trained=[0, 0]), row(1, 0.0, [1, 3])], 1) == [[], []]
    empty = torch.zeros(0, dtype=torch.int64)
    none = contested_prefixes(
        empty, empty.bool(), empty, torch.zeros(1, dtype=torch.int32), empty, torch.zeros(0), min_tokens=1
    )
    assert none.tolist() == []
    with raises_code("algorithm.shapes_differ"):
        contested_prefixes(
            empty, torch.ones(1).bool(), empty, torch.zeros(1, dtype=torch.int32), empty, empty, min_tokens=1
        )


@st.composite
def groups(draw):
    rows = []
    for _ in range(draw(st.integers(0, 8))):
        answer = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        trained = draw(st.lists(st.sampled_from([1, 1, 1, 0]), min_size=len(answer), max_size=len(answer)))
        prompt = draw(st.sampled_from([(5,), (5, 6)]))
        rows.append(
            row(draw(st.integers(0, 1)), draw(st.sampled_from([0.0, 1.0])), answer, prompt=prompt, trained=trained)
        )
    return rows


@settings(max_examples=100, deadline=None)
@given(groups(), st.integers(1, 4))
def test_equals_the_comparison_of_all_pairs(rows, min_tokens):
    if rows:
        assert found_in(rows, min_tokens) == by_brute_force(rows, min_tokens)
