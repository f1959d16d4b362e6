"""Models whose layers keep a state from token to token, served by the native engine: as transformers computes them,
whatever is computed together, again, or copied."""

from __future__ import annotations

import pytest

from tests.inference.conftest import WITH_STATES
from tests.inference.test_parity import check_logprobs

every_family = pytest.mark.parametrize("family", sorted(WITH_STATES))
BARS = ("qwen3_5", "nemotron_h", "lfm2")


@every_family
@pytest.mark.parametrize("max_prefill_tokens", [512, 16])
def test_logprobs_are_those_of_transformers(
    family, max_prefill_tokens, build_model, drive, prompts, reference_logprobs
):
    model = build_model(family)
    driver = drive(model, max_running=4, max_prefill_tokens=max_prefill_tokens)
    sequences = [driver.add(prompt, temperature=1.0, seed=7, max_new_tokens=20) for prompt in prompts]
    driver.run()
    for sequence in sequences:
        check_logprobs(sequence, reference_logprobs(model, sequence.token_ids))


@pytest.mark.parametrize("family", BARS)
def test_a_preempted_sequence_computes_its_state_again(family, build_model, drive, prompts, reference_logprobs):
    model = build_model(family)
    driver = drive(model, num_blocks=8, max_running=4)
    sequences = [driver.add(prompt, temperature=1.0, max_new_tokens=40) for prompt in prompts[:4]]
    driver.run()
    assert driver.engine.scheduler.num_preemptions
    for sequence in sequences:
        check_logprobs(sequence, reference_logprobs(model, sequence.token_ids))


@pytest.mark.parametrize("family", BARS)
@pytest.mark.parametrize("max_prefill_tokens", [512, 16])
def test_siblings_begin_with_a_copy_of_the_state(
    family, max_prefill_tokens, build_model, drive, prompts, reference_logprobs
):
    model = build_model(family)
    driver = drive(model, max_running=3, max_prefill_tokens=max_prefill_tokens)
    group = [driver.add(prompts[3], group_id="g", temperature=1.0, seed=seed, max_new_tokens=12) for seed in range(5)]
    driver.run()
    assert (driver.engine.scheduler.num_cached_tokens > 0) == (max_prefill_tokens > len(prompts[3]))
    assert len({tuple(sequence.token_ids) for sequence in group}) > 1
    for sequence in group:
        check_logprobs(sequence, reference_logprobs(model, sequence.token_ids))


def test_a_turn_behind_the_history_of_its_group_is_computed_whole(build_model, drive, prompts, reference_logprobs):
    model = build_model("qwen3_5")
    driver = drive(model)
    first = driver.add(prompts[5], group_id="g", max_new_tokens=30)
    driver.steps(3)
    second = driver.add([*first.token_ids, 5], group_id="g", max_new_tokens=5)
    driver.run()
    for sequence in (first, second):
        check_logprobs(sequence, reference_logprobs(model, sequence.token_ids))


def test_an_interrupted_sequence_continues(build_model, drive, prompts, reference_logprobs):
    model = build_model("qwen3_next")
    driver = drive(model)
    sequences = [driver.add(prompt, temperature=1.0, max_new_tokens=12) for prompt in prompts[:3]]
    driver.steps(4)
    driver.engine.scheduler.retract_all()
    driver.run()
    for sequence in sequences:
        check_logprobs(sequence, reference_logprobs(model, sequence.token_ids))
