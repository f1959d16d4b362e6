"""How the families tile and resize images: the numbers of the image processors of transformers."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from areal.api.images import VisionLayout
from areal.data.image_files import decode_png, encode_image, grid_of, patches_of
from areal.models.vision_layout import read_vision_layout, tokens_around
from tests.expect import raises_code

COLOURS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
SQUARE = {"height": 28, "width": 28}
CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {"image_token_index": 5, "vision_config": {"model_type": "clip_vision_model"}},
        {"size": {"shortest_edge": 28}, "crop_size": SQUARE, "do_center_crop": True},
    ),
    "internvl": ({"image_token_id": 5}, {"size": SQUARE, "crop_to_patches": True, "max_patches": 6}),
    "idefics3": (
        {"image_token_id": 5, "scale_factor": 2},
        {"max_image_size": {"longest_edge": 28}, "size": {"longest_edge": 28}, "resample": 1},
    ),
    "gemma3": (
        {"image_token_index": 5, "boi_token_index": 3, "eoi_token_index": 4, "mm_tokens_per_image": 4},
        {"size": SQUARE, "resample": 2},
    ),
}
"""Of a family: config.json, and the file of its image processor."""
SIZES = [(28, 28), (60, 50), (100, 30), (20, 90), (57, 56), (300, 20)]


def layout_of(folder: Path, family: str, **config: Any) -> VisionLayout | None:
    model, processor = CHECKPOINTS[family]
    tower = {"image_size": 28, "patch_size": 7} | model.get("vision_config", {})
    (folder / "config.json").write_text(json.dumps({"model_type": family} | model | {"vision_config": tower} | config))
    (folder / "preprocessor_config.json").write_text(json.dumps(COLOURS | processor))
    return read_vision_layout(str(folder))


def picture(width: int, height: int) -> bytes:
    colours = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    target = io.BytesIO()
    Image.fromarray(colours).save(target, "PNG")
    return target.getvalue()


def theirs(family: str, source: bytes) -> np.ndarray:
    processor = COLOURS | CHECKPOINTS[family][1]
    image = Image.open(io.BytesIO(source))
    match family:
        case "llava":
            made = transformers.CLIPImageProcessorPil(**processor)
        case "internvl":
            made = transformers.GotOcr2ImageProcessorPil(**processor)
        case "idefics3":
            made = transformers.Idefics3ImageProcessorPil(**processor, do_image_splitting=False, do_resize=False)
        case _:
            made = transformers.Gemma3ImageProcessorPil(**processor)
    result = np.asarray(made(images=[image], return_tensors="np")["pixel_values"])
    return result[0] if family == "idefics3" else result


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_the_numbers_are_those_of_the_processor_of_transformers(tmp_path, family, size):
    layout, source = layout_of(tmp_path, family), picture(*size)
    assert layout is not None
    png, grid = encode_image(source, layout)
    assert encode_image(png, layout) == (png, grid)  # what a server gets is final
    assert grid_of(png, layout) == grid
    actual, expected = patches_of(decode_png(png, layout), layout), theirs(family, source)
    assert actual.shape == expected.shape
    assert grid == (actual.shape[0], 4, 4)
    few = actual[:-1] if len(actual) > 1 else actual  # they make the whole image of a tiled one from the source
    np.testing.assert_allclose(few, expected[: len(few)], rtol=0, atol=1e-5)


def test_the_limit_of_pixels_limits_the_tiles(tmp_path):
    layout = layout_of(tmp_path, "internvl")
    assert layout is not None
    assert (layout.max_tiles, layout.max_pixels) == (6, 6 * 28 * 28)
    assert encode_image(picture(300, 20), layout)[1] == (7, 4, 4)
    assert encode_image(picture(300, 20), layout, max_pixels=2 * 28 * 28)[1] == (3, 4, 4)
    assert encode_image(picture(300, 20), layout, max_pixels=1)[1] == (1, 4, 4)


def test_a_file_for_all_parts_of_a_processor_is_read(tmp_path):
    layout = layout_of(tmp_path, "gemma3")
    file = tmp_path / "preprocessor_config.json"
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(file.read_text())}))
    file.unlink()
    assert read_vision_layout(str(tmp_path)) == layout
    (tmp_path / "processor_config.json").write_text("{}")
    assert read_vision_layout(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("family", "config", "code"),
    [
        ("gemma3", {"vision_config": {"image_size": 56, "patch_size": 7}}, "model.image_processor"),
        ("idefics3", {"vision_config": {"image_size": 56, "patch_size": 7}}, "model.image_processor"),
        ("llava", {"vision_feature_select_strategy": "full"}, "model.vision_layout"),
        (
            "llava",
            {"vision_config": {"image_size": 28, "patch_size": 7, "model_type": "pixtral"}},
            "model.vision_layout",
        ),
    ],
)
def test_what_makes_other_tokens_is_refused(tmp_path, family, config, code):
    with raises_code(code):
        layout_of(tmp_path, family, **config)


def test_the_tokens_around_an_image_are_those_of_the_tokenizer(tmp_path):
    vocabulary = {"<img>": 3, "<IMG_CONTEXT>": 5, "a": 6}
    added = [{"id": 4, "content": "</img>"}]
    path = tmp_path / "tokenizer.json"
    layout = layout_of(tmp_path, "internvl")
    path.write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}}))
    assert tokens_around(str(tmp_path), layout) == ((3,), (4,))
    assert tokens_around(str(tmp_path), layout_of(tmp_path, "llava")) == ((), ())
    for wrong in (
        {"added_tokens": [], "model": {"vocab": vocabulary}},
        {"model": {"vocab": vocabulary | {"</img>": 4}}},
    ):
        path.write_text(json.dumps(wrong).replace('"<IMG_CONTEXT>": 5', '"<IMG_CONTEXT>": 7'))
        with raises_code("model.image_processor", "tokenizer.json"):
            tokens_around(str(tmp_path), layout)


def test_a_family_with_rows_of_tiles_takes_no_images(tmp_path):
    assert layout_of(tmp_path, "llava", model_type="llava_next") is None
