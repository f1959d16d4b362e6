"""Images in the passes of a trainer: which files a micro-batch needs, their numbers, the positions of its tokens."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from areal.api.batch import TrainBatch
from areal.api.errors import InputError
from areal.api.image_positions import positions_3d
from areal.api.images import ImageRef, ImageStore, VisionLayout
from areal.system.image_pixels import decode_png, patches_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """The images of one forward pass, on the model's device. Each is computed once, for all sequences that have it."""

    patches: Tensor  # [P, d] float32
    grids: Tensor  # [n, 3] int64
    order: tuple[int, ...]
    """Number of the image of each run of placeholders; empty = one image for a rank without any."""
    is_placeholder: Tensor  # [T] bool


class VisionReader:
    """Turns the references of batches into inputs of the vision tower."""

    def __init__(self, layout: VisionLayout, store: ImageStore) -> None:
        self.layout = layout
        self._store = store

    def num_patches(self, batch: TrainBatch) -> list[int]:
        """Patches of the images of each sequence."""
        sizes = [int(np.prod(image.grid)) for image in batch.images]
        return [sum(sizes[image] for image in row) for row in _rows(batch)]

    def of(self, batch: TrainBatch, device: torch.device) -> tuple[ImageInput | None, Tensor | None]:
        """The images of a micro-batch and its positions [3, T] int64; None when it has no images.

        Raises InputError when placeholders and images do not match, or a trained token is one that is never sampled
        (data.image_tokens), and as `ImageStore.read`.
        """
        self._check_trained(batch)
        rows = _rows(batch)
        used = list(dict.fromkeys(image for row in rows for image in row))
        ids = batch.input_ids.cpu().numpy()
        sequences = np.split(ids, batch.cu_seqlens.cpu().numpy()[1:-1])
        found: list[np.ndarray] = []
        for sequence, row in zip(sequences, rows, strict=True):
            images = [batch.images[image] for image in row]
            self._check(sequence, images)
            found.append(positions_3d(sequence, images, self.layout))
        if not used:
            return None, None
        place = {image: number for number, image in enumerate(used)}
        images = [batch.images[image] for image in used]
        layout = self.layout
        files = (self._store.read(image.sha256) for image in images)
        patches = np.concatenate([patches_of(decode_png(png, layout), layout) for png in files])
        order = tuple(place[image] for row in rows for image in row)
        positions = torch.from_numpy(np.concatenate(found, axis=1))
        return (
            self._input(patches, images, order, batch.input_ids, device),
            positions.to(device) if self.layout.has_3d_positions else None,
        )

    def without_images(self, input_ids: Tensor) -> ImageInput:
        """The smallest image, all zeros, for a pass without images while other ranks have some."""
        layout = self.layout
        size = layout.merge_size
        patches = np.zeros((size * size, 3 * layout.temporal_patch_size * layout.patch_size**2), np.float32)
        return self._input(patches, [ImageRef("", (1, size, size))], (), input_ids, input_ids.device)

    def _input(
        self, patches: np.ndarray, images: list[ImageRef], order: tuple[int, ...], ids: Tensor, device: torch.device
    ) -> ImageInput:
        return ImageInput(
            patches=torch.from_numpy(patches).to(device),
            grids=torch.tensor([image.grid for image in images], device=device),
            order=order,
            is_placeholder=(ids == self.layout.image_token_id).to(device),
        )

    def _check(self, ids: np.ndarray, images: list[ImageRef]) -> None:
        sizes = [self.layout.tokens_of(image) for image in images]
        found = int(np.count_nonzero(ids == self.layout.image_token_id))
        if found != sum(sizes):
            text = f"a sequence of {len(ids)} tokens has {found} image placeholders, and its images need {sum(sizes)}"
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
    found = cast("Any", model).get_image_features(images.patches, images.grids, return_dict=True)
    deep: list[tuple[Tensor, ...]] = list(getattr(found, "deepstack_features", None) or [])
    if not images.order:  # the tower ran as on the other ranks, without an effect
        nothing = torch.stack([each.sum() for layer in (found.pooler_output, *deep) for each in layer]).sum() * 0.0
        return embeddings + nothing.to(embeddings.dtype), {}
    values = torch.cat([found.pooler_output[image] for image in images.order]).to(embeddings.dtype)
    place = images.is_placeholder[None, :, None]
    more = {}
    if deep:
        more["visual_pos_masks"] = images.is_placeholder[None]
        more["deepstack_visual_embeds"] = [torch.cat([layer[image] for image in images.order]) for layer in deep]
    return embeddings.masked_scatter(place, values), more


def _rows(batch: TrainBatch) -> list[list[int]]:
    """Places in `batch.images` of those of each sequence."""
    if batch.image_index is None:
        return [[] for _ in range(batch.num_sequences)]
    return [[image for image in row if image >= 0] for row in batch.image_index.tolist()]
