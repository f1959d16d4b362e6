"""How the model of a checkpoint folder takes images, read from config.json and preprocessor_config.json."""

import json
from pathlib import Path
from typing import Any

from areal.api.errors import ConfigError
from areal.api.images import VisionLayout
from areal.system.hub import cached_hub_file, hub_file

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl")
"""Values of `model_type` whose images areal handles."""
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Mean and standard deviation of the colours where preprocessor_config.json has none: those of OpenAI's CLIP."""
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def read_vision_layout(model: str, *, downloads: bool = False) -> VisionLayout | None:
    """The layout of a local checkpoint folder, or of a hub repository in the local cache; None without
    preprocessor_config.json, for a model of text, or for a family that areal lacks.

    `downloads`: a repository that is not in the cache is asked too. Raises ConfigError (model.image_processor) when
    that file belongs to another model, and with `downloads` InputError (model.not_found).
    """
    try:
        config: dict[str, Any] = json.loads(_path(model, "config.json", downloads=downloads).read_text())
    except (OSError, ValueError):
        return None
    if config.get("model_type") not in FAMILIES:
        return None
    path = _path(model, "preprocessor_config.json", downloads=downloads)
    try:
        processor: dict[str, Any] = json.loads(path.read_text())
        return _layout(config, processor, str(path))
    except OSError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise _wrong(str(path), f"does not describe the images of {config['model_type']}: {error!r}") from error


def _path(model: str, file: str, *, downloads: bool) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir() or folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        return folder / file
    found = cached_hub_file(model, file)
    if found is None and downloads:
        found = hub_file(model, file, key="actor.path")
    return found or folder / file


def _layout(config: dict[str, Any], processor: dict[str, Any], path: str) -> VisionLayout:
    vision = config.get("vision_config", {})
    pairs = {
        "patch_size": "patch_size",
        "merge_size": "spatial_merge_size",
        "temporal_patch_size": "temporal_patch_size",
    }
    sizes: dict[str, int] = {}
    for ours, theirs in pairs.items():
        sizes[ours] = int(processor.get(ours, vision.get(theirs, 2)))
        if theirs in vision and vision[theirs] != sizes[ours]:
            raise _wrong(path, f"has {ours}={sizes[ours]}, and config.json vision_config.{theirs}={vision[theirs]}")
    size = processor.get("size") or {}
    ids = {name: config.get(name) for name in _TOKENS}
    return VisionLayout(
        family=config["model_type"],
        image_token_id=int(config["image_token_id"]),
        vision_start_id=ids["vision_start_token_id"],
        vision_end_id=ids["vision_end_token_id"],
        banned_ids=tuple(sorted({found for found in ids.values() if found is not None})),
        min_pixels=int(processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56),
        max_pixels=int(
            processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280
        ),
        mean=_three(processor.get("image_mean", _CLIP[0])),
        std=_three(processor.get("image_std", _CLIP[1])),
        has_3d_positions=True,
        **sizes,
    )


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _wrong(path: str, problem: str) -> ConfigError:
    return ConfigError(f"{path} {problem}; copy it from the model's own folder", code="model.image_processor")
