"""The engine between two steps: ends, interruptions, weight switches, preemption, sharing, failure."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from areal.api.errors import RequestError
from areal.inference.scheduler import Sequence, Status
from tests.inference.integrity import check_scheduler


def answers(driver) -> list[list[int]]:
    return [sequence.answer_ids for sequence in driver.finished]


def load(driver, folder: Path, version: str, **options) -> None:
    driver.engine.weights.start("")
    driver.engine.weights.receive_folder(folder)
    driver.engine.install_weights(version, options.get("mode", "retract"))


def expect_logprobs(sequence, reference, start: int, end: int) -> None:
    for place in range(start, end):
        position = sequence.num_prompt + place
        expected = reference[position - 1, sequence.token_ids[position]].item()
        assert sequence.logprobs[place] == pytest.approx(expected, abs=1e-5)


def test_an_answer_ends_at_a_stop_token_or_at_its_length(build_model, drive, prompts):
    model = build_model("qwen3-gqa")
    driver = drive(model)
    free = driver.add(prompts[0], max_new_tokens=12)
    driver.run()
    assert free.finish.kind == "length"
    stop = free.answer_ids[5]
    first = free.answer_ids.index(stop)
    stopped = driver.add(prompts[0], max_new_tokens=12, stop_token_ids=frozenset({stop}))
    driver.run()
    assert (stopped.finish.kind, stopped.finish.matched) == ("stop", stop)
    assert stopped.answer_ids == free.answer_ids[: first + 1]


def test_min_new_tokens_delays_stop_tokens(build_model, drive, prompts):
    model = build_model("qwen3-gqa")
    driver = drive(model)
    everything = frozenset(range(49))
    short = driver.add(prompts[0], stop_token_ids=everything)
    held = driver.add(prompts[0], stop_token_ids=everything, min_new_tokens=3)
    driver.run()
    assert short.num_output == 1
    assert held.num_output == 4 or held.answer_ids[-1] == 49
    assert held.answer_ids[:3] == [49, 49, 49]  # the only token that does not stop


class Letters:
    """Token n is the n-th letter from a on."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def test_a_stop_string_ends_where_it_is_completed(build_model, drive, prompts):
    model = build_model("qwen3-gqa")
    driver = drive(model, detokenizer=Letters())
    free = driver.add(prompts[0], max_new_tokens=12)
    driver.run()
    text = Letters().decode(free.answer_ids)
    stop = text[3:6]
    stopped = driver.add(prompts[0], max_new_tokens=12, stop=(stop, "no such thing"))
    late = driver.add(prompts[0], max_new_tokens=12, stop=(stop,), min_new_tokens=12)
    driver.run()
    end = text.index(stop) + 3
    assert stopped.answer_ids == free.answer_ids[:end]
    assert stopped.finish.matched == stop
    assert late.num_output == 12


def test_siblings_share_the_prefill_and_free_it(build_model, drive, prompts):
    model = build_model("qwen3-gqa")
    alone = drive(model)
    expected = [alone.add(prompts[3], temperature=1.0, seed=n) for n in range(16)]
    alone.run()
    driver = drive(model)
    siblings = [driver.add(prompts[3], temperature=1.0, seed=n, group_id="g") for n in range(16)]
    driver.run()
    assert [sibling.token_ids for sibling in siblings] == [item.token_ids for item in expected]
    assert driver.engine.counters.computed_tokens == 37 + 16 * 7
    assert alone.engine.counters.computed_tokens == 37 + 15 * (37 - 32) + 16 * 7  # two full blocks
    assert driver.engine.scheduler.num_cached_tokens == 15 * 37
    assert [sibling.num_cached for sibling in siblings] == [0] + [37] * 15


@pytest.mark.parametrize(
    ("family", "delay"), [("qwen2-tied", 1), ("qwen2-tied", 2), ("qwen2-tied", 5), ("qwen2-windows", 2)]
)
def test_late_siblings_do_not_change_answers(family, delay, build_model, drive, prompts, reference_logprobs):
    model = build_model(family)
    driver = drive(model, max_prefill_tokens=16)
    driver.add(prompts[3], group_id="g")
    driver.steps(delay)
    late = [driver.add(prompts[3] + [3] * n, group_id="g", temperature=1.0, seed=n) for n in range(3)]
    driver.run()
    for sequence in late:
        expect_logprobs(sequence, reference_logprobs(model, sequence.token_ids), 0, 8)
    assert all(sequence.num_cached > 0 for sequence in late)


