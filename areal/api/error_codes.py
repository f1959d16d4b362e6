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
    "data.too_long": ErrorCode(
        "A dataset row, or a sequence of a train batch, has more tokens than its limit.",
        "Raise max_length or mb_spec.max_tokens_per_mb, shorten the texts, or choose another truncation.",
    ),
    "data.uneven_units": ErrorCode(
        "mb_spec.granularity does not divide the number of sequences of a rank.",
        "Choose a granularity that divides the number of sequences of every rank.",
    ),
    # fleet
    # launch
    "launch.server_unprotected": ErrorCode(
        "An SGLang or vLLM server would listen beyond loopback, where the run's token does not protect all its routes.",
        "Use native servers, or start the servers yourself and name them in rollout.server_addrs.",
    ),
    "launch.token_mismatch": ErrorCode(
        "Two processes of a run have different tokens.", "Give AREAL_SERVER_TOKEN the same value everywhere."
    ),
    "launch.token_missing": ErrorCode(
        "A server or store can be reached from other machines, and no token protects it.",
        "Set the environment variable AREAL_SERVER_TOKEN to a secret.",
    ),
    # ledger
    # model
    # process
    "process.cannot_listen": ErrorCode(
        "A process cannot listen on the address or port that it needs.", "Choose a free port and a local address."
    ),
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
