"""Owns what an installed server's own parser says about the flags it is to be started with. Only the standard library.

Runs inside the server's environment: reads one question as JSON from standard input, writes one answer as JSON.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

Problem = tuple[str, str]
"""(key as its mapping has it, empty = the server as a whole; what is wrong)."""
_MOST_CHARACTERS = 400


class _Refused(Exception):
    """What the parser has to say."""


def answer(ask: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the question on standard input. What the server's modules print meanwhile goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    found = ask(json.load(sys.stdin))
    with os.fdopen(kept, "w") as out:
        json.dump(found, out)


def flag_problems(parser: argparse.ArgumentParser, question: dict[str, Any]) -> list[Problem]:
    """What the parser refuses. `question`: words that name the `model`, words that are `ours`, and as `flags` what the
    user gave: [key in the mapping, value, words]."""

    def refuse(message: str) -> NoReturn:
        raise _Refused(message)

    def leave(status: int = 0, message: str | None = None) -> NoReturn:
        raise _Refused(message or "ends the server at once")

    parser.error, parser.exit = refuse, leave  # pyright: ignore[reportAttributeAccessIssue]
    model, ours = question["model"], question["ours"]
    problems: list[Problem] = []
    for key, value, words in question["flags"]:
        problem = _misuse(parser, key, value, words) or _refusal(parser, key, [*model, *words])
        if problem:
            problems.append((key, problem))
    said = _refusal(parser, "", [*model, *ours])
    if not said and not problems:
        said = _refusal(parser, "", [*model, *ours, *(word for _, _, words in question["flags"] for word in words)])
    return [*problems, ("", f"refuses the command that areal starts it with: {said}")] if said else problems


def _misuse(parser: argparse.ArgumentParser, key: str, value: Any, words: list[str]) -> str:
    """Why a key is no flag that can be written in the way it was, or ''."""
    actions = parser._option_string_actions  # the one place that has all names
    known = {_plain(option): action for option, action in actions.items() if option.startswith("--")}
    action = known.get(_plain(key))
    if action is None:
        guess = difflib.get_close_matches(_plain(key), sorted(known), n=1)
        return "unknown flag" + (f"; did you mean {guess[0]}?" if guess else ": remove it")
    if isinstance(value, bool) and action.nargs != 0 and not (value and action.nargs == "?"):
        return f"takes a value: give one instead of {str(value).lower()}"
    if action.nargs == 0 and not isinstance(value, bool):
        return f"takes no value: use true or false instead of {value!r}"
    if value is False and not words and f"no_{_plain(key)}" in known:
        return f"is not switched off by false: write no_{_plain(key)}: true"
    if value is False and words and words[0] not in actions:
        return "is off unless it is true: remove it"
    return ""


def _refusal(parser: argparse.ArgumentParser, key: str, words: list[str]) -> str:
    """What the parser says to these words, or ''."""
    try:
        parser.parse_args(words)
    except _Refused as error:
        said = str(error)
    except SystemExit:
        said = "ends the server at once"
    except Exception as error:  # noqa: BLE001 - a flag's own reader may raise anything
        said = f"{type(error).__name__}: {error}"
    else:
        return ""
    said = " ".join(said.split())
    head, colon, rest = said.partition(": ")
    said = rest if colon and head.startswith("argument ") and key else said
    return said if len(said) <= _MOST_CHARACTERS else f"{said[:_MOST_CHARACTERS]}..."


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")
