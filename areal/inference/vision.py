"""Images in a step: features of the vision tower, embeddings and positions of the tokens that hold them."""

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from areal.api.images import ImageRef, VisionLayout
from areal.data.image_files import patches_of, positions_3d
from areal.inference.attention import AttentionPlan
from areal.inference.scheduler import Chunk, PlacedImage, Sequence

_KEPT_BYTES = 1 << 28
"""Features that are kept for later chunks and requests."""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """The output of the vision tower for one image."""

    vectors: Tensor  # [tokens, hidden size]: in place of the embeddings of the placeholders
    deep: tuple[Tensor, ...]  # added to the output of the decoder's first layers; [tokens, hidden size] each

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.vectors, *self.deep))


class Vision:
    """The images of one model. Only the engine thread uses it."""

    def __init__(self, model: PreTrainedModel, layout: VisionLayout) -> None:
        self._model, self.layout = model, layout
        self._features: OrderedDict[str, ImageFeatures] = OrderedDict()
        """Digest -> features of the present weights, the last used ones last."""
        self._num_bytes = 0
        self._banned = torch.tensor(layout.banned_ids, device=model.device)
        self.num_computed = 0
        """Images that the tower has computed so far."""

    def forget(self) -> None:
        """The weights have changed."""
        self._features.clear()
        self._num_bytes = 0

    def without_banned(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocabulary] in which the banned tokens are impossible."""
        return logits.index_fill_(1, self._banned, -torch.inf)

    def logits(
        self, chunks: list[Chunk], input_ids: Tensor, positions: Tensor, kept: Tensor | None, plan: AttentionPlan
    ) -> Tensor:
        """The logits [rows, vocabulary] of a step with images, for the rows `kept`; None = all.

        `chunks` in the order of their rows in `input_ids` and `positions` [1, tokens].
        """
        embeddings = self._model.get_input_embeddings()(input_ids)
        features = self._features_of(chunks)
        is_image = torch.zeros_like(input_ids, dtype=torch.bool)
        deep: list[tuple[Tensor, ...]] = []
        if self.layout.has_3d_positions:
            positions = positions.repeat(3, 1)[:, None]
        row = 0
        for chunk in chunks:
            for image, first, end in _images_in(chunk):
                computed = features[image.sha256]
                rows = slice(row + first - chunk.start, row + end - chunk.start)
                part = slice(first - image.start, end - image.start)
                embeddings[0, rows] = computed.vectors[part]
                is_image[0, rows] = True
                deep.append(tuple(level[part] for level in computed.deep))
            if self.layout.has_3d_positions and chunk.start < chunk.sequence.image_end:
                places = positions_of(chunk.sequence, chunk.start, chunk.start + chunk.count, self.layout)
                positions[:, 0, row : row + chunk.count] = torch.from_numpy(places).to(positions.device)
            row += chunk.count
        options: dict[str, Any] = {}
        if deep and deep[0]:
            options["visual_pos_masks"] = is_image
            options["deepstack_visual_embeds"] = [torch.cat(level) for level in zip(*deep, strict=True)]
        decoder = cast(nn.Module, self._model.get_decoder())
        hidden = decoder(
            inputs_embeds=embeddings, position_ids=positions, use_cache=False, attention_plan=plan, **options
        ).last_hidden_state[0]
        head = self._model.get_output_embeddings()
        assert head is not None
        return head(hidden if kept is None else hidden[kept])

    def _features_of(self, chunks: list[Chunk]) -> dict[str, ImageFeatures]:
        """The features of all images in these chunks, by digest."""
        images = {image.sha256: image for chunk in chunks for image, _, _ in _images_in(chunk)}
        missing = [image for digest, image in images.items() if digest not in self._features]
        if missing:
            for image, computed in zip(missing, self._computed(missing), strict=True):
                self._features[image.sha256] = computed
                self._num_bytes += computed.num_bytes
            self.num_computed += len(missing)
        for digest in images:
            self._features.move_to_end(digest)
        needed = {digest: self._features[digest] for digest in images}
        while self._num_bytes > _KEPT_BYTES:
            self._num_bytes -= self._features.popitem(last=False)[1].num_bytes
        return needed

    def _computed(self, images: list[PlacedImage]) -> list[ImageFeatures]:
        layout, device, dtype = self.layout, self._model.device, self._model.dtype
        patches = torch.from_numpy(np.concatenate([patches_of(image.colours, layout) for image in images])).to(device)
        inputs = [patches[None] if layout.is_batched else patches]
        if layout.sizing == "multiple":
            inputs.append(torch.tensor([image.grid for image in images], device=device))
        outputs = cast(Any, self._model.base_model).get_image_features(*inputs, return_dict=True)
        vectors = torch.cat([each.flatten(0, -2) for each in outputs.pooler_output])
        levels: list[Items[Tensor]] = list(getattr(outputs, "deepstack_features", None) or ())  # Qwen3-VL only
        return [
            ImageFeatures(vectors_of_image.to(dtype), tuple(level[number].to(dtype) for level in levels))
            for number, vectors_of_image in enumerate(vectors.split([image.count for image in images]))
        ]


def last_seen(chunk: Chunk) -> list[int]:
    """The last token that each token of a chunk attends to; tokens of an image attend to each other."""
    result = list(range(chunk.start, chunk.start + chunk.count))
    for image, first, end in _images_in(chunk):
        result[first - chunk.start : end - chunk.start] = [image.start + image.count - 1] * (end - first)
    return result


def _images_in(chunk: Chunk) -> list[tuple[PlacedImage, int, int]]:
    """The images of a chunk, each with the first of its tokens in the chunk and the one behind the last."""
    if chunk.start >= chunk.sequence.image_end:
        return []
    end = chunk.start + chunk.count
    cut = [
        (image, max(image.start, chunk.start), min(image.start + image.count, end)) for image in chunk.sequence.images
    ]
    return [(image, first, last) for image, first, last in cut if first < last]


def placed_images(
    token_ids: Items[int], images: Items[tuple[ImageRef, np.ndarray]], layout: VisionLayout
) -> tuple[PlacedImage, ...]:
    """The images with their places in expanded token ids."""
    places: list[PlacedImage] = []
    end = shift = 0
    for image, colours in images:
        start, count = token_ids.index(layout.image_token_id, end), layout.tokens_of(image)
        end = start + count
        if layout.has_3d_positions:
            shift += max(image.grid[1:]) // layout.merge_size - count
        places.append(
            PlacedImage(
                sha256=image.sha256,
                start=start,
                count=count,
                grid=image.grid,
                colours=colours,
                shift_after=shift,
            )
        )
    return tuple(places)


def positions_of(sequence: Sequence, start: int, end: int, layout: VisionLayout) -> np.ndarray:
    """Positions of the tokens start..end-1: time, height and width, int64 [3, end - start]."""
    head = np.array(sequence.token_ids[: sequence.image_end])
    refs = [ImageRef(image.sha256, image.grid) for image in sequence.images]
    behind = np.arange(sequence.image_end, max(end, sequence.image_end)) + sequence.position_shift
    return np.concatenate((positions_3d(head, refs, layout), np.tile(behind, (3, 1))), axis=1)[:, start:end]
