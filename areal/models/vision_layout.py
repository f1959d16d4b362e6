"""How the model of a checkpoint folder takes images, read from config.json and the file of its image processor."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.errors import ConfigError
from areal.api.images import Sizing, VisionLayout
from areal.models.checkpoint_files import cached_hub_file, hub_file


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """What all checkpoints of one `model_type` have in common."""

    sizing: Sizing
    modules: tuple[str, ...]
    """Modules of the tower and between it and the language model, below the base model."""
    mark: str = ""
    written: str = ""
    """The text of an image in prompts, see `VisionLayout`."""
    tokens: tuple[str, ...] = ()
    """Keys in config.json of tokens that are never sampled, besides the placeholder. The first two surround images."""
    has_3d_positions: bool = False
    is_bidirectional: bool = False
    is_batched: bool = False
    merge_key: str = ""
    """Key in config.json of what decides how many patches become one token; empty: one, or `spatial_merge_size`."""


_QWEN = VisionFamily(
    sizing="multiple",
    modules=("visual",),
    tokens=("vision_start_token_id", "vision_end_token_id", "video_token_id"),
    has_3d_positions=True,
)
_IDEFICS = VisionFamily(
    sizing="square",
    modules=("vision_model", "connector"),
    mark="<image>",
    written="<fake_token_around_image><global-img><image><fake_token_around_image>",
    is_batched=True,
    merge_key="scale_factor",
)
_PROJECTED = ("vision_tower", "multi_modal_projector")
FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "llava": VisionFamily(sizing="crop", modules=_PROJECTED),
    "internvl": VisionFamily(
        sizing="tiles",
        modules=_PROJECTED,
        mark="<IMG_CONTEXT>",
        written="<img><IMG_CONTEXT></img>",
        merge_key="downsample_ratio",
    ),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "gemma3": VisionFamily(
        sizing="square",
        modules=_PROJECTED,
        mark="<start_of_image>",
        written="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
        tokens=("boi_token_index", "eoi_token_index"),
        is_bidirectional=True,
        merge_key="mm_tokens_per_image",
    ),
}
"""`model_type` -> family whose images areal handles."""
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Mean and standard deviation of the colours where preprocessor_config.json has none: those of OpenAI's CLIP."""
_BICUBIC = 3


def read_vision_layout(model: str, *, downloads: bool = False) -> VisionLayout | None:
    """The layout of a local checkpoint folder, or of a hub repository in the local cache; None without
    preprocessor_config.json or an image processor in processor_config.json, for a model of text, or for a family that
    areal lacks.

    `downloads`: a repository that is not in the cache is asked too. Raises ConfigError when that file belongs to
    another model (model.image_processor), or the tower makes other tokens of images (model.vision_layout), and with
    `downloads` InputError (model.not_found).
    """
    try:
        config: dict[str, Any] = json.loads(_path(model, "config.json", downloads=downloads).read_text())
    except (OSError, ValueError):
        return None
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    path = _path(model, "preprocessor_config.json", downloads=downloads)
    try:
        processor: dict[str, Any] = {}
        if path.is_file():
            processor = json.loads(path.read_text())
        else:  # newer checkpoints have one file for all parts of a processor
            path = _path(model, "processor_config.json", downloads=downloads)
            processor = json.loads(path.read_text()).get("image_processor") or {}
        if not processor:
            return None
        return _layout(config, processor, str(path), family)
    except OSError:
        return None
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise _wrong(str(path), f"does not describe the images of {config['model_type']}: {error!r}") from error


