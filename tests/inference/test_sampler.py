"""Every sampling option alone, the independence of rows, and rows without a distribution."""

from __future__ import annotations

import math
from collections import Counter

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from areal.inference import engine as sampler
from areal.inference.decode_rows import SampledRows
from areal.inference.generate_route import BodyParser
from areal.inference.request_parser import GenerateBody, RequestLimits
from areal.inference.scheduler import SamplingParams, Sequence

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def sequence(seed: int = 0, prompt: list[int] | None = None, answer: list[int] | None = None, **params) -> Sequence:
    prompt, answer = prompt or [0], answer or []
    made = Sequence(
        request_id="r", token_ids=[*prompt], num_prompt=len(prompt), params=SamplingParams(**params), seed=seed
    )
    for token in answer:
        made.append(token, 0.0, "0")
    return made


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
    return sampler.sample(logits, SampledRows.of(sequences, logits.device)).read()


def uniform_numbers(sequences: list[Sequence]) -> torch.Tensor:
    return SampledRows.of(sequences, torch.device("cpu")).uniforms()


def shares(count: int = 4000, logits: torch.Tensor = LOGITS, **params) -> dict[int, float]:
    """How often each token is drawn over many seeds."""
    sequences = [sequence(seed, **params) for seed in range(count)]
    tokens, _ = sample(logits.expand(count, -1), sequences)
    return {token: number / count for token, number in Counter(tokens).items()}


def expected(logits: torch.Tensor) -> dict[int, float]:
    return {token: p for token, p in enumerate(logits.softmax(-1).tolist()) if p > 0}


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_plain_sampling_follows_the_softmax(temperature):
    assert shares(temperature=temperature) == pytest.approx(expected(LOGITS / temperature), abs=0.03)


def test_top_k_keeps_the_likeliest():
    kept = LOGITS.masked_fill(torch.arange(5) >= 2, -torch.inf)
    assert shares(top_k=2) == pytest.approx(expected(kept), abs=0.03)


def test_top_p_keeps_the_smallest_set_with_the_mass():
    mass = LOGITS.softmax(-1).cumsum(-1)
    top_p = (mass[0] + mass[1]).item() / 2  # the first token is not enough, the first two are
    kept = LOGITS.masked_fill(torch.arange(5) >= 2, -torch.inf)
    assert shares(top_p=top_p) == pytest.approx(expected(kept), abs=0.03)
    assert shares(top_p=1e-6) == {0: 1.0}


def test_top_k_and_top_p_together_use_the_mass_among_the_top_k():
    flat = torch.zeros(5)
    assert set(shares(logits=flat, top_k=4, top_p=0.5)) == {0, 1}


def test_greedy_takes_the_likeliest_and_reports_its_logprob():
    tokens, logprobs = sample(
        torch.stack([LOGITS, LOGITS]), [sequence(temperature=0.0), sequence(temperature=0.5, top_k=1)]
    )
    assert tokens == [0, 0]
    assert logprobs[0] == pytest.approx(LOGITS.log_softmax(-1)[0].item())
    assert logprobs[1] == pytest.approx((LOGITS / 0.5).log_softmax(-1)[0].item())


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    assert set(shares(logits=logits)) == {1, 3}


def test_frequency_penalty_counts_the_answer_only():
    penalised = LOGITS - torch.tensor([0.0, 2 * 1.5, 0.0, 0.0, 0.0])
    assert shares(frequency_penalty=1.5, prompt=[0, 0], answer=[1, 1]) == pytest.approx(expected(penalised), abs=0.03)


def test_presence_penalty_counts_a_token_of_the_answer_once_also_across_an_interruption():
    penalised = LOGITS - torch.tensor([0.0, 1.5, 0.0, 0.0, 0.0])
    assert shares(presence_penalty=1.5, prompt=[0, 0], answer=[1, 1]) == pytest.approx(expected(penalised), abs=0.03)
    resumed = sequence(prompt=[4, 0, 0], presence_penalty=1.9, temperature=0.0)
    resumed.num_prior_output = 2
    assert sample(LOGITS[None], [resumed])[0] == [1]


def test_frequency_penalty_counts_what_was_generated_before_an_interruption():
    resumed = sequence(prompt=[4, 0, 0], frequency_penalty=1.9, temperature=0.0)
    resumed.num_prior_output = 2
    assert sample(LOGITS[None], [resumed])[0] == [1]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    penalised = LOGITS.clone()
    penalised[0], penalised[4] = 2.0 / 4, -1.0 * 4
    assert shares(repetition_penalty=4.0, prompt=[0, 0], answer=[4]) == pytest.approx(expected(penalised), abs=0.03)


def test_stop_tokens_are_masked_while_the_answer_is_too_short():
    stops = frozenset({0, 1})
    assert set(shares(min_new_tokens=1, stop_token_ids=stops)) <= {2, 3, 4}
    assert 0 in shares(min_new_tokens=1, stop_token_ids=stops, answer=[2])


def test_logprobs_ignore_penalties_and_restrictions():
    reference = (LOGITS / 0.7).log_softmax(-1)
    rows = [
        sequence(1, temperature=0.7, top_k=2),
        sequence(2, temperature=0.7, frequency_penalty=2.0, answer=[0]),
        sequence(3, temperature=0.7),
    ]
    tokens, logprobs = sample(LOGITS.expand(3, -1), rows)
    assert logprobs == pytest.approx([reference[token].item() for token in tokens])


