"""Tiny random models for images of every family, image files of several sizes, and transformers' own results."""

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from areal.api.batch import IMAGE_INDEX, TrainBatch
from areal.api.config import TrainEngineConfig
from areal.api.images import ImageRef, VisionLayout, expanded
from areal.data.image_files import ImageFiles, decode_png, encode_image, patches_of
from areal.data.pack import rows_to_train_batch
from areal.data.tiny_model import character_tokenizer
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.models.vision_layout import FAMILIES, read_vision_layout
from tests.engine import engine_cases

NUM_IMAGES = (0, 1, 2, 1, 3)
SIZES = [(60, 50), (100, 30), (56, 56), (28, 28)]
TOKENS = {
    "qwen": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "llava": ("<image>",),
    "internvl": ("<img>", "</img>", "<IMG_CONTEXT>"),
    "idefics": ("<fake_token_around_image>", "<global-img>", "<image>"),
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>", "\n\n"),
}
"""Of a kind of tokenizer: tokens 3, 4, ..."""
KIND = {
    "qwen2_vl": "qwen", "qwen2_5_vl": "qwen", "qwen3_vl": "qwen", "llava": "llava", "internvl": "internvl",
    "idefics3": "idefics", "smolvlm": "idefics", "gemma3": "gemma3",
}  # fmt: skip
assert KIND.keys() == FAMILIES.keys()
SIDE = 28
_TEXT: dict[str, Any] = {
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": 7, "initializer_range": 0.1,
}  # fmt: skip
_QWEN_TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "initializer_range": 0.1,
}  # fmt: skip