def test_preemption_does_not_change_answers(build_model, drive, prompts):
    model = build_model("qwen3-gqa")
    wide, narrow = drive(model), drive(model, num_blocks=7)
    for driver in (wide, narrow):
        for number, prompt in enumerate(prompts[:4] + prompts[6:]):
            driver.add(
                prompt, temperature=1.0, seed=number, max_new_tokens=40, group_id="g" if number in (1, 2) else ""
            )
        driver.run()
    assert narrow.engine.scheduler.num_preemptions > 0
    by_id = {sequence.request_id: sequence for sequence in narrow.finished}
    for sequence in wide.finished:
        assert by_id[sequence.request_id].token_ids == sequence.token_ids
        assert by_id[sequence.request_id].logprobs == pytest.approx(sequence.logprobs, abs=1e-5)


@pytest.mark.parametrize("mode", ["retract", "in_place", None])
def test_retracted_requests_continue_with_the_new_weights(
    mode, build_model, drive, prompts, checkpoint, reference_logprobs
):
    old, new = build_model("qwen3-gqa", 0), build_model("qwen3-gqa", 1)
    driver = drive(old, version="7")
    sequences = [driver.add(prompts[3], temperature=1.0, seed=n, max_new_tokens=10, group_id="g") for n in range(4)]
    driver.steps(4)
    if mode:
        driver.engine.pause(mode)
        assert driver.engine._is_blocked
    load(driver, checkpoint(1), "8")
    check_scheduler(driver.engine.scheduler)
    assert driver.engine.scheduler.num_used_tokens == 0  # nothing computed under the old weights is left
    if mode:
        driver.engine.resume()
    driver.run()
    for sequence in sequences:
        assert sequence.version_spans(0, 10) == [("7", 0, 4), ("8", 4, 10)]
        assert sequence.version_spans(3, 6) == [("7", 0, 1), ("8", 1, 3)]
        expect_logprobs(sequence, reference_logprobs(old, sequence.token_ids), 0, 4)
        expect_logprobs(sequence, reference_logprobs(new, sequence.token_ids), 4, 10)


def test_interrupted_requests_return_their_tokens(build_model, drive, prompts, checkpoint, reference_logprobs):
    old, new = build_model("qwen3-gqa", 0), build_model("qwen3-gqa", 1)
    driver = drive(old, version="7", max_running=1)
    started = driver.add(prompts[0], temperature=1.0, max_new_tokens=10)
    queued = driver.add(prompts[1], temperature=1.0, max_new_tokens=3)
    driver.steps(4)
    driver.engine.pause("abort")
    assert driver.finished == [started]
    assert (started.finish.kind, started.num_output) == ("abort", 4)
    load(driver, checkpoint(1), "8")
    driver.engine.resume()
    rest = driver.add(started.token_ids, temperature=1.0, max_new_tokens=6)
    driver.run()
    expect_logprobs(started, reference_logprobs(old, started.token_ids), 0, 4)
    for sequence in (queued, rest):
        assert [version for version, _, _ in sequence.version_spans(0, sequence.num_output)] == ["8"]
        expect_logprobs(sequence, reference_logprobs(new, sequence.token_ids), 0, sequence.num_output)


def test_a_continued_answer_uses_the_same_random_numbers(build_model, drive, prompts):
    model = build_model("qwen3-gqa")
    driver = drive(model)
    whole = driver.add(prompts[0], temperature=1.0, seed=5, max_new_tokens=10)
    driver.run()
    rest = driver.add(whole.token_ids[: whole.num_prompt + 4], temperature=1.0, seed=5, max_new_tokens=6)
    driver.run()
    assert rest.token_ids == whole.token_ids