def tokens_around(tokenizer: str, layout: VisionLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of the tokens of `layout.written` before and after its placeholder, from tokenizer.json.

    `tokenizer`: as `model` of `read_vision_layout`. Raises ConfigError (model.image_processor) where it lacks one.
    """
    names = re.findall(r"<[^<>]+>", layout.written)
    if not names:
        return (), ()
    path = _path(tokenizer, "tokenizer.json", downloads=True)
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        ids: dict[str, int] = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        vocabulary = content["model"]["vocab"]
        ids = (vocabulary if isinstance(vocabulary, dict) else {}) | ids
        numbers = [int(ids[name]) for name in names]
        place = numbers.index(layout.image_token_id)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _wrong(str(path), f"does not have the tokens {names} of {layout.family}: {error!r}") from error
    return tuple(numbers[:place]), tuple(numbers[place + 1 :])


def _path(model: str, file: str, *, downloads: bool) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir() or folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        return folder / file
    path = cached_hub_file(model, file)
    if path is None and downloads:
        path = hub_file(model, file, key="actor.path")
    return path or folder / file


def _layout(config: dict[str, Any], processor: dict[str, Any], path: str, family: VisionFamily) -> VisionLayout:
    placeholder = config["image_token_id"] if "image_token_id" in config else config["image_token_index"]
    ids = [config.get(name) for name in family.tokens]
    start, end = ids[:2] or (None, None)
    sizes = _multiples if family.sizing == "multiple" else _tiles
    return VisionLayout(
        family=config["model_type"],
        image_token_id=int(placeholder),
        vision_start_id=start,
        vision_end_id=end,
        banned_ids=tuple(sorted({int(token) for token in (placeholder, *ids) if token is not None})),
        mean=_three(processor.get("image_mean", _CLIP[0])),
        std=_three(processor.get("image_std", _CLIP[1])),
        resample=int(processor.get("resample", _BICUBIC)),
        has_3d_positions=family.has_3d_positions,
        mark=family.mark,
        written=family.written,
        is_bidirectional=family.is_bidirectional,
        is_batched=family.is_batched,
        **sizes(config, processor, path, family),
    )


def _multiples(config: dict[str, Any], processor: dict[str, Any], path: str, family: VisionFamily) -> dict[str, Any]:
    """Sizes of a layout whose images are multiples of a patch's size."""
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
    least = processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56
    most = processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280
    return {"min_pixels": int(least), "max_pixels": int(most), **sizes}


def _tiles(config: dict[str, Any], processor: dict[str, Any], path: str, family: VisionFamily) -> dict[str, Any]:
    """Sizes of a layout whose images are tiles."""
    vision = config["vision_config"]
    side, patch = _first(vision["image_size"]), _first(vision["patch_size"])
    size, sizing = processor.get("size") or {}, family.sizing
    pixels = size.get("height") or size.get("shortest_edge")
    if family.is_batched:
        pixels = (processor.get("max_image_size") or {}).get("longest_edge")
    elif sizing == "crop" and not processor.get("do_center_crop", "shortest_edge" in size):
        sizing = "square"
    if pixels is not None and int(pixels) != side:
        raise _wrong(path, f"has images of {pixels} pixels, and config.json vision_config.image_size={side}")
    merge = 1
    match family.merge_key:
        case "scale_factor":
            merge = int(config.get("scale_factor", 2))
        case "downsample_ratio":
            merge = round(1 / config.get("downsample_ratio", 0.5))
        case "mm_tokens_per_image":
            merge = side // patch // math.isqrt(config.get("mm_tokens_per_image", 256))
        case _:
            pass
    if config["model_type"] == "llava":
        _check_llava(config)
    tiles = int(processor.get("max_patches", 12)) if sizing == "tiles" else 1
    limits = {"min_pixels": side * side, "max_pixels": tiles * side * side, "max_tiles": tiles}
    sizes = {"side": side, "patch_size": patch, "merge_size": merge, "temporal_patch_size": 1}
    return {"sizing": sizing, **limits, **sizes}


def _check_llava(config: dict[str, Any]) -> None:
    """Raise ConfigError unless there is one token for each patch: not for a class token, a patch or a whole image."""
    tower, kept = config["vision_config"].get("model_type"), config.get("vision_feature_select_strategy", "default")
    if (tower, kept) not in (("clip_vision_model", "default"), ("siglip_vision_model", "full")):
        text = f"a llava model with a {tower} and vision_feature_select_strategy={kept} has no token for each patch"
        raise ConfigError(f"{text}: use clip_vision_model with default", code="model.vision_layout")


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def _wrong(path: str, problem: str) -> ConfigError:
    return ConfigError(f"{path} {problem}; copy it from the model's own folder", code="model.image_processor")
