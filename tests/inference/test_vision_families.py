"""Images of every family in the native engine against transformers: chunks, siblings, new weights, bans."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from areal.api.images import ImageRef, VisionLayout, expanded
from areal.data.image_files import MemoryImages, decode_png, encode_image
from areal.inference.scheduler import PlacedImage
from areal.inference.vision import placed_images
from areal.models.vision_layout import FAMILIES, read_vision_layout
from tests.engine.vision_cases import write_family, written_ids
from tests.inference.vision_models import reference

SIZES = [(28, 28), (60, 50), (100, 30)]
"""Width and height; more than one tile or window for the last two."""


@dataclass(frozen=True)
class Case:
    folder: Path
    layout: VisionLayout
    model: PreTrainedModel
    mark: list[int]
    """The tokens of an image, with one placeholder."""

    def prompt(self, *images: int, text: tuple[int, ...] = (9, 10, 11)) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Expanded ids with images of these numbers in SIZES, and the images in them."""
        store, result = MemoryImages(), []
        for number in images:
            file = io.BytesIO()
            width, height = SIZES[number]
            colours = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
            Image.fromarray(colours).save(file, "PNG")
            png, grid = encode_image(file.getvalue(), self.layout)
            result.append((ImageRef(store.put(png), grid), decode_png(png, self.layout)))
        ids = [7, *[token for number in images for token in (*self.mark, 8 + number)], *text]
        ids = expanded(ids, [image for image, _ in result], self.layout)
        return ids, placed_images(ids, result, self.layout)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """`case(family)`, made once."""
    made: dict[str, Case] = {}

    def of(family: str) -> Case:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            write_family(folder, family)
            layout = read_vision_layout(str(folder))
            assert layout is not None
            model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
            made[family] = Case(folder, layout, model, written_ids(layout, AutoTokenizer.from_pretrained(folder)))
        return made[family]

    return of


def expect(sequence, model: PreTrainedModel, layout: VisionLayout, start: int = 0) -> None:
    """From token `start` of its answer on, a greedy answer is that of `model`."""
    expected = reference(model, sequence.token_ids, sequence.images, layout)[sequence.num_prompt - 1 : -1]
    assert expected[start:].argmax(-1).tolist() == sequence.answer_ids[start:]
    right = expected.gather(1, torch.tensor(sequence.answer_ids)[:, None])[start:, 0]
    assert sequence.logprobs[start:] == pytest.approx(right.tolist(), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers_however_prompts_are_cut(family, case, drive):
    subject = case(family)
    for max_prefill_tokens in (512, 5):
        driver = drive(subject.model, max_running=4, max_prefill_tokens=max_prefill_tokens, layout=subject.layout)
        asked = [subject.prompt(*images) for images in ((), (1,), (0, 2), (2, 1, 0), (1, 1))]
        sequences = [driver.add(ids, images=images, max_new_tokens=6) for ids, images in asked]
        driver.run()
        for sequence in sequences:
            expect(sequence, subject.model, subject.layout)
            assert not set(subject.layout.banned_ids).intersection(sequence.answer_ids)
        assert driver.engine.runner.vision.num_computed == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_and_siblings_of_every_family(family, case, drive, tmp_path):
    subject = case(family)
    new = AutoModelForImageTextToText.from_pretrained(subject.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in new.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    new.save_pretrained(tmp_path)  # under the names of files
    driver = drive(subject.model, layout=subject.layout, max_prefill_tokens=7)
    ids, images = subject.prompt(1, 2, text=(9, 10, 11, 12))
    other = subject.prompt(1, 0, text=(9, 10, 11, 12))
    running = driver.add(ids, images=images, group_id="g", max_new_tokens=9)
    while len(running.logprobs) < 4:
        driver.steps(1)
    sibling, different = (
        driver.add(each, images=some, group_id="g", max_new_tokens=6) for each, some in ((ids, images), other)
    )
    driver.steps(1)
    assert sibling.num_cached > sibling.images[0].start
    driver.engine.weights.start("")
    driver.engine.weights.receive_folder(tmp_path)
    driver.engine.install_weights("1", "retract")
    driver.run()
    for sequence in (running, sibling, different):
        ((_, _, split),) = [span for span in sequence.version_spans(0, sequence.num_output) if span[0] == "0"] or [
            ("0", 0, 0)
        ]
        expect(sequence, new, subject.layout, start=split)
    old = reference(subject.model, running.token_ids, images, subject.layout)
    assert running.logprobs[3] == pytest.approx(old[len(ids) + 2, running.answer_ids[3]].item(), abs=1e-5)
