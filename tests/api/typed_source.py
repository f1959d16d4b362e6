"""Which attributes of classes a package reads, by type: from its source alone, without an import of it.

Types come from annotations of parameters, results and attributes, from constructors and from assignments. An access to
an object whose type is unknown counts for nothing, so a name that many classes share proves nothing.
"""

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.api.typed_shapes import NOTHING, Shape, Types, item_at, items_of, many

_MANY = {"list", "Sequence", "Iterable", "Iterator", "Collection", "set", "frozenset", "AsyncIterator", "deque"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


@dataclass(eq=False)
class Function:
    """A function, a lambda, or the statements of a module or class."""

    module: "Module"
    node: ast.AST
    owner: "Class | None" = None
    outer: "Function | None" = None
    _busy: set[str] = field(default_factory=set[str])
    _known: dict[ast.AST | None, Types] = field(default_factory=dict[ast.AST | None, Types])

    @functools.cached_property
    def decorators(self) -> frozenset[str]:
        return frozenset(ast.unparse(one).rpartition(".")[2] for one in getattr(self.node, "decorator_list", []))

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of the body without those of inner functions."""
        found: list[ast.AST] = []
        waiting: list[Any] = [getattr(self.node, name, None) for name in self.node._fields]
        while waiting:
            node = waiting.pop()
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, ast.AST) and not isinstance(node, ast.expr_context | ast.Constant):
                found.append(node)
                if not isinstance(node, _SCOPES):
                    waiting += [getattr(node, name, None) for name in node._fields]
        return found

    @functools.cached_property
    def inner(self) -> "list[Function]":
        kinds = _FUNCTIONS | ast.Lambda
        return [Function(self.module, node, outer=self) for node in self.nodes if isinstance(node, kinds)]

    @functools.cached_property
    def bindings(self) -> dict[str, list[Callable[[], Types]]]:
        """Name -> what each of its assignments gives."""
        found: dict[str, list[Callable[[], Types]]] = {}

        def bind(target: ast.AST, types: Callable[[], Types]) -> None:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(types)
            elif isinstance(target, ast.Starred):
                bind(target.value, lambda: many(items_of(types())))
            elif isinstance(target, ast.Tuple | ast.List):
                for place, one in enumerate(target.elts):
                    bind(one, functools.partial(lambda at: item_at(types(), at), place))

        for node in self.nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        bind(target, functools.partial(self.types_of, value))
                case ast.AnnAssign(target=target, annotation=note):
                    bind(target, functools.partial(self.module.annotated, note))
                case ast.NamedExpr(target=target, value=value):
                    bind(target, functools.partial(self.types_of, value))
                case (
                    ast.For(target=target, iter=value)
                    | ast.AsyncFor(target=target, iter=value)
                    | ast.comprehension(target=target, iter=value)
                ):
                    bind(target, functools.partial(lambda value: items_of(self.types_of(value)), value))
                case ast.ImportFrom(module=str(source), names=names):
                    for one in names:
                        types = functools.partial(self.module.program.imported, source, one.name)
                        found.setdefault(one.asname or one.name, []).append(types)
                case _:
                    pass
        for name, types in self.parameters():
            found.setdefault(name, []).append(types)
        return found

    def parameters(self) -> Iterator[tuple[str, Callable[[], Types]]]:
        arguments = getattr(self.node, "args", None)
        if not isinstance(arguments, ast.arguments):
            return
        plain = [*arguments.posonlyargs, *arguments.args]
        if self.owner is not None and plain and "staticmethod" not in self.decorators:
            owner: Types = frozenset({self.owner})
            if "classmethod" in self.decorators:
                owner = frozenset({Shape("class", owner)})
            yield plain.pop(0).arg, lambda: owner
        for one in [*plain, *arguments.kwonlyargs]:
            if one.annotation is not None:
                yield one.arg, functools.partial(self.module.annotated, one.annotation)

    @functools.cached_property
    def narrowed(self) -> dict[str, list[ast.expr]]:
        """Text of an expression -> the classes that isinstance compares it with."""
        found: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                found.setdefault(ast.unparse(node.args[0]), []).append(node.args[1])
        return found

    @property
    def result(self) -> Types:
        note = getattr(self.node, "returns", None)
        if note is not None:
            return self.module.annotated(note, self.owner)
        return self.types_of(self.node.body) if isinstance(self.node, ast.Lambda) else NOTHING

    def named(self, name: str) -> Types:
        """What `name` is in this function."""
        if name in self.bindings:
            if name in self._busy:
                return NOTHING
            self._busy.add(name)
            try:
                return frozenset().union(*(types() for types in self.bindings[name]))
            finally:
                self._busy.discard(name)
        return self.outer.named(name) if self.outer is not None else self.module.named(name)

    def types_of(self, node: ast.AST | None) -> Types:
        if node in self._known:
            return self._known[node]
        found = self._types_of(node)
        if self.narrowed and isinstance(node, ast.Name | ast.Attribute):
            for classes in self.narrowed.get(ast.unparse(node), ()):
                found |= self.module.annotated(classes)
        if not self._busy:
            self._known[node] = found
        return found

    def _types_of(self, node: ast.AST | None) -> Types:
        match node:
            case ast.Name(id=name):
                return self.named(name)
            case ast.Attribute(value=value, attr=name):
                return self.module.program.members(self.types_of(value), name)
            case ast.Call():
                return self._called(node)
            case ast.Await(value=value) | ast.NamedExpr(value=value):
                return self.types_of(value)
            case ast.BoolOp(values=values):
                return frozenset().union(*map(self.types_of, values))
            case ast.IfExp(body=one, orelse=other):
                return self.types_of(one) | self.types_of(other)
            case ast.Subscript(value=value, slice=ast.Slice()):
                return self.types_of(value)
            case ast.Subscript(value=value, slice=key):
                place = key.value if isinstance(key, ast.Constant) and isinstance(key.value, int) else 0
                return item_at(self.types_of(value), place)
            case ast.Tuple(elts=parts):
                return frozenset({Shape("tuple", items=tuple(map(self.types_of, parts)))})
            case ast.ListComp(elt=part) | ast.SetComp(elt=part) | ast.GeneratorExp(elt=part):
                return many(self.types_of(part))
            case _:
                return NOTHING

    def _called(self, node: ast.Call) -> Types:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0] if node.args else None
        found = self.types_of(node.func)
        if found:
            return frozenset().union(*map(self._result, found))
        if name == "zip":
            return many(frozenset({Shape("tuple", items=tuple(items_of(self.types_of(one)) for one in node.args))}))
        if name == "enumerate":
            return many(frozenset({Shape("tuple", items=(NOTHING, items_of(self.types_of(first))))}))
        return NOTHING

    def _result(self, one: Any) -> Types:
        if isinstance(one, Shape) and one.kind == "class":
            return one.parts
        return one.function.result if isinstance(one, Shape) and one.function is not None else NOTHING


@dataclass(eq=False)
class Class:
    module: "Module"
    node: ast.ClassDef
    _busy: set[str] = field(default_factory=set[str])

    @functools.cached_property
    def lineage(self) -> "list[Class]":
        ups = [one for base in self.node.bases for one in self.module.annotated(base) if isinstance(one, Class)]
        return list(dict.fromkeys([self, *(up for one in ups for up in one.lineage)]))

    @functools.cached_property
    def arguments(self) -> "list[Class]":
        """The classes in the brackets of its bases: what their type variables are."""
        brackets = [
            (up, base.slice) for up in self.lineage for base in up.node.bases if isinstance(base, ast.Subscript)
        ]
        return [one for up, inside in brackets for one in up.module.annotated(inside) if isinstance(one, Class)]

    @functools.cached_property
    def body(self) -> Function:
        return Function(self.module, self.node, outer=self.module.body)

    @functools.cached_property
    def functions(self) -> dict[str, Function]:
        return {
            node.name: Function(self.module, node, self, self.module.body)
            for node in self.node.body
            if isinstance(node, _FUNCTIONS)
        }

    @functools.cached_property
    def declared(self) -> dict[str, list[Callable[[], Types]]]:
        """Attributes of instances -> what they are."""
        found: dict[str, list[Callable[[], Types]]] = {}
        for node in self.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                types = functools.partial(self.module.annotated, node.annotation, self)
                found.setdefault(node.target.id, []).append(types)
        for function in self.functions.values():
            for node in function.nodes:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets:
                    match target:
                        case ast.Attribute(value=ast.Name(id="self"), attr=name):
                            if isinstance(node, ast.AnnAssign):
                                types = functools.partial(self.module.annotated, node.annotation, self)
                            elif isinstance(node, ast.Assign):
                                types = functools.partial(function.types_of, node.value)
                            else:
                                continue
                            found.setdefault(name, []).append(types)
                        case _:
                            pass
        return found

    def member(self, name: str) -> Types | None:
        """What the attribute of an instance is; None = this class does not define it."""
        if (function := self.functions.get(name)) is not None:
            if function.decorators & {"property", "cached_property"}:
                return function.result
            return frozenset({Shape("function", function=function)})
        if name not in self.declared:
            return None
        if name in self._busy:
            return NOTHING
        self._busy.add(name)
        try:
            return frozenset().union(*(types() for types in self.declared[name]))
        finally:
            self._busy.discard(name)


@dataclass(eq=False)
class Module:
    program: "Program"
    name: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def body(self) -> Function:
        return Function(self, self.tree)

    @functools.cached_property
    def classes(self) -> dict[str, Class]:
        return {node.name: Class(self, node) for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @functools.cached_property
    def functions(self) -> dict[str, Function]:
        return {one.node.name: one for one in self.body.inner if isinstance(one.node, _FUNCTIONS)}

    @functools.cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Local name -> (module, name in it)."""
        found: dict[str, tuple[str, str]] = {}
        for node in self.body.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {one.asname or one.name: (node.module, one.name) for one in node.names}
        return found

    def named(self, name: str) -> Types:
        if name in self.classes:
            return frozenset({Shape("class", frozenset({self.classes[name]}))})
        if name in self.functions:
            return frozenset({Shape("function", function=self.functions[name])})
        if name in self.imports:
            return self.program.imported(*self.imports[name])
        return self.body.named(name) if name in self.body.bindings else NOTHING

    def annotated(self, note: ast.AST, owner: Class | None = None) -> Types:
        """What an annotation means."""
        match note:
            case ast.Constant(value=str(text)):
                try:
                    return self.annotated(ast.parse(text, mode="eval").body, owner)
                except SyntaxError:  # the text of an isinstance or of an alias that is no type
                    return NOTHING
            case ast.Name(id="Self") if owner is not None:
                return frozenset({owner})
            case ast.Name(id=name):
                found = self.named(name)
                classes = frozenset().union(
                    *(one.parts for one in found if isinstance(one, Shape) and one.kind == "class")
                )
                return classes or self._alias(name)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in self.imports:
                source, original = self.imports[module]
                found = self.program.modules.get(f"{source}.{original}")
                return found.annotated(ast.Name(name)) if found is not None else NOTHING
            case ast.BinOp(left=one, right=other):
                return self.annotated(one, owner) | self.annotated(other, owner)
            case ast.Tuple(elts=parts):
                return frozenset().union(*(self.annotated(one, owner) for one in parts))
            case ast.Subscript(value=outer, slice=inside):
                return self._generic(outer, inside, owner)
            case _:
                return NOTHING

    def _alias(self, name: str) -> Types:
        """A type alias or a TypeVar with a bound."""
        place: Module | None = self
        for _ in range(5):
            if place is None or name not in place.imports:
                break
            source, name = place.imports[name]
            place = self.program.modules.get(source)
        if place is None:
            return NOTHING
        for node in place.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(keywords=words)) if found == name:
                    return frozenset().union(*(place.annotated(w.value) for w in words if w.arg == "bound"))
                case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                    return place.annotated(value)
                case _:
                    pass
        return NOTHING

    def _generic(self, outer: ast.AST, inside: ast.AST, owner: Class | None) -> Types:
        name = outer.attr if isinstance(outer, ast.Attribute) else getattr(outer, "id", "")
        parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
        if name == "Literal":
            return NOTHING
        types = [self.annotated(part, owner) for part in parts]
        if name in _MANY:
            return many(types[0])
        if name == "tuple":
            is_open = len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is ...
            return many(types[0]) if is_open else frozenset({Shape("tuple", items=tuple(types))})
        if name == "type":
            return frozenset({Shape("class", types[0])}) if types[0] else NOTHING
        return self.annotated(outer, owner)


class Program:
    """The modules of a package whose text has `hint`; what others define is unknown."""

    def __init__(self, folder: Path, hint: str) -> None:
        self.modules: dict[str, Module] = {}
        for path in sorted(folder.rglob("*.py")):
            parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(parts).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            if hint in text:
                self.modules[name] = Module(self, name, text)

    def imported(self, source: str, name: str) -> Types:
        """What `from source import name` gives."""
        if (module := self.modules.get(f"{source}.{name}")) is not None:
            return frozenset({Shape("module", module=module)})
        return self.modules[source].named(name) if source in self.modules else NOTHING

    def members(self, types: Types, name: str) -> Types:
        found: set[Any] = set()
        for one in types:
            if isinstance(one, Shape) and one.module is not None:
                found |= one.module.named(name)
            owner = next(iter(one.parts), None) if isinstance(one, Shape) and one.kind == "class" else one
            for base in owner.lineage if isinstance(owner, Class) else ():
                if (member := base.member(name)) is not None:
                    found |= member | {up for up in owner.arguments if not member.isdisjoint(up.lineage)}
                    break
        return frozenset(found)