def test_a_refused_update_leaves_everything_as_it_was(build_model, drive, prompts, tmp_path):
    driver = drive(build_model("qwen3-gqa"))
    sequence = driver.add(prompts[0])
    driver.steps(2)
    with pytest.raises(RequestError) as error:
        load(driver, tmp_path / "nothing", "8")
    assert error.value.code == "weights.bad_folder"
    driver.run()
    assert sequence.version_spans(0, 8) == [("0", 0, 8)]


def test_an_incomplete_update_is_refused_and_a_step_never_sees_it(build_model, drive, prompts, checkpoint):
    old, driver = build_model("qwen3-gqa"), drive(build_model("qwen3-gqa"))
    sequence = driver.add(prompts[0])
    driver.steps(2)
    weights, new = driver.engine.weights, dict(build_model("qwen3-gqa", 1).named_parameters())
    weights.start("update-1")
    for name, value in list(new.items())[:5]:  # the first bucket of two
        weights.receive_value(name, value)
    driver.steps(2)
    with pytest.raises(RequestError) as lacking:
        driver.engine.install_weights("8", "abort", "update-1")
    weights.receive_folder(checkpoint(1))
    with pytest.raises(RequestError) as other:
        driver.engine.install_weights("8", "abort", "update-2")
    assert [error.value.code for error in (lacking, other)] == ["weights.incomplete"] * 2
    driver.run()
    assert sequence.version_spans(0, 8) == [("0", 0, 8)]
    assert all(torch.equal(value, dict(old.named_parameters())[name]) for name, value in weights_of(driver).items())
    load(driver, checkpoint(1), "9")
    assert driver.engine.version == "9"
    assert all(torch.equal(value, new[name]) for name, value in weights_of(driver).items())


def weights_of(driver) -> dict[str, torch.Tensor]:
    return dict(driver.engine.runner.model.named_parameters())


@pytest.mark.parametrize("prefill", [512, 16])
@pytest.mark.parametrize("family", ["qwen3-gqa", "qwen2-tied", "llama"])
def test_requests_that_keep_their_cache_mix_old_keys_and_values_with_new_weights(
    prefill, family, build_model, drive, prompts, tmp_path
):
    """The reference computes the same with transformers: a cache filled by the old model, continued by the new one."""
    old, new = build_model(family, 0), build_model(family, 1)
    new.save_pretrained(tmp_path)
    driver = drive(old, version="7", max_prefill_tokens=prefill)
    sequences = [driver.add(prompt, temperature=1.0, seed=n, max_new_tokens=12) for n, prompt in enumerate(prompts[:4])]
    driver.steps(5)
    computed = [min(sequence.num_computed, len(sequence.token_ids) - 1) for sequence in sequences]
    switch = [sequence.num_output for sequence in sequences]
    load(driver, tmp_path, "8", mode="in_place")
    assert [min(sequence.num_computed, len(sequence.token_ids) - 1) for sequence in sequences] == computed
    driver.run()
    assert any(switch)
    for sequence, num_old, first_new in zip(sequences, computed, switch, strict=True):
        assert [sequence.num_retractions, len(sequence.logprobs)] == [0, 12]
        spans = [("7", 0, first_new), ("8", first_new, 12)]
        assert sequence.version_spans(0, 12) == [span for span in spans if span[1] < span[2]]
        ids = torch.tensor([sequence.token_ids])
        with torch.no_grad():
            cache = DynamicCache(config=old.config)
            parts = [old(ids[:, :num_old], past_key_values=cache).logits] if num_old else []
            parts.append(new(ids[:, num_old:], past_key_values=cache).logits)
        reference = torch.cat(parts, 1)[0].log_softmax(-1)
        expect_logprobs(sequence, reference, 0, 12)


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_a_later_request_uses_keys_and_values_of_old_weights_only_if_the_update_kept_them(
    mode, build_model, drive, prompts, checkpoint, reference_logprobs
):
    new, driver = build_model("qwen3-gqa", 1), drive(build_model("qwen3-gqa", 0), version="7")
    first = driver.add(prompts[3], temperature=1.0, group_id="g", max_new_tokens=30)
    driver.add(prompts[5])
    driver.steps(12)
    load(driver, checkpoint(1), "8", mode=mode)
    later = [driver.add(prompts[number], temperature=1.0, seed=number, group_id="g") for number in (3, 5)]
    driver.run()
    assert first.num_retractions == (mode == "retract")
    is_kept = mode == "in_place"
    assert [item.num_cached for item in later] == ([32, 48] if is_kept else [32 * (mode == "retract"), 0])
    for sequence in [] if is_kept else later:
        expect_logprobs(sequence, reference_logprobs(new, sequence.token_ids), 0, 8)


