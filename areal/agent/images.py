"""Images in the messages of dialogues: how they arrive, and their places in the tokens of a dialogue."""

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from areal.agent.turns import TurnRefused, TurnRequest
from areal.api.errors import InputError
from areal.api.images import ImageRef, collapsed, expanded
from areal.data.image_files import RunImages, encode_image

Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class DialogueImages:
    """The images of one dialogue. In its token tree the placeholders of image k are tokens -1 - k.

    So different images never look like the same tokens, although the policy sees the same placeholders.
    """

    run: RunImages
    refs: list[ImageRef] = field(default_factory=list[ImageRef])  # Image k.
    _numbers: dict[ImageRef, int] = field(default_factory=dict[ImageRef, int])
    _by_url: dict[bytes, ImageRef] = field(default_factory=dict[bytes, ImageRef])

    def stored(self, messages: Messages) -> tuple[dict[str, Any], ...]:
        """Messages whose images are stored and named by content; blocks. Raises InputError for an unusable image, and
        for more than `RunImages.max_images`."""
        count = sum(part["type"] == "image" for message in messages for part in parts_of(message))
        if count > self.run.max_images:
            text = f"the messages have {count} images, and vision.max_images={self.run.max_images}"
            raise InputError(text, code="data.too_many_images")
        copies: list[dict[str, Any]] = []
        for message in messages:
            stored = [self._stored(part) for part in parts_of(message)]
            copies.append({**message, "content": stored} if stored else dict(message))
        return tuple(copies)

    def _stored(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """An image part with `url` gets `sha256` and `grid` in its place."""
        if part["type"] != "image" or "url" not in part:
            return dict(part)
        key = hashlib.sha256(part["url"].encode()).digest()
        ref = self._by_url.get(key)
        if ref is None:
            file, grid = encode_image(_bytes_of(part["url"]), self.run.layout)
            ref = self._by_url[key] = ImageRef(self.run.store.put(file), grid)
        return {"type": "image", "sha256": ref.sha256, "grid": list(ref.grid)}

    def placed(self, token_ids: Sequence[int], messages: Messages) -> list[int]:
        """Rendered ids, in which each image of the messages is one placeholder, in the form of the tree.

        Raises InputError (data.image_tokens) when the template does not write one placeholder for each image.
        """
        images = list(images_of(messages))
        expanded(token_ids, images, self.run.layout)
        return self._placed(token_ids, images)

    def of_prompt(self, token_ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """A prompt with its images in the form of the tree. Raises InputError as `collapsed`."""
        return self._placed(collapsed(token_ids, images, self.run.layout), images)

    def _placed(self, token_ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        layout = self.run.layout
        placed: list[int] = []
        rest = iter(images)
        for token in token_ids:
            if token == layout.image_token_id:
                image = next(rest)
                placed += [-1 - self._number(image)] * layout.tokens_of(image)
            else:
                placed.append(token)
        return placed

    def _number(self, image: ImageRef) -> int:
        if image not in self._numbers:
            self._numbers[image] = len(self.refs)
            self.refs.append(image)
        return self._numbers[image]

    def plain(self, token_ids: Sequence[int]) -> tuple[Sequence[int], list[ImageRef]]:
        """Ids of the tree as the policy sees them, and the images in them."""
        if not self.refs:
            return token_ids, []
        tokens: list[int] = []
        images: list[ImageRef] = []
        for token, run in groupby(token_ids):
            count = len(list(run))
            if token < 0:
                image = self.refs[-1 - token]
                images += [image] * (count // self.run.layout.tokens_of(image))
            tokens += [self.run.layout.image_token_id if token < 0 else token] * count
        return tokens, images

    def written(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Ids of the tree with one placeholder for each image, as the chat template wrote them."""
        return collapsed(*self.plain(token_ids), self.run.layout) if self.refs else token_ids


async def with_stored_images(request: TurnRequest, images: DialogueImages | None) -> TurnRequest:
    """A turn whose images are stored. TurnRefused for an unusable image, and for any where the policy takes none."""
    if not any(map(parts_of, request.messages)):
        return request
    if images is None:
        text = "the messages have images, and the policy takes text only"
        raise TurnRefused(text, code="agent.multimodal", status=400, param="messages")
    try:
        return replace(request, messages=await asyncio.to_thread(images.stored, request.messages))
    except InputError as error:
        raise TurnRefused(str(error), code=error.code, status=400, param="messages") from error


def images_of(messages: Messages) -> Iterator[ImageRef]:
    for message in messages:
        for part in parts_of(message):
            if part["type"] == "image":
                time, height, width = part["grid"]
                yield ImageRef(part["sha256"], (time, height, width))


def parts_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The parts of a content with images; none of a text."""
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _bytes_of(url: str) -> bytes:
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except binascii.Error as error:
        raise InputError(f"an image is not base64: {error}", code="data.image_broken") from error
