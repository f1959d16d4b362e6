"""A random Qwen3-VL model that is made on the spot."""

import json
from pathlib import Path
from typing import Any

from areal.data.tiny_model import IMAGE_TOKENS


def tiny_vision_model(tokenizer: Any, seed: int, *, initializer_range: float = 0.02, width: int = 64) -> Any:
    """A random Qwen3-VL model in float32: two layers of `width`, and a tower of two layers for patches of 14 pixels.

    The tokenizer has the tokens `IMAGE_TOKENS`. `write_image_processor` writes the files that belong to it.
    """
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS))
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": tokenizer.model_max_length,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "initializer_range": initializer_range,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 14,
            "out_hidden_size": width,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": initializer_range,
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return Qwen3VLForConditionalGeneration(config)


def write_image_processor(folder: Path, *, max_pixels: int = 56 * 56) -> None:
    """The files of the image processor and the video processor of `tiny_vision_model`."""
    settings: dict[str, Any] = {
        "size": {"shortest_edge": 28 * 28, "longest_edge": max_pixels},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    kinds = {"preprocessor": "image_processor_type", "video_preprocessor": "video_processor_type"}
    for (name, kind), value in zip(kinds.items(), ("Qwen2VLImageProcessorFast", "Qwen3VLVideoProcessor"), strict=True):
        (folder / f"{name}_config.json").write_text(json.dumps(settings | {kind: value}, indent=2))
