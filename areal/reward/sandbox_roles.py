"""The three roles inside a sandbox: a whole program, a server of a program's functions, or the assertion checker.

The assertion checker never shares a process with the program. It calls the program's functions by messages and gets
plain values back, so a program can change neither the assertions nor the meaning of equality. Messages are lines of
JSON:

    to the program   {"op", "target": name or number of an object, "args", "kwargs"}
    its answer       {"value"} or {"error": [kind, text]}
    to the checker   {"test": source, "names": {name in the test: name in the program}, "modules": {name: module}}
    its answer       any number of messages to the program, then {"passed": bool}
"""

from __future__ import annotations

import builtins
import importlib
import json
import operator
import os
import runpy
import sys
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

# Encodes Python values for the messages between a sandboxed program and the assertion checker, as JSON.
#
# Plain data (numbers, text, bytes, None, lists, tuples, sets, dicts, their subclasses, numpy values) arrives as plain
# data. Any other object stays in its process and arrives as a number, so no message can carry code.

TYPE_CHECKING = False  # importing typing takes longer than the rest of this file

_LONG_INT_BITS = 10_000  # Longer integers are sent in hexadecimal: Python refuses to read them as decimals.


def encoded(value: Any, keep: Callable[[Any], int]) -> Any:
    """`value` as JSON data; `keep` stores an object that cannot be sent and returns its number."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if number.bit_length() < _LONG_INT_BITS else {"int": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encoded(item, keep) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [encoded(item, keep) for item in tuple.__iter__(value)]}
    if isinstance(value, (set, frozenset)):
        return {"frozenset" if isinstance(value, frozenset) else "set": [encoded(item, keep) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key, keep), encoded(item, keep)] for key, item in dict.items(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encoded(value.tolist(), keep)
    return {"object": keep(value)}


def decoded(data: Any, find: Callable[[int], Any]) -> Any:
    """The value that `encoded` turned into `data`; `find` returns the replacement for an object that was not sent.

    ValueError, TypeError or RecursionError for invalid data, which a foreign program may send.
    """
    if isinstance(data, list):
        return [decoded(item, find) for item in data]
    if not isinstance(data, dict):
        return data
    (kind, content), *more = data.items()
    if more:
        raise ValueError("a value with two kinds")
    if kind == "object":
        return find(int(content))
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {decoded(key, find): decoded(item, find) for key, item in content}
    collections = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in collections:
        return collections[kind](decoded(item, find) for item in content)
    raise ValueError(f"unknown kind of value {kind!r}")


def plain_data(data: Any) -> Any:
    """The decoded value with the types of JSON only: tuples become lists, keys of dicts become text.

    ValueError for sets, objects and other types; otherwise the errors of `decoded`. Numbers are never hashed: a program
    could return a million numbers with the same hash, which would take hours.
    """
    if isinstance(data, list):
        return [plain_data(item) for item in data]
    if not isinstance(data, dict):
        return data
    (kind, content), *more = data.items()
    if more or kind not in ("tuple", "int", "dict"):
        raise ValueError("not plain data")
    if kind == "int":
        return int(content, 16)
    if kind == "tuple":
        return [plain_data(item) for item in content]
    return {_key(key): plain_data(item) for key, item in content}


def _key(data: Any) -> str:
    is_tuple = isinstance(data, dict) and list(data) == ["tuple"]
    return str(tuple(map(plain_data, data["tuple"])) if is_tuple else plain_data(data))


def call_question(function: str, args: list[Any]) -> dict[str, Any]:
    """The message that calls a function of a program. TypeError for arguments that are not plain data."""

    def never(value: Any) -> int:
        raise TypeError(f"an argument of a test is not plain data: {value!r:.100}")

    return {"op": "call", "target": function, "args": [encoded(value, never) for value in args], "kwargs": {}}


_MAX_TEXT = 500


def play(role: str, channel: int) -> None:
    """Run program.py of the current folder in its role: program, functions, or checker (which has no program)."""
    builtins.exit = builtins.quit = sys.exit  # pyright: ignore[reportAttributeAccessIssue] - as in a script
    if role == "program":
        os.close(channel)
        sys.argv[:] = ["program.py"]
        runpy.run_path("program.py", run_name="__main__")
    elif role == "functions":
        Functions(channel).serve()
    else:
        AssertionChecker(Lines(channel)).serve()


class Lines:
    def __init__(self, channel: int) -> None:
        self._input = open(channel, closefd=False)  # noqa: SIM115 - open until the process ends
        self._output = open(channel, "w", closefd=False)  # noqa: SIM115

    def read(self) -> Any | None:
        line = self._input.readline()
        return json.loads(line) if line else None

    def write(self, message: Any) -> None:
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()


class Functions:
    """Calls and reads what program.py defined, as messages request."""

    def __init__(self, channel: int) -> None:
        self._lines = Lines(channel)
        self._objects: list[Any] = []
        self._names: dict[str, Any] = {}

    def serve(self) -> None:
        try:
            self._names = runpy.run_path("program.py", run_name="program")
            answer: Any = {"value": None}
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            answer = _described(error)
        self._lines.write(answer)
        while (question := self._lines.read()) is not None:
            try:
                answer = {"value": encoded(self._answer(question), self._keep)}
            except BaseException as error:  # noqa: BLE001
                answer = _described(error)
            self._lines.write(answer)

    def _keep(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _answer(self, question: dict[str, Any]) -> Any:
        target, op = question["target"], question["op"]
        args = [decoded(item, self._objects.__getitem__) for item in question["args"]]
        named = {name: decoded(item, self._objects.__getitem__) for name, item in question["kwargs"].items()}
        if op == "name":
            return self._names[target]
        subject = self._named(target) if isinstance(target, str) else self._objects[target]
        if op == "call":
            return subject(*args, **named)
        operations = {"get": getattr, "item": operator.getitem, "len": len, "iter": iter, "next": next, "str": str}
        return operations[op](subject, *args)

    def _named(self, name: str) -> Any:
        """A function by its name, or the method of that name of a class Solution without arguments."""
        if name not in self._names and "Solution" in self._names:
            return getattr(self._names["Solution"](), name)
        if name not in self._names:
            raise NameError(name)
        return self._names[name]


class AssertionChecker:
    """Runs assertions. What they take from the program are Remote objects, whose values stay in its process."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def serve(self) -> None:
        while (order := self._lines.read()) is not None:
            self._lines.write({"passed": self.passes(order)})

    def passes(self, order: dict[str, Any]) -> bool:
        try:
            names = {name: importlib.import_module(module) for name, module in order["modules"].items()}
            _run_test(order["test"], names | {name: self._taken(target) for name, target in order["names"].items()})
        except BaseException:  # noqa: BLE001 - a test or the program may raise anything
            return False
        return True

    def _taken(self, name: str) -> Any:
        """What the program calls `name`; a method of its class Solution has no value of its name."""
        try:
            return self.ask("name", name, (), {})
        except KeyError:
            return Remote(self, name)

    def ask(self, op: str, target: str | int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        sent = [encoded(item, _number_of) for item in args]
        named = {name: encoded(item, _number_of) for name, item in named.items()}
        self._lines.write({"op": op, "target": target, "args": sent, "kwargs": named})
        answer = self._lines.read()
        if answer is None:
            os._exit(1)
        if "error" in answer:
            kind, text = answer["error"]
            known = getattr(builtins, str(kind), None)
            # A function's StopIteration would end the test's loops early: zip(map(f, xs), wanted), all(map(..)).
            ends_loops = op not in ("next", "item") and kind in ("StopIteration", "StopAsyncIteration")
            if isinstance(known, type) and issubclass(known, Exception) and not ends_loops:
                raise known(text)
            raise RuntimeError(f"{kind}: {text}")
        return decoded(answer["value"], partial(Remote, self))


class Remote:
    """An object of the program. It equals only itself, so a program cannot define its equality."""

    __slots__ = ("_checker", "target")

    def __init__(self, checker: AssertionChecker, target: str | int) -> None:
        self._checker, self.target = checker, target

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._checker.ask("call", self.target, args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._checker.ask("get", self.target, (name,), {})

    def __getitem__(self, key: Any) -> Any:
        return self._checker.ask("item", self.target, (key,), {})

    def __len__(self) -> int:
        return self._checker.ask("len", self.target, (), {})

    def __iter__(self) -> Iterator[Any]:
        return self._checker.ask("iter", self.target, (), {})

    def __next__(self) -> Any:
        return self._checker.ask("next", self.target, (), {})

    def __str__(self) -> str:
        return self._checker.ask("str", self.target, (), {})


class _TextLoader(SourceFileLoader):
    def __init__(self, name: str, source: str) -> None:
        super().__init__(name, "test.py")
        self._source = source

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self._source.encode(), self.path)


def _run_test(source: str, names: dict[str, Any]) -> None:
    """Run a test as a script, so that code under `if __name__ == "__main__"` runs too.

    Not from a file: without namespaces the program could read the file, and with it the wanted results.
    """
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(names)
    sys.argv[:] = ["test.py"]
    try:
        _TextLoader("__main__", source).exec_module(module)
    except SystemExit as end:  # of the test, as by unittest.main; the program's SystemExit arrives as RuntimeError
        if end.code:
            raise


def _number_of(value: Any) -> int:
    if isinstance(value, Remote) and isinstance(value.target, int):
        return value.target
    raise TypeError(f"a {type(value).__name__} cannot be sent to the program: only plain data can")


def _described(error: BaseException) -> dict[str, Any]:
    try:
        text = str(error)[:_MAX_TEXT]
    except BaseException:  # noqa: BLE001 - the program defines its exceptions
        text = ""
    return {"error": [type(error).__name__, text]}