def test_sampling_does_not_depend_on_other_rows():
    rows = [sequence(seed, temperature=1.0 + seed % 3, top_k=-1 if seed % 2 else 3) for seed in range(50)]
    together, _ = sample(LOGITS.expand(50, -1), rows)
    alone = [sample(LOGITS[None], [row])[0][0] for row in rows]
    assert together == alone


def test_random_numbers_depend_on_seed_and_position_only():
    resumed = sequence(7, prompt=[0, 3, 4])
    fresh = sequence(7, prompt=[0], answer=[3, 4])
    assert uniform_numbers([resumed]) == uniform_numbers([fresh])
    many = uniform_numbers([sequence(seed, answer=[0] * place) for seed in range(40) for place in range(40)])
    assert len(set(many.tolist())) > 1590
    assert 0 <= many.min() < 0.01
    assert 0.99 < many.max() < 1
    assert many.mean() == pytest.approx(0.5, abs=0.02)


def test_large_seeds_are_fine():
    assert 0 <= uniform_numbers([sequence(2**63 - 1)])[0] < 1


INF, NAN = torch.inf, torch.nan
RESTRICTIONS: dict[str, dict] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "likeliest": {"top_k": 1},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_new_tokens": {"min_new_tokens": 1, "stop_token_ids": frozenset({0})},
    "frequency_penalty": {"frequency_penalty": 2.0, "answer": [0]},
    "presence_penalty": {"presence_penalty": 2.0, "answer": [0, 0]},
    "repetition_penalty": {"repetition_penalty": 2.0},
}


@pytest.mark.parametrize("params", RESTRICTIONS.values(), ids=RESTRICTIONS)
@pytest.mark.parametrize("logits", [[1, 2, NAN, 0, 0], [1, 2, INF, 0, 0], [-INF] * 5], ids=["nan", "inf", "all -inf"])
def test_a_row_without_a_distribution_has_no_logprob_and_leaves_the_others_alone(logits, params):
    good = sequence(3, temperature=0.7, top_k=2)
    alone = sample(LOGITS[None], [good])
    tokens, logprobs = sample(torch.stack([torch.tensor(logits), LOGITS]), [sequence(1, **params), good])
    assert math.isnan(logprobs[0])
    assert ([tokens[1]], [logprobs[1]]) == alone


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}], ids=["greedy", "sampled"])
def test_a_row_whose_allowed_tokens_are_impossible_has_no_logprob(params):
    logits = torch.tensor([[1.0, 0.5, -INF, -INF, -INF]])
    _, logprobs = sample(logits, [sequence(min_new_tokens=1, stop_token_ids=frozenset({0, 1}), **params)])
    assert math.isnan(logprobs[0])


LIMITS = RequestLimits(vocab_size=5, context_length=64, default_stop_ids=frozenset({4}), has_tokenizer=False)


@settings(max_examples=80, deadline=None)
@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=5, max_size=5),
    answer=st.lists(st.integers(0, 4), max_size=8),
    seed=st.integers(0, 2**63 - 1),
    body=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.one_of(st.just(0), st.floats(1e-6, 1e6)),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.one_of(st.just(-1), st.integers(1, 10)),
            "frequency_penalty": st.floats(-2, 2),
            "presence_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(1e-3, 1e3),
            "min_new_tokens": st.integers(0, 9),
            "stop_token_ids": st.lists(st.integers(0, 3), max_size=3),
        },
    ),
)
def test_accepted_parameters_give_finite_logprobs(logits, answer, seed, body):
    whole = TypeAdapter(GenerateBody).validate_json(orjson.dumps({"input_ids": [0], "sampling_params": body}))
    params = BodyParser(LIMITS, None, lambda: 0, records_experts=False)._params(whole)
    row = sequence(seed, [0])
    row.params = params
    for token in answer:
        row.append(token, 0.0, "0")
    tokens, logprobs = sample(torch.tensor([logits]), [row])
    assert tokens[0] in range(5)
    assert math.isfinite(logprobs[0])


def raced(weights, count):
    """Counts by token of many draws of one row by the rule of GPUs."""
    rows = 1000
    counts = torch.zeros(len(weights), dtype=torch.int64)
    for first in range(0, count, rows):
        seeds = uniform_numbers([sequence(seed) for seed in range(first, first + rows)])
        counts += sampler._race(weights.expand(rows, -1), seeds).bincount(minlength=len(weights))
    return counts


def test_the_race_follows_the_weights_and_never_chooses_one_of_weight_zero():
    weights = torch.zeros(1000)
    weights[::10] = torch.linspace(0.1, 10.0, 100)  # 90% have weight 0
    counts = raced(weights, 50_000)
    assert counts[weights == 0].sum() == 0
    shares_found, wanted = counts[::10] / counts.sum(), weights[::10] / weights.sum()
    deviations = (shares_found - wanted).abs() / (wanted / counts.sum()).sqrt()
    assert deviations.max() < 4.5, "standard deviations"


def test_the_race_finds_no_token_in_a_row_without_a_distribution():
    rows = torch.tensor([[0.0, 1.0, 0.0], [0.2, math.nan, 0.8], [0.0, 0.0, 0.0]])
    assert sampler._race(rows, torch.tensor([0.3, 0.4, 0.5])).tolist() == [1, 3, 3]
