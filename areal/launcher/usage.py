"""The help of a launcher."""

import sys
from collections.abc import Sequence

_FURTHER_HELP = """
`areal run --help` lists the flags of all launchers, `areal config SECTION`
explains the options of the configuration.
"""


def help_if_asked(words: Sequence[str], usage: str) -> None:
    """Print the help of a launcher and exit, if a word asks for it."""
    if {"--help", "-h"} & {*words}:
        sys.stdout.write(usage + _FURTHER_HELP)
        raise SystemExit(0)
