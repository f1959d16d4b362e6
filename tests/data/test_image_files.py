"""Images are decoded, oriented and resized as the model's own processor does it; broken and huge ones are refused."""

import hashlib
import io
import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from areal.api.config import GRPOConfig, PPOActorConfig
from areal.data.image_files import ImageFiles, RunImages, colours_of, encode_image, gradient_image, patches_of
from areal.models.vision_layout import read_vision_layout
from tests.api.test_images import LAYOUT
from tests.expect import raises_code


def picture(width, height, mode="RGB", kind="PNG", **options):
    colours = np.random.default_rng(width).integers(0, 255, (height, width, len(mode)), dtype=np.uint8)
    target = io.BytesIO()
    Image.fromarray(colours.squeeze()).save(target, kind, **options)
    return target.getvalue()


@pytest.mark.parametrize("size", [(56, 56), (100, 30), (57, 200), (400, 90), (10, 12), (300, 20)])
def test_the_numbers_are_those_of_the_processor_of_transformers(size):
    source = picture(*size)
    theirs = Qwen2VLImageProcessorPil(
        size={"shortest_edge": LAYOUT.min_pixels, "longest_edge": 12544}, image_mean=LAYOUT.mean, image_std=LAYOUT.std
    )(images=[Image.open(io.BytesIO(source))], return_tensors="np")
    png, grid = encode_image(source, LAYOUT, max_pixels=12544)
    assert grid == tuple(theirs["image_grid_thw"][0])
    np.testing.assert_allclose(patches_of(colours_of(png), LAYOUT), theirs["pixel_values"], rtol=0, atol=1e-6)
    assert encode_image(png, LAYOUT, max_pixels=12544) == (png, grid)


@pytest.mark.parametrize(("mode", "kind"), [("RGBA", "PNG"), ("L", "PNG"), ("RGB", "JPEG"), ("RGB", "WEBP")])
def test_other_modes_and_formats_become_rgb(mode, kind):
    png, _ = encode_image(picture(56, 56, mode, kind), LAYOUT)
    assert Image.open(io.BytesIO(png)).mode == "RGB"


def test_the_orientation_of_a_photograph_is_applied():
    exif = Image.Exif()
    exif[274] = 6  # rotate by 90 degrees
    _, grid = encode_image(picture(112, 56, kind="JPEG", exif=exif), LAYOUT)
    assert grid == (1, 8, 4)


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def claiming(width, height):
    """A small file with the header of a large image."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"0"))


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (b"", "data.image_broken"),
        (b"text", "data.image_broken"),
        (picture(56, 56)[:500], "data.image_broken"),
        (picture(56, 56).replace(b"IDAT", b"XXXX"), "data.image_broken"),
        (picture(402, 2), "data.image_too_large"),
        (claiming(40_000, 40_000), "data.image_too_large"),
        (claiming(10_000, 9_000), "data.image_too_large"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_broken_and_huge_images_are_refused(source, code):
    with raises_code(code):
        encode_image(source, LAYOUT)


@pytest.mark.parametrize(("min_pixels", "size"), [(28 * 28, 28), (56 * 56, 56), (60 * 60, 84), (0, 28)])
def test_a_gradient_has_the_smallest_size_and_stays_as_it_is(min_pixels, size):
    layout = replace(LAYOUT, min_pixels=min_pixels, max_pixels=10**6)
    png, grid = gradient_image(layout)
    assert grid == (1, size // layout.patch_size, size // layout.patch_size)
    assert encode_image(png, layout) == (png, grid) == gradient_image(layout)
    assert len(np.unique(colours_of(png).reshape(-1, 3), axis=0)) > size


# --- Image files by content, and how a checkpoint folder describes its images

CONFIG = {
    "model_type": "qwen3_vl", "image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3,
    "vision_end_token_id": 4, "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}  # fmt: skip
PROCESSOR = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 784, "longest_edge": 3136}}


def test_a_file_is_stored_once_under_its_digest(tmp_path):
    files = ImageFiles(tmp_path / "images")
    digest = files.put(b"png")
    assert digest == hashlib.sha256(b"png").hexdigest()
    before = files.path(digest).stat()
    assert files.put(b"png") == digest
    assert files.path(digest).stat().st_mtime_ns == before.st_mtime_ns
    assert files.read(digest) == b"png"
    other = files.put(b"other")
    assert files.unreachable({digest}) == [files.path(other)]


def test_a_missing_or_changed_file_is_refused(tmp_path):
    files = ImageFiles(tmp_path)
    with raises_code("data.image_missing"):
        files.read("0" * 64)
    digest = files.put(b"png")
    files.path(digest).write_bytes(b"pgn")
    with raises_code("data.image_changed"):
        files.read(digest)


def written(folder, config, processor):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


def test_the_layout_of_a_checkpoint_is_read(tmp_path):
    layout = read_vision_layout(written(tmp_path, CONFIG, PROCESSOR))
    assert layout is not None
    assert (layout.image_token_id, layout.banned_ids) == (5, (3, 4, 5, 6))
    assert (layout.patch_size, layout.merge_size, layout.min_pixels, layout.max_pixels) == (14, 2, 784, 3136)
    assert layout.mean[0] == pytest.approx(0.48145466)
    assert read_vision_layout(written(tmp_path, {"model_type": "qwen3"}, {})) is None


def test_an_image_processor_of_another_model_is_refused(tmp_path):
    with raises_code("model.image_processor"):
        read_vision_layout(written(tmp_path, CONFIG, PROCESSOR | {"patch_size": 16}))
    written(tmp_path, CONFIG, {"patch_size": "x"})
    with raises_code("model.image_processor"):
        read_vision_layout(str(tmp_path))
    (tmp_path / "preprocessor_config.json").unlink()
    assert read_vision_layout(str(tmp_path)) is None


def test_a_hub_name_has_the_layout_of_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(tmp_path / file))
    local = read_vision_layout(written(tmp_path, CONFIG, PROCESSOR))
    assert read_vision_layout("someone/model") is None
    assert read_vision_layout("someone/model", downloads=True) == local
    actor = PPOActorConfig(path="someone/model")
    result = RunImages.of(GRPOConfig(experiment_name="a", trial_name="b", actor=actor, allocation_mode="d1"))
    assert result is not None
    assert result.layout == local
    assert set(result.bans) == {3, 4, 5, 6}
    repository = tmp_path / "cache" / "models--someone--model"
    snapshot = repository / "snapshots" / ("1" * 40)
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("1" * 40)
    written(snapshot, CONFIG, PROCESSOR)
    assert read_vision_layout("someone/model") == local
