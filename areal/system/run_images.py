"""The images of a run as inference servers get them: collapsed ids, and PNG files as data URLs."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from areal.api.config import PPOConfig
from areal.api.errors import InputError, RequestError
from areal.api.images import ImageRef, ImageStore, VisionLayout, collapsed
from areal.system.image_codec import gradient_image
from areal.system.image_files import ImageFiles
from areal.system.run_paths import RunPaths
from areal.system.vision_layout import read_vision_layout, tokens_around

BAN = -100.0
"""Bias of a logit that makes a token impossible: in float32 its probability is 0 next to that of any other token."""


@dataclass(frozen=True, slots=True)
class RunImages:
    """How the served model takes images, and the files of the run."""

    layout: VisionLayout
    store: ImageStore
    max_images: int = 16
    """Of one prompt: vision.max_images."""
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The tokens before and after the placeholders of an image, of a family whose processor writes them."""

    @classmethod
    def of(cls, config: PPOConfig) -> Self | None:
        """Of a run; None for a model without images. Raises InputError for a hub name that cannot be read."""
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
        found: list[int] = []
        start = 0
        for _ in images:
            first = ids.index(place, start)
            end = first + 1 + len(after)
            if ids[max(start, first - len(before)) : first] != before or ids[first + 1 : end] != after:
                text = f"an image of {self.layout.family} must be between the tokens {before} and {after}"
                raise RequestError(text, code="data.image_tokens")
            found += [*ids[start : first - len(before)], place]
            start = end
        return found + ids[start:]

    def url(self, image: ImageRef) -> str:
        """The file of an image as a data URL. Raises InputError when it is missing or has changed."""
        return data_url(self.store.read(image.sha256))

    @property
    def bans(self) -> dict[int, float]:
        """Biases for servers that would sample tokens which hold the places of images."""
        return dict.fromkeys(self.layout.banned_ids, BAN)


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
