"""Images of dataset rows: where they are in a prompt, how many tokens they take, and their storage in the run."""

import asyncio
import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from areal.api.config import BaseExperimentConfig, VisionConfig
from areal.api.errors import InputError
from areal.api.images import ImageRef, ImageStore, VisionLayout, expanded
from areal.data.image_files import ImageFiles, RunImages, data_url, encode_image, grid_of_source, png_of
from areal.data.tokenizer import Tokenizer
from areal.models.vision_layout import read_vision_layout
from areal.system.run_paths import RunPaths

Row = dict[str, Any]
MARK = "<image>"
"""The place of an image in the text of a row."""
_TOKEN = re.compile(r"<[^<>]+>")


@dataclass(frozen=True, slots=True)
class RowImage:
    """An image of a row that is not stored yet."""

    source: bytes
    """The file as the row has it."""
    grid: tuple[int, int, int]
    """Its patches after the resize."""


class ImageWriter:
    """Resizes images for one model and puts them into a store."""

    def __init__(self, layout: VisionLayout, store: ImageStore, max_pixels: int | None) -> None:
        self.layout = layout
        self.max_pixels = max_pixels
        self.files = store

    @classmethod
    def of(cls, config: BaseExperimentConfig, store: ImageStore | None = None) -> Self | None:
        """The images for the trained model; None when it takes none. `store`: None = that of the run."""
        model = config.models.get("actor") or config.models.get("model")
        layout = None if model is None else read_vision_layout(model.path, downloads=True)
        store = store or ImageFiles(RunPaths.of(config).images)
        return None if layout is None else cls(layout, store, config.vision.max_pixels)

    def store(self, images: Sequence[RowImage]) -> tuple[ImageRef, ...]:
        """Put the images into the store. Raises InputError for one that cannot be decoded, and OSError."""
        stored: list[ImageRef] = []
        for image in images:
            png, grid = encode_image(image.source, self.layout, max_pixels=self.max_pixels)
            stored.append(ImageRef(self.files.put(png), grid))
        return tuple(stored)


