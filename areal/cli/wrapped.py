"""Subcommands that pass their words to the command of another package."""

from collections.abc import Sequence


def audit(words: Sequence[str]) -> int:
    """`areal audit RUN [--json]`."""
    from areal.ledger.__main__ import main

    return main(["audit", *words], prog="areal")


def stats(words: Sequence[str]) -> int:
    """`areal stats RUN [--json]`."""
    from areal.ledger.__main__ import main

    return main(["stats", *words], prog="areal")


def replay(words: Sequence[str]) -> int:
    """`areal replay RUN [key=value ...]`, or `areal replay --run RUN`."""
    from areal.replay.__main__ import read_command_line, replay

    is_run = bool(words) and not words[0].startswith("-")
    return replay(read_command_line(["--run", *words] if is_run else words, prog="areal replay"))


def trace(words: Sequence[str]) -> int:
    """`areal trace RUN [-o FILE]`."""
    from areal.observe.trace import run_command

    return run_command(words, prog="areal trace")
