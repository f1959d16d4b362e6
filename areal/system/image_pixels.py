"""From the PNG file of an image in its final size to the input of a vision tower."""

import struct

import numpy as np

from areal.api.errors import InputError
from areal.api.images import VisionLayout
from areal.system.image_codec import colours_of

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
    factor = layout.patch_size * layout.merge_size
    if not height or not width or height % factor or width % factor or height * width > layout.max_pixels:
        text = f"an image has {width}x{height} pixels: both must be multiples of {factor}, with a product of at most "
        raise InputError(f"{text}{layout.max_pixels}", code="data.image_size")
    return 1, height // layout.patch_size, width // layout.patch_size


def decode_png(png: bytes, layout: VisionLayout) -> np.ndarray:
    """The colours of a PNG file: uint8 [height, width, 3]. Raises InputError as `grid_of`, also for a damaged file."""
    grid_of(png, layout)  # limits the pixels before they are decoded
    return colours_of(png)


def patches_of(colours: np.ndarray, layout: VisionLayout) -> np.ndarray:
    """Normalised patches, float32 [patches, 3 * temporal patch size * patch size ** 2], of uint8 [height, width, 3].

    In the order of Qwen's image processors: the patches that become one token follow each other, and a patch is
    [colour, time, height, width].
    """
    patch, merge = layout.patch_size, layout.merge_size
    values = colours.astype(np.float32) * np.float32(1 / 255)
    values = (values - np.array(layout.mean, np.float32)) / np.array(layout.std, np.float32)
    height, width = values.shape[0] // patch, values.shape[1] // patch
    parts = values.reshape(height // merge, merge, patch, width // merge, merge, patch, 3)
    parts = parts.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    repeated = np.broadcast_to(parts, (*parts.shape[:5], layout.temporal_patch_size, *parts.shape[6:]))
    return repeated.reshape(height * width, -1)
