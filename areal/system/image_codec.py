"""Images as files and as numbers: the one module that uses Pillow.

An image is decoded, oriented, converted to RGB and resized once, to the size that the vision tower takes. The servers
and the trainer then read the same PNG file, so that no difference between two resizing libraries remains.
"""

import io
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.api.errors import ConfigError, InputError
from areal.api.images import VisionLayout

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SOURCE_PIXELS = 2**26
"""Limit of width * height of a source, checked before it is decoded: about 200 MB in memory."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MAX_RATIO = 200
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
"""The EXIF tag of the orientation, and its values with width and height exchanged."""
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, TypeError, IndexError, KeyError, OverflowError, struct.error)
"""What Pillow raises for broken files."""


def encode_image(
    source: bytes, layout: VisionLayout, *, max_pixels: int | None = None
) -> tuple[bytes, tuple[int, int, int]]:
    """The PNG file of an image in its final size, and its grid of patches (1, height, width).

    `max_pixels`: a limit below that of the layout. Raises InputError (data.image_broken, data.image_too_large).
    """
    image = _decoded(source, _FORMATS)
    rows, columns = final_size(image.height, image.width, layout, max_pixels=max_pixels)
    if (columns, rows) != image.size:
        size, middle = (columns, rows), None
        if layout.sizing == "crop":
            width, height = (max(layout.side, layout.side * side // min(image.size)) for side in image.size)
            size, left, top = (width, height), (width - layout.side) // 2, (height - layout.side) // 2
            middle = (left, top, left + layout.side, top + layout.side)
        image = image.resize(size, _pillow().Resampling(layout.resample))
        image = image if middle is None else image.crop(middle)
    return _png(image), layout.grid_of(rows, columns)


def gradient_image(layout: VisionLayout) -> tuple[bytes, tuple[int, int, int]]:
    """What `encode_image` returns for a gradient of colours in the smallest size that the layout allows."""
    rows, columns = final_size(1, 1, layout)
    y, x = np.mgrid[0:rows, 0:columns]
    colours = np.stack([255 * y // rows, 255 * x // columns, 255 * (x + y) // (rows + columns)], axis=-1)
    return encode_image(_png(_pillow().fromarray(colours.astype(np.uint8))), layout)


def grid_of_source(source: bytes, layout: VisionLayout, *, max_pixels: int | None = None) -> tuple[int, int, int]:
    """The grid of patches that `encode_image` returns, from the head of the file. Raises InputError."""
    with _reported(source, _FORMATS):
        image = _opened(source, _FORMATS)
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) in _TURNED:
            width, height = height, width
    return layout.grid_of(*final_size(height, width, layout, max_pixels=max_pixels))


def final_size(height: int, width: int, layout: VisionLayout, *, max_pixels: int | None = None) -> tuple[int, int]:
    """Height and width after the resize. `max_pixels`: as in `encode_image`, but at least one tile.

    Of Qwen-VL multiples of patch * merge, between the limits of pixels: `smart_resize` of transformers, with Python's
    rounding. Raises InputError (data.image_too_large).
    """
    if layout.sizing == "tiles":
        most = min(layout.max_tiles, (max_pixels or layout.max_pixels) // layout.side**2)
        columns, rows = _tiles(height, width, layout.side, max(most, 1))
        return rows * layout.side, columns * layout.side
    if layout.sizing != "multiple":
        return layout.side, layout.side
    if max(width, height) > _MAX_RATIO * min(width, height):
        text = f"an image of {width} x {height} pixels is too long: one side may be {_MAX_RATIO} times the other"
        raise InputError(text, code="data.image_too_large")
    unit = layout.patch_size * layout.merge_size
    most = max(min(max_pixels or layout.max_pixels, layout.max_pixels), unit * unit)
    least = min(layout.min_pixels, most)
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    if rows * columns > most:
        factor = math.sqrt(height * width / most)
        rows, columns = (max(unit, math.floor(side / factor / unit) * unit) for side in (height, width))
    elif rows * columns < least:
        factor = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * factor / unit) * unit for side in (height, width))
    return max(rows, unit), max(columns, unit)


def _tiles(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Columns and rows of tiles with nearly the proportions of an image.

    Of equal proportions those with more tiles, while the image has more than half of their pixels (InternVL).
    """
    places = range(1, most + 1)
    grids = sorted(((x, y) for x in places for y in places if x * y <= most), key=lambda one: one[0] * one[1])
    best, distance = (1, 1), math.inf
    for columns, rows in grids:
        found = abs(width / height - columns / rows)
        if found < distance or (found == distance and 2 * width * height > side * side * columns * rows):
            best, distance = (columns, rows), found
    return best


def resized(colours: np.ndarray, side: int, resample: int) -> np.ndarray:
    """Colours uint8 [height, width, 3] as [side, side, 3]."""
    image = _pillow().fromarray(colours)
    return np.asarray(image.resize((side, side), _pillow().Resampling(resample)))


def colours_of(png: bytes) -> np.ndarray:
    """The colours of a PNG file: uint8 [height, width, 3]. Raises InputError as `encode_image`."""
    return np.asarray(_decoded(png, ("PNG",)))


def png_of(image: Any) -> bytes | None:
    """The PNG file of an image of Pillow; None for another object."""
    return _png(image) if isinstance(image, _pillow().Image) else None


def _png(image: "Image") -> bytes:
    target = io.BytesIO()
    image.save(target, "PNG", compress_level=1)
    return target.getvalue()


def _decoded(source: bytes, formats: tuple[str, ...]) -> "Image":
    """An RGB image, oriented as its EXIF data say."""
    from PIL import ImageOps

    with _reported(source, formats):
        image = ImageOps.exif_transpose(_opened(source, formats))
        if image.mode == "P":  # a palette may have a transparent colour
            image = image.convert("RGBA")
        return image.convert("RGB")


def _opened(source: bytes, formats: tuple[str, ...]) -> "Image":
    """An image whose size is known and allowed, and which is not decoded."""
    image = _pillow().open(io.BytesIO(source), formats=formats)
    width, height = image.size
    if width * height > MAX_SOURCE_PIXELS:
        raise _too_large(f"{width} x {height}")
    if min(width, height) < 1:
        raise ValueError(f"it has {width} x {height} pixels")
    return image


@contextmanager
def _reported(source: bytes, formats: tuple[str, ...]) -> Iterator[None]:
    """InputError for what Pillow raises."""
    try:
        yield
    except _pillow().DecompressionBombError as error:
        raise _too_large(str(error)) from error
    except InputError:
        raise
    except _BROKEN as error:
        text = f"{len(source)} bytes are no image that can be decoded ({', '.join(formats)}): {error}"
        raise InputError(text, code="data.image_broken") from error


def _too_large(size: str) -> InputError:
    text = f"an image is too large to be decoded ({size}): at most {MAX_SOURCE_PIXELS} pixels"
    return InputError(text, code="data.image_too_large")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        text = "images need the package pillow: pip install -e '.[vision]'"
        raise ConfigError(text, code="data.no_pillow") from error
    return Image
