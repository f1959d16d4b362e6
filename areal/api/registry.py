"""What a configuration names: the registry of named things, and references to functions and classes as text.

A package of areal registers what it has in its module `registered`; a package of others has a module for it, which its
entry point of the group `areal.plugins` names. These modules run in every process, also in the launcher, so they load
no torch: the target of an entry is text, `module:name`, which is imported when the thing itself is needed. A reference
crosses process borders as text too, so that no code is ever pickled.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import areal
from areal.api.errors import ConfigError, ConfigProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One registered thing."""

    name: str
    target: FunctionRef
    options: type[Any] | None = None
    """The dataclass of its own options, a subclass of `areal.api.config.schema.Named`; None = it has none."""
    facts: Any = None
    """What the checks before a start need to know of it; each kind has a class for it, or none."""

    def load(self) -> Any:
        """The thing itself; imports its module."""
        return load_object(self.target)


_ENTRIES: dict[str, dict[str, Entry]] = {}
"""Kind -> name -> entry; `register` alone adds to it."""


def register(kind: str, name: str, target: str, *, options: type[Any] | None = None, facts: Any = None) -> None:
    """Add `target`, the text `module:name`, under a name. ConfigError when another target has it.

    Kinds: losses, estimators, optimizers, rewards, answers, datasets, workflows, filters, backends, launchers and
    trackers.
    """
    module, _, thing = target.partition(":")
    entry = Entry(name=name, target=FunctionRef(name=thing, module=module), options=options, facts=facts)
    if _ENTRIES.setdefault(kind, {}).setdefault(name, entry).target != entry.target:
        message = f"{kind}: {name} is registered as {_ENTRIES[kind][name].target} and as {target}: rename one of them"
        raise ConfigError(message, code="config.registered_twice")


@cache
def _load_registrations() -> None:
    """Import the modules that register: those of areal, found by their file name, then those of entry points."""
    for path in sorted(Path(areal.__path__[0]).glob("*/registered.py")):
        importlib.import_module(f"areal.{path.parent.name}.registered")
    for point in entry_points(group="areal.plugins"):
        point.load()


def entries(kind: str) -> dict[str, Entry]:
    """Everything of a kind by name."""
    _load_registrations()
    return _ENTRIES.get(kind, {})


