"""Owns the tests of a programming problem: what a row's `tests` may look like, and when two outputs are the same."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from areal.api.errors import InputError

_DECIMAL = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?")
_WHOLE = re.compile(r"[-+]?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTest:
    """A whole program reads `stdin` and writes `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A function is called with `args` and returns `result`; all plain data."""

    function: str
    args: list[Any]
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTest:
    """Python source that raises unless the program is right."""

    source: str


CodeTest = ProgramTest | CallTest | AssertTest


def parse_tests(tests: Any, entry_point: str) -> list[CodeTest]:
    """The tests of a row. InputError when there are none or they have no known form.

    - {"inputs": [...], "outputs": [...]}: texts for standard input and output (a list of lines will do for a text)
    - the same with "fn_name": arguments and results of that function; a text is read as JSON, one line an argument
    - [{"input": ..., "output": ...}, ...]: the same, one by one; of a function when "testtype" is "functional"
    - one text or a list of texts: Python source with assertions
    - one text that is JSON of a dict or list: what it says
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # source may start so, too
            tests = json.loads(tests)
    found: list[CodeTest] = []
    if isinstance(tests, dict) and "inputs" in tests and "outputs" in tests:
        found = _pairs(tests["inputs"], tests["outputs"], str(tests.get("fn_name") or ""))
    elif isinstance(tests, list) and tests and all(isinstance(item, dict) for item in tests):
        for item in tests:
            if "input" not in item or "output" not in item:
                raise InputError(f"a test of the row lacks `input` or `output`: it has {sorted(item)}")
            function = str(item.get("fn_name") or entry_point) if item.get("testtype") == "functional" else ""
            found += _pairs([item["input"]], [item["output"]], function)
    elif isinstance(tests, str) or (isinstance(tests, list) and all(isinstance(item, str) for item in tests)):
        found = _assertions([tests] if isinstance(tests, str) else tests, entry_point)
    if not found:
        shown = f"a {type(tests).__name__}: {str(tests)[:100]!r}"
        raise InputError(f"the row's `tests` have no form that is known (docs/rewards.md) or are empty: {shown}")
    return found


def _pairs(inputs: Any, outputs: Any, function: str) -> list[CodeTest]:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise InputError("`inputs` and `outputs` of the row's `tests` must be lists of one length")
    if not function:
        return [
            ProgramTest(stdin=_text(given), stdout=_text(wanted)) for given, wanted in zip(inputs, outputs, strict=True)
        ]
    return [_call(function, given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(function: str, given: Any, wanted: Any) -> CallTest:
    if isinstance(given, str):
        try:
            args = [json.loads(line) for line in given.splitlines() if line.strip()]
            return CallTest(
                function=function, args=args, result=json.loads(wanted) if isinstance(wanted, str) else wanted
            )
        except ValueError as error:
            raise InputError(f"a test of {function} is a text but no JSON: {error}") from None
    if not isinstance(given, list):
        raise InputError(f"a test of {function} gives no list of arguments but a {type(given).__name__}")
    return CallTest(function=function, args=given, result=wanted)


def _assertions(sources: list[str], entry_point: str) -> list[CodeTest]:
    """One test for each source that tests anything; what only defines or imports comes before each of the others."""
    setup: list[str] = []
    tests: list[str] = []
    for source in sources:
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError) as error:
            raise InputError(f"a test of the row is no Python: {source[:100]!r} ({error})") from None
        if entry_point and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body):
            source += "\ncheck(candidate)\n"
        elif all(
            isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.FunctionDef | ast.ClassDef) for node in body
        ):
            setup.append(source)
            continue
        tests.append(source)
    before = "".join(f"{source}\n" for source in setup)
    return [AssertTest(source=before + source) for source in tests]


def same_output(given: str, wanted: str, tolerance: float) -> bool:
    """Whether a program's output is the wanted one: line by line, white space at the ends of lines and empty lines at
    the end aside. Numbers with a decimal point or an exponent may differ by `tolerance` (relative or absolute); the
    rest of a line must be the same word for word."""
    left, right = _lines(given), _lines(wanted)
    return len(left) == len(right) and all(
        a == b or _same_words(a.split(), b.split(), tolerance) for a, b in zip(left, right, strict=True)
    )


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_words(given: list[str], wanted: list[str], tolerance: float) -> bool:
    return len(given) == len(wanted) and all(
        a == b or _same_decimals(a, b, tolerance) for a, b in zip(given, wanted, strict=True)
    )


def _same_decimals(given: str, wanted: str, tolerance: float) -> bool:
    if not _DECIMAL.fullmatch(wanted) or not (_DECIMAL.fullmatch(given) or _WHOLE.fullmatch(given)):
        return False
    return math.isclose(float(given), float(wanted), rel_tol=tolerance, abs_tol=tolerance)


def same_result(given: Any, wanted: Any, tolerance: float) -> bool:
    """Whether a function returned what was wanted. Tuples count as lists, since JSON has none; decimals may differ by
    `tolerance`; keys of a dict may be texts that name numbers. A list of one may hold the result (as in APPS)."""
    if _same(given, wanted, tolerance):
        return True
    return isinstance(wanted, list) and len(wanted) == 1 and _same(given, wanted[0], tolerance)


def _same(given: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(wanted, bool) or isinstance(given, bool):
        return given is wanted
    if isinstance(wanted, float) or isinstance(given, float):
        if not isinstance(given, int | float) or not isinstance(wanted, int | float):
            return False
        try:
            return math.isclose(given, wanted, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:
            return False
    if isinstance(wanted, list):
        is_list = isinstance(given, list | tuple) and len(given) == len(wanted)
        return is_list and all(_same(a, b, tolerance) for a, b in zip(given, wanted, strict=True))
    if isinstance(wanted, dict):
        if not isinstance(given, dict):
            return False
        named = {str(key): value for key, value in given.items()}
        return named.keys() == wanted.keys() and all(_same(named[k], wanted[k], tolerance) for k in wanted)
    return type(given) is type(wanted) and given == wanted
