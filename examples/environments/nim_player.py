"""The opponent of an evaluation: it makes random legal moves."""

from __future__ import annotations

import random
import re


def random_player(observation: str, rng: random.Random) -> str:
    """A move in the piles that were shown last."""
    shown = observation.rpartition("Current Pile:")[2]
    piles = [(int(pile), int(size)) for pile, size in re.findall(r"pile (\d+): (\d+)", shown) if int(size)]
    pile, size = rng.choice(piles)
    return f"[{pile} {rng.randrange(1, size + 1)}]"