def config_of(family: str, vocabulary: int, *, head_dim: int = 8) -> Any:
    """`head_dim`: of the text; vLLM serves 32 and more."""
    wide = {"head_dim": head_dim, "hidden_size": 4 * head_dim, "max_position_embeddings": 32 * head_dim}
    # The outputs of a layer have the same size at every width. Otherwise rounding errors grow with it: 9e-6 instead of
    # 3e-6 in the log-probabilities at 32 dimensions.
    scale = 0.1 * (8 / head_dim) ** 0.5
    text, towers = {**_TEXT, **wide, "initializer_range": scale, "vocab_size": vocabulary}, transformers
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    rope["mrope_section"] = [head_dim // 4, head_dim // 8, head_dim // 8]
    rope["mrope_interleaved"] = family == "qwen3_vl"  # transformers always does, vLLM and SGLang read it
    qwen = {
        "text_config": {**text, "rope_parameters": rope}, "vision_start_token_id": 3, "vision_end_token_id": 4,
        "image_token_id": 5, "video_token_id": 6, "tie_word_embeddings": False,
    }  # fmt: skip
    qwen_tower = {**_QWEN_TOWER, "out_hidden_size": 4 * head_dim}
    match family:
        case "qwen3_vl":
            tower = {**qwen_tower, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
            return transformers.Qwen3VLConfig(**qwen, vision_config=tower)
        case "qwen2_5_vl":  # 2 x 2 tokens in a window: larger images have several
            tower = {**qwen_tower, "window_size": 56, "fullatt_block_indexes": [1]}
            return transformers.Qwen2_5_VLConfig(**qwen, vision_config=tower)
        case "qwen2_vl":
            # in_chans: transformers does not write it, the files of the released models have it
            tower = {**qwen_tower, "embed_dim": 16, "hidden_size": 4 * head_dim, "mlp_ratio": 2, "in_chans": 3}
            return transformers.Qwen2VLConfig(**qwen, vision_config=tower)
        case "llava":
            return transformers.LlavaConfig(
                text_config={**text, "model_type": "llama"}, image_token_index=3,
                vision_config={**_TOWER, "model_type": "clip_vision_model", "projection_dim": 16},
            )  # fmt: skip
        case "internvl":
            tower = {**_TOWER, "image_size": [SIDE, SIDE], "patch_size": [7, 7], "layer_scale_init_value": 1.0}
            return transformers.InternVLConfig(
                text_config={**text, "model_type": "qwen2"}, vision_config=tower, image_token_id=5,
                tie_word_embeddings=False,
            )  # fmt: skip
        case "idefics3" | "smolvlm":
            kind = towers.Idefics3Config if family == "idefics3" else towers.SmolVLMConfig
            return kind(
                text_config={**text, "model_type": "llama"}, vision_config=_TOWER, image_token_id=5, scale_factor=2
            )
        case _:
            window = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
            return transformers.Gemma3Config(
                text_config={**text, **window, "query_pre_attn_scalar": 8},
                vision_config={**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
                boi_token_index=3, eoi_token_index=4, image_token_index=5, mm_tokens_per_image=4,
            )  # fmt: skip


def processor_of(family: str, side: int) -> dict[str, Any]:
    """Its preprocessor_config.json."""
    colours = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
    square = {"height": side, "width": side}
    match KIND[family]:
        case "qwen":
            size = {"size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}}
            return {**colours, **size, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
        case "llava":
            return {**colours, "size": {"shortest_edge": side}, "crop_size": square, "do_center_crop": True}
        case "internvl":
            return {**colours, "size": square, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
        case "idefics":
            edges = {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}
            return {**colours, **edges, "resample": 1}
        case _:
            return {**colours, "size": square, "resample": 2}


def tokenizer_of(family: str, chat_template: str | None = None) -> Any:
    names = ["<pad>", "<eos>", "<unk>", *TOKENS[KIND[family]], *"abcdefghijklmnop"]
    return character_tokenizer(names, context_length=128, chat_template=chat_template)


def write_family(folder: Path, family: str, *, tokenizer: Any = None, seed: int = 0, head_dim: int = 8) -> None:
    """A random model of the family, its tokenizer, and the file of its image processor."""
    tokenizer = tokenizer or tokenizer_of(family)
    torch.manual_seed(seed)
    vocabulary = len(tokenizer) + len(tokenizer) % 2  # two tensor ranks divide the vocabulary
    config = config_of(family, vocabulary, head_dim=head_dim)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():  # norms and biases too, and class tokens, which begin as zeros
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(folder, family)


def write_processor(folder: Path, family: str) -> None:
    """The file of the image processor, for the size of the tower in config.json."""
    side = json.loads((folder / "config.json").read_text())["vision_config"].get("image_size", SIDE)
    made = processor_of(family, side[0] if isinstance(side, list) else side)
    (folder / "preprocessor_config.json").write_text(json.dumps(made))


def write_case(folder: Path, family: str) -> None:
    """A model for `read_case`, in the folder `model`."""
    write_family(folder / "model", family)


def written_ids(layout: VisionLayout, tokenizer: Any) -> list[int]:
    """What the model sees for an image, with one placeholder."""
    if layout.written:
        return tokenizer.encode(layout.written, add_special_tokens=False)
    around = (layout.vision_start_id, layout.image_token_id, layout.vision_end_id)
    return [token for token in around if token is not None]


def picture(width: int, height: int, seed: int) -> bytes:
    target = io.BytesIO()
    colours = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(colours).save(target, "PNG")
    return target.getvalue()


def read_case(folder: Path) -> tuple[VisionLayout, ImageFiles, TrainBatch]:
    """The image files and a batch whose sequences have `NUM_IMAGES` images; two sequences share one."""
    layout, files = read_vision_layout(str(folder / "model")), ImageFiles(folder / "images")
    assert layout is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    images: list[ImageRef] = []
    for seed, (width, height) in enumerate(SIZES):
        png, grid = encode_image(picture(width, height, seed), layout)
        images.append(ImageRef(files.put(png), grid))
    mark, random = written_ids(layout, tokenizer), np.random.default_rng(0)
    rows: list[list[int]] = []
    masks: list[list[int]] = []
    ours: list[list[ImageRef]] = []
    used = 0
    for count in NUM_IMAGES:
        ours.append([images[(used + place) % len(images)] for place in range(count)])
        used += count
        ids = [7, *[*mark] * count, *random.integers(8, 18, 5 + count).tolist()]
        rows.append(expanded(ids, ours[-1], layout))
        masks.append([0] * (len(rows[-1]) - 4) + [1] * 4)
    batch = rows_to_train_batch(rows, masks, ours)
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    return layout, files, replace(batch, advantages=weights)


def make_engine(folder: Path, mesh: TrainerMesh | None = None, **options: Any) -> Any:
    config = TrainEngineConfig(
        path=str(folder / "model"), **{"dtype": "float32", "optimizer": engine_cases.SGD} | options
    )
    return build_fsdp_engine(
        config,
        role="actor",
        total_steps=9,
        mesh=mesh or TrainerMesh.open(None),
        seed=0,
        images=ImageFiles(folder / "images"),
    )


def transformers_inputs(
    layout: VisionLayout, ids: torch.Tensor, images: list[ImageRef], pngs: list[bytes]
) -> dict[str, Any]:
    """What transformers takes for the images of a sequence."""
    if not images:
        return {}
    pixels = torch.from_numpy(np.concatenate([patches_of(decode_png(png, layout), layout) for png in pngs]))
    kinds = (ids == layout.image_token_id).int()
    if layout.has_3d_positions:
        grids = torch.tensor([image.grid for image in images])
        return {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    if layout.family == "gemma3":
        return {"pixel_values": pixels, "token_type_ids": kinds}
    return {"pixel_values": pixels[None] if layout.is_batched else pixels}


def one_by_one(folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and gradients of transformers, a sequence at a time, banned tokens excluded."""
    layout, files, batch = read_case(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    banned, parts = torch.tensor(layout.banned_ids), []
    loss = torch.zeros(())
    assert IMAGE_INDEX in batch.columns
    for row, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        ids = batch.input_ids[start:end]
        images = [batch.images[place] for place in batch.columns[IMAGE_INDEX][row].tolist() if place >= 0]
        pngs = [files.read(image.sha256) for image in images]
        logits = model(input_ids=ids[None], **transformers_inputs(layout, ids[None], images, pngs)).logits[0]
        logits = logits.index_fill(1, banned, -1e30)
        result = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        result = torch.cat([torch.where(torch.isin(ids[1:], banned), 0.0, result), torch.zeros(1)])
        assert batch.advantages is not None
        terms = batch.advantages[start:end] * result.mul(0.3).exp()
        loss = loss + terms[batch.loss_mask[start:end]].sum()
        parts.append(result.detach())
    (loss / float(batch.loss_mask.sum())).backward()
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    return torch.cat(parts), gradients