def registered(kind: str, name: str, *, key: str = "") -> Entry:
    """The entry of that name. ConfigError, about the option `key`, when there is none."""
    known = entries(kind)
    if name not in known:
        text = f"is not known: {_did_you_mean(name, known)}registered are {', '.join(sorted(known))}"
        raise _bad_reference(key or kind, name, text)
    return known[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRef:
    """The place of a function or class: `name` at the top level of an importable module or of a file."""

    name: str
    module: str = ""
    """Importable module; empty = `file`."""
    file: str = ""
    """Absolute path of a Python file; empty = `module`."""

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How areal calls the functions that one option names."""

    text: str
    """The call, for errors."""
    num_positional: int
    takes_columns: bool = False
    """Every further parameter gets the column of the dataset row that has its name."""

    def problem(self, signature: inspect.Signature, *, is_async: bool) -> str:
        """Why a function with this signature cannot be called so; empty when it can."""
        if is_async:
            return f"is an async function, and areal calls {self.text}: use a plain function (def)"
        try:
            bind = signature.bind_partial if self.takes_columns else signature.bind
            bound = bind(*range(self.num_positional))
            if unfilled := [
                name
                for name, parameter in signature.parameters.items()
                if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty
            ][len(bound.args) :]:
                raise TypeError(f"nothing is passed for {unfilled[0]!r}")
        except TypeError as error:
            return f"has the parameters {signature}, and areal calls {self.text}: {error}"
        return ""


REWARD_CALL = CallForm(
    text="f(prompt, completion, prompt_ids, completion_ids, **columns)", num_positional=4, takes_columns=True
)
ACCEPT_CALL = CallForm(text="f(group)", num_positional=1)
CURRICULUM_CALL = CallForm(text="f(rows)", num_positional=1)
ROWS_CALL = CallForm(text="f()", num_positional=0)
MAP_CALL = CallForm(text="f(row)", num_positional=1)
ANSWER_CALL = CallForm(text="f(completion)", num_positional=1)
LOSS_CALL = CallForm(text="f(tokens, options)", num_positional=2)
ADVANTAGE_CALL = CallForm(text="f(answers, options)", num_positional=2)


def function_ref(function: Callable[..., Any]) -> FunctionRef:
    """The reference of a function or class defined at the top level of a module or script. ConfigError otherwise."""
    name = getattr(function, "__qualname__", None)
    module_name = getattr(function, "__module__", None)
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    if not isinstance(name, str) or not isinstance(module_name, str) or getattr(module, name, None) is not function:
        problem = f"{module_name}.{name or function!r} cannot be found by name from another process"
        message = f"{problem}: define a plain function (def) at the top level of a module"
        raise ConfigError(message, code="config.bad_reference")
    if module_name != "__main__":
        return FunctionRef(name=name, module=module_name)
    file = getattr(module, "__file__", None)
    if not file:
        message = f"{name} was defined in an interactive session: put it into a file that other processes can read"
        raise ConfigError(message, code="config.bad_reference")
    if not _has_main_guard(parse_python(Path(file), key="script")):
        guard = 'if __name__ == "__main__":'
        problem = (
            f"{Path(file).name} has no line `{guard}`, so a worker that imports {name} from it would run the script"
        )
        raise ConfigError(f"{problem} again: put the call that starts training below it", code="config.no_main_guard")
    return FunctionRef(name=name, file=str(Path(file).resolve()))


def _has_main_guard(tree: ast.Module) -> bool:
    """Whether a script asks at its top level for the name under which it runs."""
    tests = [node.test for node in tree.body if isinstance(node, ast.If)]
    return any(isinstance(name, ast.Name) and name.id == "__name__" for test in tests for name in ast.walk(test))


def resolve_function(text: str, kind: str = "", *, key: str, call: CallForm | None = None) -> FunctionRef:
    """The registered function of that name, or what `parse_function_path` finds. Empty `kind`: a path only."""
    known = entries(kind) if kind else {}
    if text in known:
        return known[text].target
    if ":" not in text:
        names = f"{_did_you_mean(text, known)}registered are {', '.join(sorted(known))}"
        raise _bad_reference(key, text, f"is not known: {names}; give your own as module:function or file.py:function")
    return parse_function_path(text, key=key, call=call)


def parse_function_path(text: str, *, key: str, call: CallForm | None = None) -> FunctionRef:
    """The reference that `module:function` or `path/to/file.py:function` names. Runs no code.

    `key` is for errors. With `call`, ConfigError also when the source shows that the name is no function that can be
    called so; a name that is imported or computed there passes.
    """
    where, _, name = text.rpartition(":")
    if not where or not name.isidentifier():
        raise _bad_reference(key, text, "is neither a registered name nor module:function nor file.py:function")
    if where.endswith(".py"):
        file = Path(where).expanduser().resolve()
        if not file.is_file():
            raise _bad_reference(key, text, f"cannot be found: there is no file {file}")
        _check_source(file, name, key, text, call)
        return FunctionRef(name=name, file=str(file))
    spec = _find_module(where)
    if spec is None:
        hint = f"no module {where} is on the path; a file is given as path/to/file.py:{name}"
        raise _bad_reference(key, text, f"cannot be found: {hint}")
    if spec.origin is not None and spec.origin.endswith(".py"):
        _check_source(Path(spec.origin), name, key, text, call)
    return FunctionRef(name=name, module=where)


def _find_module(name: str) -> ModuleSpec | None:
    """The module of that dotted name. importlib.util.find_spec would import its parents."""
    top, *below = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for part in below:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def parse_python(file: Path, *, key: str) -> ast.Module:
    """The syntax tree of a user's file, which is not run. ConfigError about `key` when it cannot be parsed."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise _bad_reference(key, f"{file}{line}", f"is not valid Python ({error.args[0]})") from None
    except OSError as error:
        raise _bad_reference(key, str(file), f"cannot be read ({error.strerror or error})") from None


def _check_source(file: Path, name: str, key: str, text: str, call: CallForm | None) -> None:
    """ConfigError when `file` is not Python, binds no such name, or only as what cannot be called as `call`."""
    tree = parse_python(file, key=key)
    known: dict[str, list[ast.AST]] = {}
    for node, bound in _module_bindings(tree.body):
        for each in bound:
            known.setdefault(each, []).append(node)
    set_by_functions = {each for node in ast.walk(tree) if isinstance(node, ast.Global) for each in node.names}
    if not known.keys() & {name, "*", "__getattr__"} and name not in set_by_functions:
        hint = _did_you_mean(name, known)
        raise _bad_reference(key, text, f"is not defined: {hint}{file} defines no {name}")
    problems = [_source_problem(node, call) for node in known.get(name, ())]
    if problems and all(problems):  # under `if` and `try` a name may be bound in several ways
        problem = ConfigProblem(key, f"{text!r} {problems[-1]}", "config.wrong_function")
        raise ConfigError(str(problem), problems=[problem])


def _module_bindings(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, Sequence[str]]]:
    """What binds names at the top level of a module, also under `if` and `try`, with the names."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node, [node.name]
                continue
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                yield node, [name]
                continue
            case ast.AnnAssign(value=None) | ast.Lambda():
                continue
            case ast.Name(id=name, ctx=ast.Store()):
                yield node, [name]
            case ast.alias():
                yield node, [(node.asname or node.name).partition(".")[0]]
            case _:
                pass
        yield from _module_bindings(ast.iter_child_nodes(node))


def _source_problem(node: ast.AST, call: CallForm | None) -> str:
    """Why what `node` binds to a name is not the required function or class; empty when it is, or may be."""
    match node:
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value) if not isinstance(value, ast.Lambda):
            is_literal = not any(isinstance(part, ast.Call | ast.Name | ast.Lambda) for part in ast.walk(value))
            return f"is the value {ast.unparse(value)[:80]}, not a function" if is_literal else ""
        case ast.Assign(value=ast.Lambda(args=args)) if call is not None:
            return call.problem(_signature(args), is_async=False)
        case ast.FunctionDef(decorator_list=[], args=args) | ast.AsyncFunctionDef(decorator_list=[], args=args):
            return (
                "" if call is None else call.problem(_signature(args), is_async=isinstance(node, ast.AsyncFunctionDef))
            )
        case ast.ClassDef() if call is not None:
            return f"is a class, and areal calls {call.text}: give a function"
        case _:
            return ""


def source_signature(ref: FunctionRef) -> inspect.Signature | None:
    """The signature of a function, or of the constructor of a class, in its source; None where that does not show it.

    Runs no code. ConfigError when the source cannot be parsed.
    """
    origin = ref.file or getattr(_find_module(ref.module), "origin", None) or ""
    tree = parse_python(Path(origin), key=str(ref)) if origin.endswith(".py") else ast.Module([], [])
    match [node for node, bound in _module_bindings(tree.body) if ref.name in bound]:
        case [ast.FunctionDef(decorator_list=[], args=args)]:
            return _signature(args)
        case [ast.ClassDef(decorator_list=[], keywords=[], body=body)]:
            match [node for node, bound in _module_bindings(body) if "__init__" in bound]:
                case [ast.FunctionDef(decorator_list=[], args=args)]:
                    signature = _signature(args)
                    return signature.replace(parameters=list(signature.parameters.values())[1:])
                case _:
                    return None
        case _:
            return None


def _signature(args: ast.arguments) -> inspect.Signature:
    """The signature of a function in source. A default is any value that is not `empty`."""
    kind = inspect.Parameter
    plain = [(arg, kind.POSITIONAL_ONLY) for arg in args.posonlyargs]
    plain += [(arg, kind.POSITIONAL_OR_KEYWORD) for arg in args.args]
    first_default = len(plain) - len(args.defaults)
    signature = [kind(a.arg, k, default=kind.empty if i < first_default else ...) for i, (a, k) in enumerate(plain)]
    if args.vararg:
        signature.append(kind(args.vararg.arg, kind.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        signature.append(kind(arg.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else ...))
    if args.kwarg:
        signature.append(kind(args.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(signature)


def load_object(ref: FunctionRef) -> Any:
    """Import what a reference names. Exceptions of the module at its import are not caught."""
    module = _load_file(Path(ref.file)) if ref.file else importlib.import_module(ref.module)
    loaded = module.__dict__.get(ref.name)
    if loaded is None and hasattr(module, "__getattr__"):
        loaded = getattr(module, ref.name, None)
    if loaded is None:
        known = [name for name, value in module.__dict__.items() if callable(value) and not name.startswith("_")]
        message = f"{ref.file or ref.module} defines no {ref.name}: {_did_you_mean(ref.name, known)}"
        raise ConfigError(message.rstrip(": "), code="config.bad_reference")
    return loaded


def load_function(ref: FunctionRef, call: CallForm | None = None) -> Callable[..., Any]:
    """Import the function or class of a reference. ConfigError when it is missing, or cannot be called as `call`."""
    function = load_object(ref)
    if not callable(function):
        raise ConfigError(f"{ref} is no function", code="config.bad_reference")
    if call is not None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some functions written in C have none
            return function
        if problem := call.problem(signature, is_async=inspect.iscoroutinefunction(function)):
            raise ConfigError(f"{ref} {problem}", code="config.wrong_function")
    return function


def _bad_reference(key: str, text: str, message: str) -> ConfigError:
    problem = ConfigProblem(key, f"{text!r} {message}", "config.bad_reference")
    return ConfigError(str(problem), problems=[problem])


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _load_file(path: Path) -> ModuleType:
    """Run a file once, as a module of another name than `__main__`."""
    name = f"areal_file_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as a Python file", code="config.bad_reference")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # as when it runs as a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
