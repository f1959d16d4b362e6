"""What an expression may be, for `typed_source`."""

from dataclasses import dataclass
from typing import Any

Types = frozenset[Any]
"""Instances of a `Class`, and `Shape`s."""
NOTHING: Types = frozenset()


@dataclass(frozen=True)
class Shape:
    """`class`: the class of `parts`. `function`, `module`: these. `many`: of `parts`. `tuple`: of `items`."""

    kind: str
    parts: Types = NOTHING
    items: tuple[Types, ...] = ()
    function: Any = None
    module: Any = None


def many(parts: Types) -> Types:
    return frozenset({Shape("many", parts)}) if parts else NOTHING


def items_of(types: Types) -> Types:
    """What a loop over the object gives."""
    found: set[Any] = set()
    for one in types:
        if isinstance(one, Shape):
            found |= one.parts.union(*one.items)
    return frozenset(found)


def item_at(types: Types, place: int) -> Types:
    found: set[Any] = set()
    for one in types:
        if isinstance(one, Shape) and one.kind == "tuple" and -len(one.items) <= place < len(one.items):
            found |= one.items[place]
        elif isinstance(one, Shape):
            found |= items_of(frozenset({one}))
    return frozenset(found)
