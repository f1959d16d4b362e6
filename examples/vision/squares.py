"""The task: name the colour of a square, or count squares of mixed colours, in images of 56 x 56 pixels."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
MOST = 6
"""Largest number of squares."""
TOKENS = (*(str(number) for number in range(1, MOST + 1)), *COLOURS, "colour?", "count?")
CELL, CELLS = 14, 4
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}{{ '<eos>' }}{% else %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"
)


def make_rows(count: int, *, seed: int, colour_part: float) -> list[dict[str, Any]]:
    """Rows with one image each; `colour_part` of them ask for the colour of one square."""
    rng = random.Random(seed)
    return [_row(rng, asks_colour=rng.random() < colour_part) for _ in range(count)]


def _row(rng: random.Random, *, asks_colour: bool) -> dict[str, Any]:
    names = [rng.choice(list(COLOURS)) for _ in range(1 if asks_colour else rng.randint(1, MOST))]
    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), (rng.randint(0, 30),) * 3)
    draw = ImageDraw.Draw(image)
    for place, name in zip(rng.sample(range(CELLS * CELLS), len(names)), names, strict=True):
        left, top = place % CELLS * CELL + rng.randint(1, 3), place // CELLS * CELL + rng.randint(1, 3)
        draw.rectangle((left, top, left + 9, top + 9), fill=COLOURS[name])
    target = io.BytesIO()
    image.save(target, "PNG")
    question, answer = ("colour?", names[0]) if asks_colour else ("count?", str(len(names)))
    return {
        "messages": [{"role": "user", "content": f"<image>{question}"}],
        "images": ["data:image/png;base64," + base64.b64encode(target.getvalue()).decode()],
        "answer": answer,
    }


def squares_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **row: Any
) -> float:
    """1 when the completion is the answer, else 0."""
    return float(completion == answer)
