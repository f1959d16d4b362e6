"""Images in the passes of a trainer: which files a micro-batch needs, their numbers, the positions of its tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal.api.batch import IMAGE_INDEX, TrainBatch
from areal.api.errors import InputError
from areal.api.images import ImageRef, ImageStore, VisionLayout
from areal.data.image_files import decode_png, patches_of, positions_3d


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """The images of one forward pass, on the model's device. Each is computed once, for all sequences that have it."""

    layout: VisionLayout
    patches: Tensor  # as `patches_of`, float32
    images: tuple[ImageRef, ...]
    vector_of: Tensor | None
    """[T] int64: number of the vector of each placeholder, among those of all images, from 1; 0 at other tokens. None:
    one image for a rank without any."""
    blocks: Tensor | None = None
    """[T] int64: number of the image of a placeholder, else -1; where the placeholders attend to each other."""

    def of_tokens(self, select: Callable[[Tensor], Tensor]) -> "ImageInput":
        """The same for some tokens of the row, of which the others may be padding. `select`: their values, of those of
        all. Every rank has all images."""
        return self if self.vector_of is None else replace(self, vector_of=select(self.vector_of))


class VisionReader:
    """Turns the references of batches into inputs of the vision tower."""

    def __init__(self, layout: VisionLayout, store: ImageStore) -> None:
        self.layout = layout
        self._store = store

    def num_patches(self, batch: TrainBatch) -> list[int]:
        """Patches of the images of each sequence."""
        sizes = [int(np.prod(image.grid)) for image in batch.images]
        return [sum(sizes[image] for image in row) for row in _rows(batch)]

    def keys(self, batch: TrainBatch) -> np.ndarray | None:
        """[T] int64: for each placeholder a number that is equal for the same image, else 0. None without images."""
        rows, bounds = _rows(batch), batch.cu_seqlens.tolist()
        if not any(rows):
            return None
        is_placeholder = batch.input_ids.numpy() == self.layout.image_token_id
        keys = np.zeros(len(is_placeholder), np.int64)
        for row, start, end in zip(rows, bounds[:-1], bounds[1:], strict=True):
            places = start + np.flatnonzero(is_placeholder[start:end])
            numbers = np.repeat(
                np.array(row, np.int64) + 1, [self.layout.tokens_of(batch.images[image]) for image in row]
            )
            count = min(len(places), len(numbers))  # `of` raises the error where these differ
            keys[places[:count]] = numbers[:count]
        return keys

    def of(self, batch: TrainBatch, device: torch.device) -> tuple[ImageInput | None, Tensor | None]:
        """The images of a micro-batch and, if they have three dimensions, its positions [3, T] int64; else None.

        Raises InputError when placeholders and images do not match, or a trained token is one that is never sampled
        (data.image_tokens), and as `ImageStore.read`.
        """
        self._check_trained(batch)
        rows = _rows(batch)
        used = list(dict.fromkeys(image for row in rows for image in row))
        ids = batch.input_ids.cpu().numpy()
        sequences = np.split(ids, batch.cu_seqlens.cpu().numpy()[1:-1])
        positions_by_row: list[np.ndarray] = []
        for sequence, row in zip(sequences, rows, strict=True):
            images = [batch.images[image] for image in row]
            self._check(sequence, images)
            if self.layout.has_3d_positions:
                positions_by_row.append(positions_3d(sequence, images, self.layout))
        if not used:
            return None, None
        place = {image: number for number, image in enumerate(used)}
        images = [batch.images[image] for image in used]
        layout = self.layout
        files = (self._store.read(image.sha256) for image in images)
        patches = np.concatenate([patches_of(decode_png(png, layout), layout) for png in files])
        order = tuple(place[image] for row in rows for image in row)
        positions = torch.from_numpy(np.concatenate(positions_by_row, axis=1)).to(device) if positions_by_row else None
        return self._input(patches, images, order, batch.input_ids, device), positions

    def without_images(self, input_ids: Tensor) -> ImageInput:
        """The smallest image, of one colour, for a pass without images while other ranks have some."""
        layout = self.layout
        if layout.side:
            patches, grid = np.ones((1, 3, layout.side, layout.side), np.float32), layout.grid_of(*[layout.side] * 2)
        else:
            size = layout.merge_size
            patches = np.zeros((size * size, 3 * layout.temporal_patch_size * layout.patch_size**2), np.float32)
            grid = (1, size, size)
        return self._input(patches, [ImageRef("", grid)], (), input_ids, input_ids.device)

    def _input(
        self, patches: np.ndarray, images: list[ImageRef], order: tuple[int, ...], ids: Tensor, device: torch.device
    ) -> ImageInput:
        blocks, vector_of = None, None
        if order:
            is_placeholder = (ids == self.layout.image_token_id).to(device)
            sizes = [self.layout.tokens_of(image) for image in images]
            firsts = np.cumsum([1, *sizes])
            vectors = np.concatenate([np.arange(sizes[image]) + firsts[image] for image in order])
            vector_of = torch.zeros_like(ids, device=device)
            vector_of[is_placeholder] = torch.from_numpy(vectors).to(device)
            if self.layout.is_bidirectional:
                blocks = torch.full_like(ids, -1, device=device)
                numbers = np.repeat(np.arange(len(order)), [sizes[image] for image in order])
                blocks[is_placeholder] = torch.from_numpy(numbers).to(device)
        return ImageInput(
            layout=self.layout,
            patches=torch.from_numpy(patches).to(device),
            images=tuple(images),
            vector_of=vector_of,
            blocks=blocks,
        )

    def _check(self, ids: np.ndarray, images: list[ImageRef]) -> None:
        sizes = [self.layout.tokens_of(image) for image in images]
        count = int(np.count_nonzero(ids == self.layout.image_token_id))
        if count != sum(sizes):
            text = f"a sequence of {len(ids)} tokens has {count} image placeholders, and its images need {sum(sizes)}"
            raise InputError(text, code="data.image_tokens")

    def _check_trained(self, batch: TrainBatch) -> None:
        labels = batch.input_ids.roll(-1)
        banned = torch.tensor(self.layout.banned_ids, device=labels.device)
        if bool((torch.isin(labels, banned) & batch.loss_mask).any()):
            text = (
                f"a trained token is one of {list(self.layout.banned_ids)}, which are never sampled: they hold images"
            )
            raise InputError(text, code="data.image_tokens")


