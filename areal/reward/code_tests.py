"""The tests of a programming problem: the accepted forms of a row's `tests`, and when two outputs are equal.

A test takes from the program only what is tested. Every other name in it is defined or imported by the test, a builtin,
or a known module: a program could replace anything else by a version that accepts wrong results.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import math
import re
import symtable
import sys
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from areal.api.errors import InputError

_DECIMAL = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?")
_WHOLE = re.compile(r"[-+]?\d+")
_MODULES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}
"""Names of modules outside the standard library that tests use without importing them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLimits:
    time_limit_s: float = 4.0  # Wall time of each test.
    total_time_limit_s: float = 10.0  # Wall time of all tests; tests that were not started have failed.
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if not (self.time_limit_s > 0 and self.total_time_limit_s > 0 and self.memory_bytes > 0):
            raise InputError(f"the row's limits of time and memory must be above 0: {self}", code="reward.bad_row")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTest:
    """A whole program reads `stdin` and writes `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A function is called with `args` and returns `result`; both are plain data."""

    function: str
    args: list[Any]
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTest:
    """Python source that raises unless the program is correct."""

    source: str
    names: dict[str, str] = field(default_factory=dict[str, str])  # Name in the source -> name in the program.
    modules: dict[str, str] = field(default_factory=dict[str, str])
    """Name in the source -> module that it means; the source does not import it."""


CodeTest = ProgramTest | CallTest | AssertTest


def parse_tests(tests: Any, entry_points: list[str]) -> list[CodeTest]:
    """The tests of a row, whose program defines `entry_points` ([] = not given). InputError when there are none, their
    form is not known, or it is unclear which names they take from the program.

    - {"inputs": [...], "outputs": [...]}: standard input and output, each a text or a list of lines
    - the same with "fn_name": arguments and results of that function; a text is JSON, one argument in each line
    - [{"input": ..., "output": ...}, ...]: the same, one by one; of a function when "testtype" is "functional"
    - a text or a list of texts: Python source with assertions
    - a text that is JSON of one of the above
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # Python source may also start with these characters
            tests = json.loads(tests)
    result: list[CodeTest] = []
    entry_point = entry_points[0] if entry_points else ""
    if isinstance(tests, dict) and "inputs" in tests and "outputs" in tests:
        result = _pairs(tests["inputs"], tests["outputs"], str(tests.get("fn_name") or ""))
    elif isinstance(tests, list) and tests and all(isinstance(item, dict) for item in tests):
        for item in tests:
            if "input" not in item or "output" not in item:
                raise _bad_tests(f"a test lacks `input` or `output`: it has {sorted(item)}")
            function = str(item.get("fn_name") or entry_point) if item.get("testtype") == "functional" else ""
            result += _pairs([item["input"]], [item["output"]], function)
    elif isinstance(tests, str) or (isinstance(tests, list) and all(isinstance(item, str) for item in tests)):
        result = _assertions([tests] if isinstance(tests, str) else tests, entry_points)
    if not result:
        shown = f"a {type(tests).__name__}: {str(tests)[:100]!r}"
        raise _bad_tests(f"they are empty or have an unknown form (docs/rewards.md lists the forms): {shown}")
    return result


def _bad_tests(problem: str) -> InputError:
    return InputError(f"the row's `tests` are not usable: {problem}", code="reward.bad_row")


def _pairs(inputs: Any, outputs: Any, function: str) -> list[CodeTest]:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise _bad_tests("`inputs` and `outputs` must be lists of equal length")
    pairs = zip(inputs, outputs, strict=True)
    if not function:
        return [ProgramTest(stdin=_text(actual), stdout=_text(wanted)) for actual, wanted in pairs]
    return [_call(function, actual, wanted) for actual, wanted in pairs]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(function: str, actual: Any, wanted: Any) -> CallTest:
    if isinstance(actual, str):
        try:
            args = [json.loads(line) for line in actual.splitlines() if line.strip()]
            result = json.loads(wanted) if isinstance(wanted, str) else wanted
        except ValueError as error:
            raise _bad_tests(f"a test of {function} is a text but not JSON: {error}") from None
        return CallTest(function=function, args=args, result=result)
    if not isinstance(actual, list):
        raise _bad_tests(f"the arguments of {function} are a {type(actual).__name__}, not a list")
    return CallTest(function=function, args=actual, result=wanted)


def _assertions(sources: list[str], entry_points: list[str]) -> list[CodeTest]:
    """One test for each source that tests something; sources that only define or import precede each of the others."""
    setup: list[str] = []
    tests: list[str] = []
    for source in sources:
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError) as error:
            raise _bad_tests(f"a test is not Python: {source[:100]!r} ({error})") from None
        if entry_points and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body):
            source += "\ncheck(candidate)\n"
        elif all(
            isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.FunctionDef | ast.ClassDef) for node in body
        ):
            setup.append(source)
            continue
        tests.append(source)
    before = "".join(f"{source}\n" for source in setup)
    return [_assertion(before + source, entry_points) for source in tests]


def _assertion(source: str, entry_points: list[str]) -> AssertTest:
    try:
        unknown, used, has_star = _names(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _bad_tests(f"a test is not Python: {source[:100]!r} ({error})") from None
    modules = {
        name: _MODULES.get(name, name)
        for name, is_called in unknown.items()
        if name not in entry_points and not is_called and (name in _MODULES or name in sys.stdlib_module_names)
    }
    names = {name: name for name in entry_points} | ({"candidate": entry_points[0]} if entry_points else {})
    others = [name for name in unknown if name not in names and name not in modules]
    if not entry_points and len(others) == 1:
        names = {others[0]: others[0]}
    elif not used & names.keys() or (others and not has_star):
        use = f"use {', '.join(others)}, not defined or imported there" if others else "use no name of a program"
        fix = "define or import helpers in the tests, and name in `entry_point` what the program has to define"
        raise _bad_tests(f"it is unclear what they take from the program, since they {use}: {fix}")
    return AssertTest(source=source, names=names, modules=modules)


def _names(source: str) -> tuple[dict[str, bool], set[str], bool]:
    """The names that a test uses but does not define or import and that are no builtins -> whether one is used other
    than as in `name.attribute`; all global names that it uses; and whether it imports with a star."""
    tables = [symtable.symtable(source, "tests", "exec")]
    known, used = set[str](), set[str]()
    for number, table in enumerate(tables):
        tables += table.get_children()  # visited later by this loop
        for symbol in table.get_symbols():
            is_global = number == 0 or symbol.is_global()
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                known.add(symbol.get_name())
            elif is_global and symbol.is_referenced():
                used.add(symbol.get_name())
    nodes = list(ast.walk(ast.parse(source)))
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    called = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in bases}
    unknown = sorted(name for name in used - known - set(dir(builtins)) if not name.startswith("__"))
    has_star = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes)
    return {name: name in called for name in unknown}, used, has_star


def same_output(actual: str, wanted: str, tolerance: float) -> bool:
    """Whether a program's output equals the wanted one, line by line; white space at line ends and empty lines at the
    end are ignored. Numbers with a decimal point or an exponent may differ by `tolerance` (relative or absolute)."""
    left, right = actual.rstrip().splitlines(), wanted.rstrip().splitlines()
    return len(left) == len(right) and all(
        a.rstrip() == b.rstrip() or _same_words(a.split(), b.split(), tolerance)
        for a, b in zip(left, right, strict=True)
    )


def _same_words(actual: list[str], wanted: list[str], tolerance: float) -> bool:
    return len(actual) == len(wanted) and all(
        a == b or _same_decimals(a, b, tolerance) for a, b in zip(actual, wanted, strict=True)
    )


def _same_decimals(actual: str, wanted: str, tolerance: float) -> bool:
    if not _DECIMAL.fullmatch(wanted) or not (_DECIMAL.fullmatch(actual) or _WHOLE.fullmatch(actual)):
        return False
    return math.isclose(float(actual), float(wanted), rel_tol=tolerance, abs_tol=tolerance)


def same_result(actual: Any, wanted: Any, tolerance: float) -> bool:
    """Whether a function returned the wanted result. Tuples equal lists, since JSON has no tuples; floats may differ by
    `tolerance`; a dict's keys may be numbers as text. A list of one may contain the result (as in APPS)."""
    if _same(actual, wanted, tolerance):
        return True
    return isinstance(wanted, list) and len(wanted) == 1 and _same(actual, wanted[0], tolerance)


