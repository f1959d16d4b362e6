"""Models whose layers keep a state from token to token, served by the native engine: as transformers computes them,
whatever is computed together, again, or copied."""

from __future__ import annotations

import pytest

from areal.api.config import NativeServerConfig
from areal.models.model_shape import ModelShape
from areal.models.recurrent_layers import state_layers
from tests.inference.conftest import WITH_STATES
from tests.inference.test_parity import check_logprobs

every_family = pytest.mark.parametrize("family", sorted(WITH_STATES))
BARS = ("qwen3_5", "nemotron_h", "lfm2")
in_parts_and_at_once = pytest.mark.parametrize(
    ("family", "max_prefill_tokens"), [(family, 16) for family in sorted(WITH_STATES)] + [(item, 512) for item in BARS]
)


@every_family
def test_the_plan_knows_the_size_of_a_state_from_the_configuration(family, build_model, drive, tmp_path):
    model = build_model(family)
    model.config.save_pretrained(tmp_path)
    size = ModelShape.read(str(tmp_path)).states * 4
    held = drive(model).engine.runner.states.bytes_per_slot
    num_layers = len(state_layers(model))
    # where config.json does not say which layers have a state, all count
    assert size in (held, held * model.config.num_hidden_layers // num_layers)


@pytest.mark.parametrize(("running", "expected"), [(256, 256 + 128), (64, 64 + 64)])
def test_running_sequences_have_states_and_snapshots_are_bounded(running, expected):
    native = NativeServerConfig(max_running_requests=running)
    assert running + native.num_snapshots(2**21, 2**29) == expected


@pytest.mark.parametrize("free_mib", [31, 0])
def test_states_that_do_not_fit_are_refused_with_the_number_that_fits(free_mib):
    native = NativeServerConfig(max_running_requests=16)
    assert list(native.state_problems(2**21, 2**25)) == []
    (text,) = native.state_problems(2**21, free_mib * 2**20)
    assert text.startswith("native.max_running_requests=16: ")
    assert text.endswith(f"at most {free_mib // 2}")


@in_parts_and_at_once
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
    assert driver.engine.scheduler.num_cached_tokens >= 4 * 32
    assert len({tuple(sequence.token_ids) for sequence in group}) > 1
    for sequence in group:
        check_logprobs(sequence, reference_logprobs(model, sequence.token_ids))


@in_parts_and_at_once
def test_a_turn_begins_with_the_state_behind_its_history(
    family, max_prefill_tokens, build_model, drive, prompts, reference_logprobs
):
    """Dialogues computed together: each turn computes what is new, and at most a block before it."""
    model = build_model(family)
    driver = drive(model, max_prefill_tokens=max_prefill_tokens)
    histories = [list(prompt) for prompt in prompts[:4]]
    for turn in range(3):
        sequences = [driver.add(history, temperature=1.0, seed=turn, max_new_tokens=19) for history in histories]
        driver.run()
        for sequence in sequences:
            check_logprobs(sequence, reference_logprobs(model, sequence.token_ids))
            assert turn == 0 or sequence.num_cached >= sequence.num_prompt - 7 - 16
        histories = [sequence.token_ids + prompts[4] * 7 for sequence in sequences]


def test_a_state_is_found_at_the_ends_of_prompts_and_answers_until_others_need_its_slot(build_model, drive, prompts):
    driver = drive(build_model("qwen3_5"), num_snapshots=3)

    def cached(prompt: list[int], **params: int) -> int:
        sequence = driver.add(prompt, **params)
        driver.run()
        return sequence.num_cached

    long = prompts[5]  # 60 tokens
    first = driver.add(long, max_new_tokens=30)
    driver.steps(3)
    next_turn = driver.add([*first.token_ids, 5], max_new_tokens=1)
    driver.run()
    assert next_turn.num_cached == 48
    assert cached([*first.token_ids, 5], max_new_tokens=1) == 80
    assert cached([*long[:50], 5], max_new_tokens=1) == 48
    assert cached([*long[:40], 5], max_new_tokens=1) == 0
    assert cached(prompts[3], max_new_tokens=1) == 0  # takes the slot behind the answer, the least recently used
    assert cached([*first.token_ids, 5], max_new_tokens=1) == 48
    driver.engine.flush_cache()
    assert cached([*first.token_ids, 5], max_new_tokens=1) == 0


def test_no_state_is_read_in_the_step_that_computes_it(build_model, drive, prompts, reference_logprobs):
    model = build_model("qwen3_5")
    driver = drive(model, max_prefill_tokens=64)
    sequences = [driver.add(prompts[5], max_new_tokens=4, temperature=1.0, seed=seed) for seed in range(3)]
    driver.run()
    assert [sequence.num_cached for sequence in sequences] == [0, 48, 48]
    for sequence in sequences:
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
