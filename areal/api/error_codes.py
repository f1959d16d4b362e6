"""Every error code with its cause and its fix. `make docs` writes `docs/errors.md` from this table."""

from __future__ import annotations

import itertools
import sys
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
    "config.conflict": ErrorCode(
        "Two options contradict each other, or would give a wrong result together.", "Change or remove one of them."
    ),
    "config.invalid_value": ErrorCode(
        "An option has a value that it does not accept.", "Use one of the values listed."
    ),
    "config.missing_requirement": ErrorCode(
        "An option needs another one that is not set.", "Set the option that the message names."
    ),
    "config.no_effect": ErrorCode(
        "strict_config is true and an option has no effect under the other options.",
        "Remove the option, or set strict_config to false.",
    ),
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


_PAGE_HEAD = """# Errors

Every error that areal raises on purpose has a code, such as `config.unknown_key`. A code keeps its meaning across
releases: programs and tests compare the code (`error.code`), people read the message, which names the option, file or
process and its value. An error without a code in this list is a defect of areal.

This page is generated from `areal/api/error_codes.py` by `make docs`.
"""


def errors_page() -> str:
    """The text of `docs/errors.md`: one table for each area."""
    parts = [_PAGE_HEAD]
    for area, codes in itertools.groupby(ERROR_CODES, key=lambda code: code.partition(".")[0]):
        parts.append(f"\n## {area}\n\n| code | cause | fix |\n|---|---|---|\n")
        parts += [f"| `{code}` | {ERROR_CODES[code].cause} | {ERROR_CODES[code].fix} |\n" for code in codes]
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(errors_page())
