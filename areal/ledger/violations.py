"""Owns how a broken rule of a ledger is told: by name, in a sentence for people, and with all ids for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal.api.errors import ConfigError
from areal.data.prompt_stream import PromptStream
from areal.ledger.state import Event

MAX_IDS = 10
"""Longest list of ids in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule."""

    rule: str
    """Short name of the rule."""
    message: str
    episodes: tuple[int, ...] = ()
    """All episodes concerned, also those that the message leaves out."""
    steps: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.message


def listed(ids: Iterable[int]) -> str:
    """Ids for people: the first ones, and how many more there are."""
    found = list(ids)
    rest = len(found) - MAX_IDS
    return ", ".join(map(str, found[:MAX_IDS])) + (f" ... and {rest} more" if rest > 0 else "")


def rows_of(identity: Event) -> PromptStream[int] | None:
    """The stream of row indices that an identity describes; None when there can be none."""
    try:
        stream = PromptStream(
            range(identity["num_rows"]),
            seed=identity["seed"],
            batch_size=identity["batch_size"],
            shuffle=identity["shuffle"],
            drop_last=identity["rows_per_epoch"] != identity["num_rows"],
        )
    except (ConfigError, ArithmeticError, TypeError, ValueError):
        return None
    return stream if stream.rows_per_epoch == identity["rows_per_epoch"] else None
