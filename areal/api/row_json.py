"""JSON of a dataset row, as the processes of rewards and agents get it."""

from collections.abc import Mapping
from typing import Any

import orjson

from areal.api.errors import InputError


def row_json(row: Mapping[str, Any]) -> bytes:
    """`row` as JSON, arrays of numpy as lists. Raises InputError that names a column with another value."""
    try:
        return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        named = (f"column {name!r}, a {type(value).__name__}" for name, value in row.items() if not _is_json(value))
        message = f"JSON cannot represent {next(named, 'a value')} of a row ({error})"
        advice = "convert it in the dataset's map_fn"
        raise InputError(f"{message}: {advice}", code="reward.row_not_json") from error


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return False
    return True