def embedded(model: nn.Module, embeddings: Tensor, images: ImageInput) -> tuple[Tensor, dict[str, Tensor]]:
    """The embeddings [1, T, h] with the outputs of the vision tower, and what the decoder needs besides them."""
    layout, patches = images.layout, images.patches
    inputs: list[Tensor] = [patches[None] if layout.is_batched else patches]
    if layout.sizing == "multiple":
        inputs.append(torch.tensor([image.grid for image in images.images], device=patches.device))
    features = cast("Any", model).get_image_features(*inputs, return_dict=True)
    joined = torch.cat([each.flatten(0, -2) for each in features.pooler_output])
    deep = [torch.cat(list(layer)) for layer in getattr(features, "deepstack_features", None) or []]
    if images.vector_of is None:  # the tower ran as on the other ranks, without an effect
        nothing = torch.stack([each.sum() for each in (joined, *deep)]).sum() * 0.0
        return embeddings + nothing.to(embeddings.dtype), {}
    is_placeholder = images.vector_of > 0
    numbers = images.vector_of[is_placeholder] - 1
    values = F.embedding(numbers, joined).to(embeddings.dtype)
    more: dict[str, Any] = {}
    if deep:
        more["visual_pos_masks"] = is_placeholder[None]
        more["deepstack_visual_embeds"] = [F.embedding(numbers, layer) for layer in deep]
    return embeddings.masked_scatter(is_placeholder[None, :, None], values), more


def _rows(batch: TrainBatch) -> list[list[int]]:
    """Places in `batch.images` of those of each sequence."""
    if IMAGE_INDEX not in batch.columns:
        return [[] for _ in range(batch.num_sequences)]
    return [[image for image in row if image >= 0] for row in batch.columns[IMAGE_INDEX].tolist()]