class PromptImages:
    """Puts the images of rows into prompts for one model."""

    def __init__(self, writer: ImageWriter, options: VisionConfig, tokenizer: Tokenizer) -> None:
        self.writer = writer
        self._layout = layout = writer.layout
        self._options = options
        around = (layout.vision_start_id, layout.image_token_id, layout.vision_end_id)
        self._mark = layout.written or "".join(tokenizer.decode([token]) for token in around if token is not None)
        names = [tokenizer.decode([token]) for token in layout.banned_ids]
        self._special = dict.fromkeys([*names, *_TOKEN.findall(layout.mark + layout.written)])

    @classmethod
    def of(cls, config: BaseExperimentConfig, tokenizer: Tokenizer) -> Self | None:
        """The images for the trained model of a configuration; None when it takes none."""
        writer = ImageWriter.of(config)
        return None if writer is None else cls(writer, config.vision, tokenizer)

    @property
    def run(self) -> RunImages:
        """The images of dialogues, with the limits of `vision`."""
        layout, limit = self._layout, self.writer.max_pixels
        most = layout.max_pixels if limit is None else min(limit, layout.max_pixels)
        return RunImages(replace(layout, max_pixels=most), self.writer.files, self._options.max_images)

    async def stored(self, images: Sequence[RowImage]) -> tuple[ImageRef, ...]:
        """References to the images of a prompt, whose files are written durably first."""
        return await asyncio.to_thread(self.writer.store, images) if images else ()

    def without_images(self, row: Row) -> Row:
        """The row without its column of images, for reward functions."""
        return {name: value for name, value in row.items() if name != self._options.image_key}

    def with_urls(self, row: Row) -> Row:
        """The row with its images as data URLs, which an agent puts into its messages; blocks. Raises InputError."""
        sources, root = self._column(row), Path(self._options.root).expanduser()
        files = (
            encode_image(image_bytes(source, root), self._layout, max_pixels=self.writer.max_pixels)
            for source in sources
        )
        return row | ({self._options.image_key: [data_url(png) for png, _ in files]} if sources else {})

    def _column(self, row: Row) -> list[Any]:
        value = row.get(self._options.image_key)
        return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]

    def placed(self, row: Row) -> tuple[Row, tuple[RowImage, ...]]:
        """The row with the places of its images as the chat template takes them, and the images in this order.

        In `messages` a place is a part {type: image}, with or without its own image, or `<image>` in a text; in
        `prompt` it is `<image>`. Without any place the images are before the text of the first message of the user.
        Texts that look like the tokens of images are changed, so that they are text. Raises InputError.
        """
        column = self._column(row)
        if "messages" in row:
            messages, sources = self._in_messages(row["messages"], column)
            changed = {**row, "messages": messages}
        else:
            text = str(row.get("prompt", ""))
            pieces = [self._escaped(piece) for piece in text.split(MARK)]
            if len(pieces) == 1:
                pieces = [*[""] * len(column), *pieces]
            sources, changed = _paired([None] * (len(pieces) - 1), column), {**row, "prompt": self._mark.join(pieces)}
        if len(sources) > self._options.max_images:
            text = f"a row has {len(sources)} images, and vision.max_images={self._options.max_images}"
            raise InputError(f"{text}: raise it, or drop such rows with a map_fn", code="data.too_many_images")
        return changed, tuple(self._row_image(source) for source in sources)

    def expanded(self, token_ids: Sequence[int], images: Sequence[RowImage]) -> list[int]:
        """Token ids with the placeholders of the images, of ids with one for each."""
        return expanded(token_ids, [ImageRef("", image.grid) for image in images], self._layout)

    def expanded_mask(self, token_ids: Sequence[int], mask: Sequence[int], images: Sequence[RowImage]) -> list[int]:
        """The mask of the result of `expanded`, of that of its ids."""
        sizes = iter([self._layout.tokens_of(ImageRef("", image.grid)) for image in images])
        place = self._layout.image_token_id
        pairs = zip(token_ids, mask, strict=True)
        return [flag for token, flag in pairs for _ in range(next(sizes) if token == place else 1)]

    def shown(self, token_ids: Sequence[int]) -> list[int]:
        """Token ids for people: one placeholder where several follow each other."""
        place = self._layout.image_token_id
        pairs = zip(token_ids, [None, *token_ids], strict=False)
        return [token for token, before in pairs if not token == before == place]

    def _row_image(self, source: Any) -> RowImage:
        data = image_bytes(source, Path(self._options.root).expanduser())
        return RowImage(data, grid_of_source(data, self._layout, max_pixels=self._options.max_pixels))

    def _in_messages(self, messages: list[dict[str, Any]], column: list[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
        """Messages whose images are parts {type: image}, and the sources of the images in this order."""
        split = [(message, self._parts(message["content"])) for message in messages]
        if column and not any(part["type"] == "image" for _, parts in split for part in parts):
            first = next((i for i, (message, _) in enumerate(split) if message["role"] == "user"), 0)
            split[first][1][:0] = [{"type": "image"} for _ in column]
        places = [part.get("image") for _, parts in split for part in parts if part["type"] == "image"]
        changed: list[dict[str, Any]] = []
        for message, parts in split:
            content: Any = [{"type": "image"} if part["type"] == "image" else part for part in parts]
            if not any(part["type"] == "image" for part in parts) and isinstance(message["content"], str):
                content = "".join(part["text"] for part in parts)
            changed.append({**message, "content": content})
        return changed, _paired(places, column)

    def _parts(self, content: Any) -> list[dict[str, Any]]:
        """The content of a message as parts of text and images; an image may have its source in `image`."""
        parts: list[dict[str, Any]] = []
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            if part.get("type") in ("image", "image_url", "input_image"):
                source = part.get("image") or part.get("image_url")
                parts.append({"type": "image", "image": source})
                continue
            text = str(part.get("text", ""))
            for number, piece in enumerate(text.split(MARK)):
                parts += [{"type": "image"}] if number else []
                parts += [{"type": "text", "text": self._escaped(piece)}] if piece else []
        return parts

    def _escaped(self, text: str) -> str:
        for special in self._special:
            text = text.replace(special, f"{special[:1]} {special[1:]}")
        return text


def image_bytes(source: Any, root: Path, *, allows_paths: bool = True) -> bytes:
    """The file of an image: bytes, {bytes: or path:}, a path, a data URL, base64, or an image of Pillow.

    Relative paths are below `root`. Raises InputError (data.image_not_found, data.invalid_column).
    """
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path") or source.get("url")
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str | Path):
        return _of_text(str(source), root, allows_paths=allows_paths)
    if (png := png_of(source)) is not None:
        return png
    text = f"an image is a {type(source).__name__}: give bytes, {{bytes: or path:}}, a path, base64 or a data URL"
    raise InputError(text, code="data.invalid_column")


def _of_text(text: str, root: Path, *, allows_paths: bool) -> bytes:
    if text.startswith("data:"):
        head, _, body = text.partition(",")
        if not head.endswith(";base64"):
            raise InputError("a data URL of an image must end its head with ;base64", code="data.invalid_column")
        return _decoded(body)
    if "://" in text and not text.startswith("file://"):
        raise InputError(f"image {text[:80]!r} is an address: download it first", code="data.invalid_column")
    path = root / Path(text.removeprefix("file://")).expanduser() if allows_paths and len(text) < 4096 else None
    try:
        if path is not None and path.is_file():
            return path.read_bytes()
    except OSError as error:
        raise InputError(f"image {path} cannot be read: {error.strerror}", code="data.image_not_found") from error
    if len(text) >= 64 and len(text) % 4 == 0 and not Path(text[:200]).suffix:
        return _decoded(text)
    raise InputError(f"there is no image file {path or text[:80]}", code="data.image_not_found")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"the base64 text of an image is damaged: {error}", code="data.image_broken") from error


def _paired(places: list[Any], column: list[Any]) -> list[Any]:
    """The source of each place: its own, or the next one of the column."""
    rest = iter(column)
    result = [next(rest, None) if place is None else place for place in places]
    num_open = sum(place is None for place in places)
    if num_open != len(column):
        text = f"a row has {num_open} places for images ({MARK}, or parts without an image) and {len(column)} images"
        raise InputError(f"{text} in its column: they must be equally many", code="data.image_tokens")
    return result
