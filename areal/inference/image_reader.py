"""The field `image_data` of a request: PNG files as data URLs, in their final size."""

import asyncio
import base64
import binascii
import hashlib
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from areal.api.errors import InputError, RequestError
from areal.api.images import ImageRef, VisionLayout
from areal.system.image_pixels import decode_png, grid_of

_PREFIX = "data:image/png;base64,"


class ImageReader:
    """Decodes the images of requests, each of them once while a request needs it."""

    def __init__(self, layout: VisionLayout | None, context_length: int) -> None:
        """`layout`: None = the model takes no images."""
        self._layout = layout
        self._context_length = context_length
        self._decoded: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()

    @property
    def max_bytes(self) -> int:
        """Of all images of a request in its body: base64 of PNG files whose colours cannot be compressed."""
        if self._layout is None:
            return 0
        return self._context_length * (self._layout.patch_size * self._layout.merge_size) ** 2 * 5

    async def read(self, value: Any) -> list[tuple[ImageRef, np.ndarray]]:
        """The images with their colours, uint8 [height, width, 3]. RequestError for what is none."""
        if self._layout is None:
            raise RequestError("the served model takes no images: send no image_data", code="request.no_images")
        if not isinstance(value, list) or any(type(one) is not str for one in value):
            raise RequestError("image_data must be a list of data URLs", code="request.invalid_field")
        try:
            return await self._read(value, self._layout)
        except InputError as error:
            raise RequestError(str(error), code=error.code) from error

    async def _read(self, urls: list[str], layout: VisionLayout) -> list[tuple[ImageRef, np.ndarray]]:
        files = [_file_of(url) for url in urls]
        images = [ImageRef(hashlib.sha256(png).hexdigest(), grid_of(png, layout)) for png in files]
        if (total := sum(map(layout.tokens_of, images))) >= self._context_length:
            text = f"the images take {total} tokens, and prompt and answer at most {self._context_length}"
            raise RequestError(text, code="request.too_long")
        found: list[tuple[ImageRef, np.ndarray]] = []
        for image, png in zip(images, files, strict=True):
            colours = self._decoded.get(image.sha256)
            if colours is None:
                colours = self._decoded[image.sha256] = await asyncio.to_thread(decode_png, png, layout)
            found.append((image, colours))
        return found


def _file_of(url: str) -> bytes:
    if not url.startswith(_PREFIX):
        raise RequestError(f"an item of image_data does not start with {_PREFIX}", code="request.invalid_field")
    try:
        return base64.b64decode(url[len(_PREFIX) :], validate=True)
    except binascii.Error as error:
        raise RequestError(f"an item of image_data is not base64: {error}", code="request.invalid_field") from error
