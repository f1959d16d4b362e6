"""Every error code with its cause and its fix. `docs/errors.md` is generated from this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """What a user or a maintainer needs to know about one code."""

    cause: str
    fix: str


ERROR_CODES: dict[str, ErrorCode] = {
    "areal.error": ErrorCode("An error without a more specific code.", "Read the message."),
    # allocation
    # checkpoint
    # config
    # data
    # fleet
    # launch
    # ledger
    # model
    # process
    # request
    # reward
    # rollout
    # sandbox
    # weights
    # workflow
}
