"""Positions of tokens and images for rotary embeddings with three dimensions (M-RoPE, arXiv 2409.12191)."""

from collections.abc import Sequence

import numpy as np

from areal.api.images import ImageRef, VisionLayout


def positions_3d(input_ids: np.ndarray, images: Sequence[ImageRef], layout: VisionLayout) -> np.ndarray:
    """Positions in time, height and width of the expanded tokens of one sequence. -> [3, T] int64

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
