"""What a model takes for images: numbers of their colours from PNG files, and positions of the tokens around them."""

import struct
from collections.abc import Sequence

import numpy as np

from areal.api.errors import InputError
from areal.api.images import ImageRef, VisionLayout
from areal.system.image_codec import colours_of, resized

_HEAD = struct.Struct(">8sI4sII")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def grid_of(png: bytes, layout: VisionLayout) -> tuple[int, int, int]:
    """Patches of an image: time, height, width; from the head of its file, without decoding.

    Raises InputError (data.image_size) for another format, or a size that the tower does not take as it is.
    """
    try:
        signature, _, kind, width, height = _HEAD.unpack_from(png)
    except struct.error:
        signature = kind = b""
        width = height = 0
    if signature != _SIGNATURE or kind != b"IHDR":
        raise InputError("an image is not a PNG file", code="data.image_broken")
    factor = layout.side or layout.patch_size * layout.merge_size
    if not height or not width or height % factor or width % factor or height * width > layout.max_pixels:
        text = f"an image has {width}x{height} pixels: both must be multiples of {factor}, with a product of at most "
        raise InputError(f"{text}{layout.max_pixels}", code="data.image_size")
    return layout.grid_of(height, width)


def decode_png(png: bytes, layout: VisionLayout) -> np.ndarray:
    """The colours of a PNG file: uint8 [height, width, 3]. Raises InputError as `grid_of`, also for a damaged file."""
    grid_of(png, layout)  # limits the pixels before they are decoded
    return colours_of(png)


def patches_of(colours: np.ndarray, layout: VisionLayout) -> np.ndarray:
    """What a tower takes of colours uint8 [height, width, 3]: normalised, float32.

    Of Qwen patches [patches, 3 * temporal patch size * patch size ** 2] in the order of its image processors: those
    that become one token follow each other, and a patch is [colour, time, height, width]. Of others tiles
    [tiles, 3, side, side], by rows; of several, the last one is the whole image.
    """
    patch, merge, side = layout.patch_size, layout.merge_size, layout.side
    if side and colours.shape[0] * colours.shape[1] > side * side:
        whole = patches_of(resized(colours, side, layout.resample), layout)
        parts = (patches_of(part, layout) for row in _cut(colours, side, 0) for part in _cut(row, side, 1))
        return np.concatenate([*parts, whole])
    values = colours.astype(np.float32) * np.float32(1 / 255)
    values = (values - np.array(layout.mean, np.float32)) / np.array(layout.std, np.float32)
    if side:
        return values.transpose(2, 0, 1)[None]
    height, width = values.shape[0] // patch, values.shape[1] // patch
    parts = values.reshape(height // merge, merge, patch, width // merge, merge, patch, 3)
    parts = parts.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    repeated = np.broadcast_to(parts, (*parts.shape[:5], layout.temporal_patch_size, *parts.shape[6:]))
    return repeated.reshape(height * width, -1)


def _cut(colours: np.ndarray, side: int, axis: int) -> list[np.ndarray]:
    return np.split(colours, colours.shape[axis] // side, axis=axis)


def positions_3d(input_ids: np.ndarray, images: Sequence[ImageRef], layout: VisionLayout) -> np.ndarray:
    """Positions in time, height and width (M-RoPE, arXiv 2409.12191) of expanded tokens: int64 [3, T].

    A text token has three equal numbers. The placeholders of an image count its rows and columns from the next
    number; the text after it continues from the largest number that was used, so positions are below T. `images` are
    those of the sequence in order, and their placeholders are complete (`areal.api.images.collapsed`).
    """
    found = np.empty((3, input_ids.size), np.int64)
    places = np.flatnonzero(input_ids == layout.image_token_id)
    done, following, number = 0, 0, 0
    for image in images:
        start = int(places[number])
        found[:, done:start] = np.arange(following, following + start - done)
        following += start - done
        time, rows, columns = image.grid[0], image.grid[1] // layout.merge_size, image.grid[2] // layout.merge_size
        done, number = start + time * rows * columns, number + time * rows * columns
        found[:, start:done] = np.indices((time, rows, columns)).reshape(3, -1) + following
        following += max(rows, columns)
    found[:, done:] = np.arange(following, following + input_ids.size - done)
    return found
