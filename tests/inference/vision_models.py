"""Tiny random Qwen-VL models, images, prompts with images, and the log-probabilities of transformers."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from areal.api.images import ImageRef, VisionLayout, expanded
from areal.data.image_files import decode_png, grid_of, patches_of
from areal.inference.scheduler import PlacedImage
from areal.inference.vision import placed_images

VOCABULARY = 60
IMAGE, VIDEO, START, END = 54, 55, 56, 57
LAYOUT = VisionLayout(
    family="qwen3_vl", image_token_id=IMAGE, vision_start_id=START, vision_end_id=END,
    banned_ids=(IMAGE, VIDEO, START, END), patch_size=4, merge_size=2, temporal_patch_size=2,
    min_pixels=64, max_pixels=64 * 64, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), has_3d_positions=True,
)  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "initializer_range": 0.3, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1], "initializer_range": 0.3,
}  # fmt: skip
_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip


def qwen3_vl(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3VLConfig(text_config=_TEXT, vision_config=_TOWER, tie_word_embeddings=True, **_IDS)
    return Qwen3VLForConditionalGeneration(config).eval()


def qwen2_5_vl(seed: int = 0) -> PreTrainedModel:
    """Without embeddings for the first layers of the decoder, and with a window in the tower."""
    torch.manual_seed(seed)
    left_out = ("num_position_embeddings", "deepstack_visual_indexes")
    tower = {name: value for name, value in _TOWER.items() if name not in left_out}
    tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=_TEXT, vision_config=tower, tie_word_embeddings=True, **_IDS)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """A checkpoint folder with its image processor."""
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 64 * 64}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def png(seed: int, height: int = 16, width: int = 24) -> bytes:
    """A file of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).save(file, "PNG")
    return file.getvalue()


def ref(file: bytes) -> ImageRef:
    return ImageRef(hashlib.sha256(file).hexdigest(), grid_of(file, LAYOUT))


def prompt(*parts: int | bytes) -> list[int]:
    """Collapsed ids: numbers are tokens, files are images."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [START, IMAGE, END]
    return ids


def pictured(*parts: int | bytes) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Expanded ids and the images in them."""
    images = [(ref(part), decode_png(part, LAYOUT)) for part in parts if isinstance(part, bytes)]
    ids = expanded(prompt(*parts), [image for image, _ in images], LAYOUT)
    return ids, placed_images(ids, images, LAYOUT)


def reference(
    model: PreTrainedModel, token_ids: list[int], images: tuple[PlacedImage, ...], layout: VisionLayout = LAYOUT
) -> torch.Tensor:
    """Of transformers, [tokens, vocabulary], over the tokens that may be sampled."""
    ids = torch.tensor([token_ids])
    kinds = (ids == layout.image_token_id).int()
    options: dict[str, Any] = {}
    if images:
        patches = torch.from_numpy(np.concatenate([patches_of(image.colours, layout) for image in images]))
        options["pixel_values"] = patches[None] if layout.is_batched else patches
        if layout.has_3d_positions:
            options["image_grid_thw"] = torch.tensor([image.grid for image in images])
            options["mm_token_type_ids"] = kinds
        if layout.is_bidirectional:
            options["token_type_ids"] = kinds
    with torch.no_grad():
        logits = model(ids, **options).logits[0].float()
    logits[:, list(layout.banned_ids)] = -torch.inf
    return logits.log_softmax(-1)