def test_an_update_can_abort(build_model, drive, prompts, checkpoint):
    driver = drive(build_model("qwen3-gqa"))
    sequence = driver.add(prompts[0])
    driver.steps(2)
    load(driver, checkpoint(1), "1", mode="abort")
    assert sequence.finish.kind == "abort"
    assert sequence.status is Status.FINISHED


def test_a_request_whose_probabilities_are_not_finite_ends_alone_and_leaves_nothing_behind(build_model, drive, prompts):
    model = build_model("qwen3-gqa")
    good = [[token % 40 for token in prompt] for prompt in prompts]
    expected = drive(model)
    for prompt in good:
        expected.add(prompt, max_new_tokens=20)
    expected.run()
    with torch.no_grad():
        model.get_input_embeddings().weight[45] = torch.nan
    driver = drive(model, num_blocks=24)  # few blocks, so that those of failed requests are used again
    for prompt in good:
        driver.add(prompt, max_new_tokens=20)
        driver.add([*prompt, 45], max_new_tokens=20, group_id="bad")
        driver.add([*prompt, 45], max_new_tokens=20, group_id="bad", temperature=1.0, top_p=0.5)
    driver.run()
    failed = [item for item in driver.finished if item.token_ids[item.num_prompt - 1] == 45]
    assert [(item.finish.kind, item.num_output) for item in failed] == [("error", 0)] * 2 * len(good)
    actual = {item.request_id: item.answer_ids for item in driver.finished if item not in failed}
    wanted = [next(each.answer_ids for each in expected.finished if each.token_ids[: len(p)] == p) for p in good]
    assert [actual[str(3 * place)] for place in range(len(good))] == wanted


def test_the_thread_serves_and_stops(build_model, drive, prompts):
    driver = drive(build_model("qwen3-gqa"))
    ended = threading.Event()
    engine = driver.engine
    engine._deliver = lambda finished, progressed: ended.set() if finished else None
    engine.start()
    sequence = driver.add(prompts[0])  # reaches the scheduler before the thread looks: the next command wakes it
    engine.call(lambda: None).result(10)
    assert ended.wait(10)
    assert sequence.finish.kind == "length"
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 / 0).result(10)
    assert engine.call(lambda: 3).result(10) == 3
    engine.stop()


def test_a_failing_step_is_reported_not_swallowed(build_model, drive, prompts):
    driver = drive(build_model("qwen3-gqa"))
    failures: list[BaseException] = []
    failed = threading.Event()

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        failed.set()

    driver.engine._on_failure = on_failure

    def broken(plan):
        raise MemoryError("no room")

    driver.engine.runner.forward = broken
    driver.engine.start()
    driver.engine.submit(driver.add(prompts[0]))
    assert failed.wait(10)
    assert "no room" in str(failures[0])


def test_a_stream_has_an_event_every_stream_interval_tokens(build_model, drive, prompts):
    driver = drive(build_model("qwen3-gqa"), num_blocks=9)  # so few that some are preempted
    made: list[tuple[Sequence, int]] = []
    driver.engine._deliver = lambda finished, progressed: made.extend((item, item.num_output) for item in progressed)
    streams = [driver.add(prompts[0], max_new_tokens=30) for _ in range(4)]
    for sequence, interval in zip(streams, (1, 8, 30, 0), strict=True):
        sequence.stream_interval = interval
    driver.run()
    assert driver.engine.scheduler.num_preemptions > 0
    for sequence, expected in zip(streams, ([*range(1, 30)], [8, 16, 24], [], []), strict=True):
        assert [count for each, count in made if each is sequence] == expected  # the end is separate
    assert not torch.is_inference_mode_enabled()
