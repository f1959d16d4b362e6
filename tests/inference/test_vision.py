"""Images in the native engine against transformers, however the work is cut, shared or interrupted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal.data.image_files import MemoryImages, RunImages, decode_png, patches_of
from areal.fleet.weight_updater import ProbeAnswer, difference, probe
from areal.inference.vision import placed_images, positions_of
from tests.inference.vision_models import (
    IMAGE,
    LAYOUT,
    VOCABULARY,
    pictured,
    png,
    qwen2_5_vl,
    qwen3_vl,
    reference,
    save,
)

SMALL, WIDE, TALL = png(1, 8, 8), png(2, 16, 24), png(3, 32, 16)
PROMPTS = [
    (3, 4, 5, 6),
    (3, WIDE, 7, 8),
    (SMALL, 9, TALL),
    (4, WIDE, TALL, 5, SMALL, 6, 7),
    (4, TALL, *range(20), WIDE),
]


def expect_logprobs(sequence, expected: torch.Tensor, start: int, end: int) -> None:
    for place in range(start, end):
        position = sequence.num_prompt + place
        right = expected[position - 1, sequence.token_ids[position]].item()
        assert sequence.logprobs[place] == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize(
    ("build", "max_prefill_tokens"), [*((qwen3_vl, n) for n in (512, 16, 3, 1)), (qwen2_5_vl, 512), (qwen2_5_vl, 5)]
)
def test_greedy_answers_to_images_are_those_of_transformers(build, max_prefill_tokens, drive):
    model = build()
    driver = drive(model, max_running=4, max_prefill_tokens=max_prefill_tokens, layout=LAYOUT)
    sequences = [driver.add(ids, images=images, max_new_tokens=10) for ids, images in (pictured(*p) for p in PROMPTS)]
    driver.run()
    for sequence in sequences:
        expected = reference(model, sequence.token_ids, sequence.images)
        assert expected[sequence.num_prompt - 1 : -1].argmax(-1).tolist() == sequence.answer_ids
        expect_logprobs(sequence, expected, 0, 10)
    assert driver.engine.runner.vision.num_computed == 3


def test_sampled_tokens_never_stand_for_images(drive):
    model = qwen3_vl()
    driver = drive(model, layout=LAYOUT)
    ids, images = pictured(3, WIDE, 7)
    sequences = [driver.add(ids, images=images, temperature=1.0, seed=n, max_new_tokens=40) for n in range(6)]
    text = driver.add([3, 4], temperature=1.0, max_new_tokens=40)
    driver.run()
    for sequence in [*sequences, text]:
        assert not set(LAYOUT.banned_ids).intersection(sequence.answer_ids)
        expect_logprobs(sequence, reference(model, sequence.token_ids, sequence.images), 0, 40)
    assert driver.engine.runner.vision.num_computed == 1


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_siblings_share_the_keys_of_equal_images_only(delay, drive):
    model = qwen3_vl()
    other = png(9, 16, 24)  # as many tokens as WIDE
    parts = [(4, 5, WIDE, 6, *range(30)), (4, 5, other, 6, *range(30))]
    driver = drive(model, max_prefill_tokens=512 if delay == 0 else 12, layout=LAYOUT)
    add = lambda n: driver.add(pictured(*parts[n])[0], images=pictured(*parts[n])[1], group_id="g", max_new_tokens=6)  # noqa: E731
    first = add(0)
    driver.steps(delay)
    same, different = add(0), add(1)
    driver.run()
    assert same.token_ids[: same.num_prompt] == different.token_ids[: different.num_prompt]
    assert same.num_cached > (same.images[0].start if delay != 1 else 0)
    assert different.num_cached <= different.images[0].start
    assert same.token_ids == first.token_ids
    for sequence in (first, same, different):
        expect_logprobs(sequence, reference(model, sequence.token_ids, sequence.images), 0, 6)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_new_weights_apply_to_the_tower_too(mode, drive, tmp_path):
    old, new = qwen3_vl(0), qwen3_vl(1)
    driver = drive(old, layout=LAYOUT)
    ids, images = pictured(*PROMPTS[3])
    running = driver.add(ids, images=images, group_id="g", max_new_tokens=10)
    driver.steps(4)
    driver.engine.weights.start("")
    driver.engine.weights.receive_folder(save(new, tmp_path))
    driver.engine.install_weights("1", mode)
    later = driver.add(ids, images=images, group_id="g", max_new_tokens=10)
    driver.run()
    assert running.version_spans(0, 10) == [("0", 0, 4), ("1", 4, 10)]
    expect_logprobs(running, reference(old, running.token_ids, images), 0, 4)
    if mode == "in_place":
        assert later.num_cached > 0
    else:
        expect_logprobs(later, reference(new, later.token_ids, images), 0, 10)
    expected = reference(new, running.token_ids, images)
    if mode == "in_place":
        expected = _on_old_keys(old, new, running, len(ids) + 3)
    expect_logprobs(running, expected, 4, 10)


def _on_old_keys(old, new, sequence, num_old: int) -> torch.Tensor:
    """Log-probabilities of the new model, whose first `num_old` tokens have the keys and values of the old one."""
    ids = torch.tensor([sequence.token_ids])
    image = sequence.images
    patches = torch.from_numpy(np.concatenate([patches_of(item.colours, LAYOUT) for item in image]))
    grids = torch.tensor([item.grid for item in image])
    with torch.no_grad():
        cache = old(
            ids[:, :num_old],
            pixel_values=patches,
            image_grid_thw=grids,
            mm_token_type_ids=(ids[:, :num_old] == IMAGE).int(),
            use_cache=True,
        ).past_key_values
        positions = torch.from_numpy(positions_of(sequence, num_old, ids.shape[1], LAYOUT))[:, None]
        logits = new(ids[:, num_old:], past_key_values=cache, position_ids=positions).logits[0].float()
    logits[:, list(LAYOUT.banned_ids)] = -torch.inf
    rest = logits.log_softmax(-1)
    return torch.cat((rest.new_zeros(num_old, rest.shape[1]), rest))


def test_the_weights_of_a_qwen2_5_vl_checkpoint_fit(drive, tmp_path):
    old, new = qwen2_5_vl(0), qwen2_5_vl(1)
    driver = drive(old, layout=LAYOUT)
    driver.engine.weights.start("")
    driver.engine.weights.receive_folder(save(new, tmp_path))  # its names differ from those of the model
    driver.engine.install_weights("1", "retract")
    ids, images = pictured(*PROMPTS[3])
    sequence = driver.add(ids, images=images)
    driver.run()
    expect_logprobs(sequence, reference(new, sequence.token_ids, images), 0, 8)


def test_preempted_requests_compute_images_again(drive):
    model = qwen3_vl()
    wide, narrow = drive(model, layout=LAYOUT), drive(model, num_blocks=7, layout=LAYOUT)
    for driver in (wide, narrow):
        for number, parts in enumerate(PROMPTS):
            ids, images = pictured(*parts)
            driver.add(ids, images=images, temperature=1.0, seed=number, max_new_tokens=30)
        driver.run()
    assert narrow.engine.scheduler.num_preemptions > 0
    by_id = {sequence.request_id: sequence for sequence in narrow.finished}
    for sequence in wide.finished:
        assert by_id[sequence.request_id].token_ids == sequence.token_ids
        assert by_id[sequence.request_id].logprobs == pytest.approx(sequence.logprobs, abs=1e-5)


def test_features_beyond_the_limit_are_dropped(drive, monkeypatch):
    monkeypatch.setattr("areal.inference.vision._KEPT_BYTES", 1)
    model = qwen3_vl()
    driver = drive(model, max_prefill_tokens=4, layout=LAYOUT)
    ids, images = pictured(*PROMPTS[3])
    sequence = driver.add(ids, images=images)
    driver.run()
    expect_logprobs(sequence, reference(model, sequence.token_ids, images), 0, 8)
    vision = driver.engine.runner.vision
    assert vision.num_computed > 3
    assert (vision._num_bytes, len(vision._features)) == (0, 0)


@pytest.mark.parametrize("build", [qwen3_vl, qwen2_5_vl])
def test_a_canary_probe_with_an_image_shows_a_tower_that_was_not_updated(build, drive):
    trained, stale = build(0), build(0)
    stale.model.visual.load_state_dict(build(1).model.visual.state_dict())
    vision = RunImages(LAYOUT, MemoryImages())
    gaps = []
    for image in (None, vision.gradient()):
        part = probe(1, VOCABULARY, "p", vision, image)
        pixels = [(item, decode_png(vision.store.read(item.sha256), LAYOUT)) for item in part.images]
        images = placed_images(part.input_ids, pixels, LAYOUT)
        answers = []
        for model in (trained, stale):
            driver = drive(model, layout=LAYOUT)
            result = driver.add(part.input_ids, images=images, max_new_tokens=part.gconfig.max_new_tokens)
            driver.run()
            expect_logprobs(result, reference(model, result.token_ids, images), 0, part.gconfig.max_new_tokens)
            answers.append(ProbeAnswer(tuple(result.answer_ids), tuple(result.logprobs)))
        gaps.append(difference(*answers))
    assert gaps[0] < 1e-5
    assert gaps[1] > 1e-2, "the largest tolerance in float32, between servers and the trainer"
