"""Tiny random models of the families whose images vLLM and SGLang take, with the files of their processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal.data.tiny_model import character_tokenizer
from tests.engine.vision_cases import KIND, TOKENS, write_family
from tests.servers.checkpoints import CHARACTERS

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
_QWEN = {"image_processor_type": "Qwen2VLImageProcessor"}
_VIDEO = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}, "patch_size": 14, "merge_size": 2}
_FILES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_vl": {
        "preprocessor": _QWEN | {"processor_class": "Qwen3VLProcessor"},
        "video_preprocessor": {"video_processor_type": "Qwen3VLVideoProcessor", **_VIDEO},
    },
    "qwen2_vl": {
        "preprocessor": _QWEN | {"processor_class": "Qwen2VLProcessor"},
        "video_preprocessor": {"video_processor_type": "Qwen2VLVideoProcessor", **_VIDEO},
    },
    "qwen2_5_vl": {
        "preprocessor": _QWEN | {"processor_class": "Qwen2_5_VLProcessor"},
        "video_preprocessor": {"video_processor_type": "Qwen2VLVideoProcessor", **_VIDEO},
    },
    "llava": {
        "preprocessor": {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"},
        "processor": {
            "processor_class": "LlavaProcessor",
            "patch_size": 7,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    },
    "internvl": {
        "preprocessor": {"image_processor_type": "GotOcr2ImageProcessor", "processor_class": "InternVLProcessor"},
        "video_preprocessor": {"video_processor_type": "InternVLVideoProcessor", "size": {"height": 28, "width": 28}},
        "processor": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    },
    "idefics3": {
        "preprocessor": {"image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor"},
        "processor": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    },
    "smolvlm": {
        "preprocessor": {"image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor"},
        "video_preprocessor": {"video_processor_type": "SmolVLMVideoProcessor"},
        "processor": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    },
}
_NAMED_TOKENS = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
}


def write_served(folder: Path, family: str, seed: int) -> Path:
    """What areal and both servers read; text heads have 32 dimensions, the fewest that vLLM takes."""
    names = ["<pad>", "<eos>", "<unk>", *TOKENS[KIND[family]], *CHARACTERS, "<video>", "<end_of_utterance>"]
    tokenizer = character_tokenizer(names, context_length=1024, chat_template=TEMPLATE)
    write_family(folder, family, tokenizer=tokenizer, seed=seed, head_dim=32)
    for name, added in _FILES[family].items():
        path = folder / f"{name}_config.json"
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | added))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": _NAMED_TOKENS.get(family, {})}))
    return folder
