"""Expected errors by their stable code and by the values in their message, never by its English; shared steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from areal.api.engine import WeightChannel
from areal.api.errors import ArealError


@contextmanager
def raises_code(code: str, *values: object) -> Iterator[pytest.ExceptionInfo[ArealError]]:
    """The block raises an ArealError with this code, whose message contains every one of `values`."""
    with pytest.raises(ArealError) as error:
        yield error
    assert error.value.code == code
    missing = [value for value in values if str(value) not in str(error.value)]
    assert not missing, f"{missing} not in {error.value}"


def in_order(text: str, *values: object) -> bool:
    """Whether `text` contains all values, one after another."""
    position = 0
    for value in values:
        result = text.find(str(value), position)
        if result < 0:
            return False
        position = result + len(str(value))
    return True


def serve(channel: WeightChannel, version: int) -> str:
    """Publish the weights and wait until the servers have them. Returns the checksum."""
    checksum = channel.publish(version)
    channel.wait_served()
    return checksum
