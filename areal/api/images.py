"""Records of images in prompts: references by content, and the tokens that hold their places. No pixels.

Inside areal token ids are *expanded*: an image takes one placeholder for each vector that the vision tower makes of it.
A server gets *collapsed* ids, with one placeholder for each image, and expands them itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from areal.api.errors import InputError

Sizing = Literal["multiple", "square", "crop", "tiles"]
"""Final size of an image: multiples of a patch's size; one tile, with other proportions; one tile, whose shortest side
decides and whose middle stays; or as many tiles as its proportions need."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image of a run, in its final size."""

    sha256: str
    """Hex digest of its PNG file."""
    grid: tuple[int, int, int]
    """Patches of the vision tower: time (of an image in tiles: tiles), height, width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayout:
    """How a family of models takes images; `areal.models.vision_layout` reads it from a checkpoint folder."""

    family: str
    """`model_type` in config.json."""
    image_token_id: int
    """The placeholder."""
    vision_start_id: int | None
    vision_end_id: int | None
    """The tokens around the placeholders of an image, where the family has them."""
    banned_ids: tuple[int, ...]
    """Tokens that are never sampled, ascending: placeholders and what surrounds them."""
    patch_size: int
    """Pixels of a patch in each direction."""
    merge_size: int
    """Patches that become one token, in each direction."""
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    """Limits of height * width after the resize."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    """Mean and deviation of the colours, from 0 to 1."""
    has_3d_positions: bool
    """Positions count time, height and width; else tokens."""
    sizing: Sizing = "multiple"
    side: int = 0
    """Pixels of a tile in each direction; 0 for multiples."""
    max_tiles: int = 1
    """Besides the tile that shows the whole image, if there are several."""
    resample: int = 3
    """Filter of the resize, as Pillow numbers them: bicubic."""
    mark: str = ""
    """What chat templates write for an image. Empty: the same as `written`."""
    written: str = ""
    """What the model sees for an image, with one placeholder. Empty: the placeholder between start and end."""
    is_bidirectional: bool = False
    """The placeholders of an image attend to each other, within the window of a layer that has one."""
    is_batched: bool = False
    """The tower takes tiles with one more dimension in front, and drops tiles that are all zero."""

    def tokens_of(self, image: ImageRef) -> int:
        """Number of placeholders of an image."""
        time, height, width = image.grid
        return time * height * width // self.merge_size**2

    def grid_of(self, height: int, width: int) -> tuple[int, int, int]:
        """Patches of an image of these pixels, which are a final size."""
        if self.sizing == "multiple":
            return 1, height // self.patch_size, width // self.patch_size
        tiles, patches = height // self.side * (width // self.side), self.side // self.patch_size
        return tiles + (tiles > 1), patches, patches


class ImageStore(Protocol):
    """Image files of a run, by their content."""

    def put(self, png: bytes) -> str:
        """Store a PNG file durably; returns its digest."""
        ...

    def read(self, sha256: str) -> bytes:
        """The PNG file with this digest. Raises InputError (data.image_missing, data.image_changed)."""
        ...


def collapsed(input_ids: Sequence[int], images: Sequence[ImageRef], layout: VisionLayout) -> list[int]:
    """Expanded ids with one placeholder for each image. Raises InputError where the placeholders are not those."""
    ids = list(input_ids)
    collapsed_ids: list[int] = []
    start = 0
    for image in images:
        try:
            first = ids.index(layout.image_token_id, start)
        except ValueError:
            raise _not_those(ids, images, layout) from None
        end = first + layout.tokens_of(image)
        if ids[first:end].count(layout.image_token_id) != end - first:
            raise _not_those(ids, images, layout)
        collapsed_ids += ids[start : first + 1]
        start = end
    if layout.image_token_id in ids[start:]:
        raise _not_those(ids, images, layout)
    return collapsed_ids + ids[start:]


def expanded(input_ids: Sequence[int], images: Sequence[ImageRef], layout: VisionLayout) -> list[int]:
    """Collapsed ids with the placeholders of each image. Raises InputError for another number of placeholders."""
    ids = list(input_ids)
    if ids.count(layout.image_token_id) != len(images):
        raise _not_those(ids, images, layout)
    expanded_ids: list[int] = []
    rest = iter(images)
    for token in ids:
        expanded_ids += [token] * (layout.tokens_of(next(rest)) if token == layout.image_token_id else 1)
    return expanded_ids


def _not_those(ids: list[int], images: Sequence[ImageRef], layout: VisionLayout) -> InputError:
    sizes = ", ".join(str(layout.tokens_of(image)) for image in images) or "none"
    text = f"{ids.count(layout.image_token_id)} image placeholders do not belong to {len(images)} images ({sizes})"
    return InputError(text, code="data.image_tokens")
