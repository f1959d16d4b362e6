"""Image files by content, and how a checkpoint folder describes its images."""

import hashlib
import json

import pytest

from areal.api.config import GRPOConfig, PPOActorConfig
from areal.data.image_files import ImageFiles, RunImages
from areal.models.vision_layout import read_vision_layout
from tests.expect import raises_code

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
    found = RunImages.of(GRPOConfig(experiment_name="a", trial_name="b", actor=actor, allocation_mode="d1"))
    assert found is not None
    assert found.layout == local
    assert set(found.bans) == {3, 4, 5, 6}
    repository = tmp_path / "cache" / "models--someone--model"
    snapshot = repository / "snapshots" / ("1" * 40)
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("1" * 40)
    written(snapshot, CONFIG, PROCESSOR)
    assert read_vision_layout("someone/model") == local
