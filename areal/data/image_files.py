"""The image files of a run: PNG files named by their content, which trajectories refer to."""

import base64
import hashlib
import io
import math
import re
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from areal.api.config import PPOConfig
from areal.api.errors import ConfigError, InputError, RequestError
from areal.api.images import ImageRef, ImageStore, VisionLayout, collapsed
from areal.models.vision_layout import read_vision_layout, tokens_around
from areal.system.durable import fsync_path, open_regular, write_atomic
from areal.system.run_paths import RunPaths

if TYPE_CHECKING:
    from PIL.Image import Image

# ----------------------------------------------------------------------------------------------------------------------
# Images as files and as numbers: the one module that uses Pillow.
#
# An image is decoded, oriented, converted to RGB and resized once, to the size that the vision tower takes. The servers
# and the trainer then read the same PNG file, so that no difference between two resizing libraries remains.

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
    grids = sorted(((x, y) for x in places for y in places if x * y <= most), key=lambda grid: grid[0] * grid[1])
    best, distance = (1, 1), math.inf
    for columns, rows in grids:
        difference = abs(width / height - columns / rows)
        if difference < distance or (difference == distance and 2 * width * height > side * side * columns * rows):
            best, distance = (columns, rows), difference
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


# ----------------------------------------------------------------------------------------------------------------------
# What a model takes for images: numbers of their colours from PNG files, and positions of the tokens around them.

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
    result = np.empty((3, input_ids.size), np.int64)
    places = np.flatnonzero(input_ids == layout.image_token_id)
    done, following, number = 0, 0, 0
    for image in images:
        start = int(places[number])
        result[:, done:start] = np.arange(following, following + start - done)
        following += start - done
        time, rows, columns = image.grid[0], image.grid[1] // layout.merge_size, image.grid[2] // layout.merge_size
        done, number = start + time * rows * columns, number + time * rows * columns
        result[:, start:done] = np.indices((time, rows, columns)).reshape(3, -1) + following
        following += max(rows, columns)
    result[:, done:] = np.arange(following, following + input_ids.size - done)
    return result


_NAME = re.compile(r"[0-9a-f]{64}\.png")


class ImageFiles:
    """A folder of PNG files. Several processes may write and read it; a file that exists is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._durable: set[str] = set()
        """Digests of the files that this process has synced to disk: another one may have ended before it did."""

    def path(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / f"{sha256}.png"

    def put(self, png: bytes) -> str:
        """Store a file, unless it is there, and sync it to disk; returns its digest. Raises OSError."""
        digest = hashlib.sha256(png).hexdigest()
        path = self.path(digest)
        if digest in self._durable and path.exists():
            return digest
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            fsync_path(path)
            fsync_path(path.parent)
        else:
            write_atomic(path, png)
        fsync_path(self.folder)
        self._durable.add(digest)
        return digest

    def read(self, sha256: str) -> bytes:
        """The file with this digest. Raises InputError when it is missing or was changed."""
        try:
            with open_regular(self.path(sha256)) as file:
                png = file.read()
        except OSError as error:
            text = f"image {sha256} cannot be read: {error}"
            raise InputError(text, code="data.image_missing") from error
        if hashlib.sha256(png).hexdigest() != sha256:
            text = f"image file {self.path(sha256)} has changed since it was written (its digest differs)"
            raise InputError(text, code="data.image_changed")
        return png

    def unreachable(self, kept: Collection[str]) -> list[Path]:
        """The files whose digests are not in `kept`, sorted. No file that is being written."""
        files = (path for path in self.folder.glob("*/*.png") if _NAME.fullmatch(path.name))
        return sorted(path for path in files if path.stem not in kept)

    def delete_incomplete(self) -> int:
        """Delete what writers left that were killed; returns their number. Call it while no other process writes."""
        unfinished = list(self.folder.glob("*/.*.tmp"))
        for path in unfinished:
            path.unlink(missing_ok=True)
        return len(unfinished)


class MemoryImages:
    """The same for images that are needed once more only, such as those of rows that the trainer reads itself."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def put(self, png: bytes) -> str:
        digest = hashlib.sha256(png).hexdigest()
        self._files[digest] = png
        return digest

    def read(self, sha256: str) -> bytes:
        """Raises InputError for an image that was not put since the last `clear`."""
        if sha256 not in self._files:
            raise InputError(f"image {sha256} is not in memory", code="data.image_missing")
        return self._files[sha256]

    def clear(self) -> None:
        self._files.clear()


# ----------------------------------------------------------------------------------------------------------------------
# The images of a run as inference servers get them: collapsed ids, and PNG files as data URLs.

BAN = -100.0
"""Bias of a logit that makes a token impossible: in float32 its probability is 0 next to that of any other token."""


@dataclass(frozen=True, slots=True)
class RunImages:
    """How the served model takes images, and the files of the run."""

    layout: VisionLayout
    store: ImageStore
    max_images: int = 16
    """Images of one prompt: vision.max_images."""
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The tokens before and after the placeholders of an image, of a family whose processor writes them."""

    @classmethod
    def of(cls, config: PPOConfig) -> Self | None:
        """The images of a run; None for a model without images. InputError: a hub name cannot be read."""
        layout = read_vision_layout(config.actor.path, downloads=True)
        if layout is None:
            return None
        around = tokens_around(config.tokenizer_path or config.actor.path, layout)
        return cls(layout, ImageFiles(RunPaths.of(config).images), config.vision.max_images, around)

    def gradient(self) -> ImageRef:
        """Store the smallest image, the same for each model; blocks. Raises ArealError and OSError."""
        png, grid = gradient_image(self.layout)
        return ImageRef(self.store.put(png), grid)

    def collapsed(self, input_ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """What a server gets: one placeholder for each image. RequestError where they do not belong together.

        Without this check some servers answer, from other images or none.
        """
        try:
            return collapsed(input_ids, images, self.layout)
        except InputError as error:
            raise RequestError(str(error), code=error.code) from error

    def bare(self, input_ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """`collapsed` for a server that writes `around` itself. RequestError for an image without these tokens."""
        ids, place = self.collapsed(input_ids, images), self.layout.image_token_id
        before, after = map(list, self.around)
        bare_ids: list[int] = []
        start = 0
        for _ in images:
            first = ids.index(place, start)
            end = first + 1 + len(after)
            if ids[max(start, first - len(before)) : first] != before or ids[first + 1 : end] != after:
                text = f"an image of {self.layout.family} must be between the tokens {before} and {after}"
                raise RequestError(text, code="data.image_tokens")
            bare_ids += [*ids[start : first - len(before)], place]
            start = end
        return bare_ids + ids[start:]

    def url(self, image: ImageRef) -> str:
        """The file of an image as a data URL. Raises InputError when it is missing or has changed."""
        return data_url(self.store.read(image.sha256))

    @property
    def bans(self) -> dict[int, float]:
        """Biases for servers that would sample tokens which hold the places of images."""
        return dict.fromkeys(self.layout.banned_ids, BAN)


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
