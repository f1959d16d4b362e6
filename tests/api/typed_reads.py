"""Which attributes of classes a package reads, by the types of `typed_source`."""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tests.api.typed_shapes import Shape
from tests.api.typed_source import Class, Function, Module, Program

_CHECK = re.compile(r"(^|_)problems?$")
_LOGGERS = ("log", "_log", "_LOG", "logger")


def _only_speaks(node: ast.AST) -> bool:
    """Whether the node raises an error or writes a line of the log."""
    match node:
        case ast.Raise():
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return name in _LOGGERS
        case _:
            return False


class Reads:
    """The attributes that modules read, following calls into `definitions` but not starting there.

    What a check reads (a function named `problem` or `...problems`), an error or a log line changes nothing: not read.
    """

    def __init__(self, program: Program, definitions: str) -> None:
        self.found: set[tuple[Class, str]] = set()
        """(class of the object, name)."""
        self._definitions = definitions
        self._subclasses: dict[Class, list[Class]] = {}
        for module in program.modules.values():
            if self._defines(module):
                for one in module.classes.values():
                    for base in one.lineage:
                        self._subclasses.setdefault(base, []).append(one)
        self._seen: set[Function] = set()
        self._waiting = list(functions_in(one for one in program.modules.values() if not self._defines(one)))
        while self._waiting:
            function = self._waiting.pop()
            if function not in self._seen and not _CHECK.search(getattr(function.node, "name", "")):
                self._seen.add(function)
                self._visit(function)

    def _defines(self, module: Module) -> bool:
        return module.name == self._definitions or module.name.startswith(f"{self._definitions}.")

    def _may_define(self, module: Module, name: str) -> bool:
        return self._defines(module) or module.imports.get(name, ("",))[0].startswith(self._definitions)

    def _visit(self, function: Function) -> None:
        if self._defines(function.module):
            self._waiting += function.inner
        spoken = {id(part) for node in function.nodes if _only_speaks(node) for part in ast.walk(node)}
        for node in function.nodes:
            match node:
                case ast.Attribute(value=value, attr=name, ctx=ast.Load()) if id(node) not in spoken:
                    for one in function.types_of(value):
                        self._read(one, name)
                case ast.Name(id=name, ctx=ast.Load()) if self._may_define(function.module, name):
                    for one in function.named(name):
                        if isinstance(one, Shape) and one.function is not None:
                            self._use(one.function)
                case _:
                    pass

    def _read(self, one: Any, name: str) -> None:
        owner = next(iter(one.parts), None) if isinstance(one, Shape) and one.kind == "class" else one
        if not isinstance(owner, Class):
            return
        self.found.add((owner, name))
        for place in [*owner.lineage, *self._subclasses.get(owner, ())]:
            if name in place.functions:
                self._use(place.functions[name])

    def _use(self, function: Function) -> None:
        if self._defines(function.module) and function not in self._seen:
            self._waiting.append(function)


def functions_in(modules: Iterable[Module]) -> Iterator[Function]:
    """Every function of the modules, and their statements."""
    for module in modules:
        waiting = [module.body]
        for one in module.classes.values():
            waiting += [one.body, *one.functions.values()]
        while waiting:
            function = waiting.pop()
            yield function
            waiting += [] if isinstance(function.node, ast.ClassDef) else function.inner