def _same(actual: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(wanted, bool) or isinstance(actual, bool):
        return actual is wanted
    if isinstance(wanted, float) or isinstance(actual, float):
        if not isinstance(actual, int | float) or not isinstance(wanted, int | float):
            return False
        try:
            return math.isclose(actual, wanted, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:
            return False
    if isinstance(wanted, list):
        is_list = isinstance(actual, list | tuple) and len(actual) == len(wanted)
        return is_list and all(_same(a, b, tolerance) for a, b in zip(actual, wanted, strict=True))
    if isinstance(wanted, dict):
        if not isinstance(actual, dict):
            return False
        named = {str(key): value for key, value in actual.items()}
        return named.keys() == wanted.keys() and all(_same(named[k], wanted[k], tolerance) for k in wanted)
    return type(actual) is type(wanted) and actual == wanted


# What runs the tests of one program outside this process: the interface of the sandbox backends.


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    stdout: bytes
    exit_code: int | None  # None = areal ended it: it exceeded its time or its output.


class SandboxEnded(Exception):
    """A sandbox ended, or was ended, before it answered."""

    def __init__(self, reason: Literal["ended", "time_limit", "too_large", "invalid_message"]) -> None:
        super().__init__(reason)
        self.reason = reason


class ProgramDoesNotLoad(Exception):
    """The program raised or ended before it defined its functions."""


class ProgramRunner(Protocol):
    """Runs the tests of one program. A program never shares an interpreter with what checks it.

    `until_s` is the deadline of one test on the monotonic clock. Each method raises SandboxEnded when the test has
    failed because the program ended or exceeded a limit, ProgramDoesNotLoad when all tests of functions would fail, and
    RewardError when the sandbox itself failed.
    """

    num_parallel: int  # Tests that may run at the same time, each in its own thread.

    def write(self, stdin: str, *, until_s: float) -> Output: ...

    def call(self, case: CallTest, *, until_s: float) -> Any:
        """The program's answer to a call: {"value": encoded result} unless it raised. It may be any JSON."""
        ...

    def check(self, case: AssertTest, *, until_s: float) -> bool: ...

    def close(self) -> None: ...
