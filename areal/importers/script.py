"""Shell scripts that start a training: their `key.sub=value` words, with variables and arithmetic replaced."""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from areal.api.config.redaction import public
from areal.api.errors import ConfigError
from areal.importers.draft import Draft, Fate, Option, nested

# A draft as a YAML file with a comment for each line, and as a report of losses.

_TITLES: dict[Fate, str] = {
    "kept": "kept",
    "computed": "computed",
    "server": "passed to the servers",
    "dropped": "dropped",
    "missing": "missing",
}


def yaml_text(draft: Draft, source: str) -> str:
    """The configuration. Each line with a value has its origin as a comment."""
    head = [f"# Translated from {source} ({draft.system}) by `areal config import`. Read the comments before a run."]
    missing = [
        f"# missing: {key}={_short(public(draft.values[key], key))}: {why}" for key, why in _of(draft, "missing")
    ]
    return "\n".join([*head, *missing, *_lines(nested(draft.options), "")]) + "\n"


def _lines(tree: dict[str, Any], indent: str) -> Iterator[str]:
    for name, entry in tree.items():
        if isinstance(entry, Option):
            yield f"{indent}{name}: {_scalar(entry.value)}  # {entry.origin}"
        else:
            yield f"{indent}{name}:"
            yield from _lines(entry, f"{indent}  ")


def _scalar(value: Any) -> str:
    if isinstance(value, float) and value == value and abs(value) not in (float("inf"), 0.0):
        text = repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("\n").removesuffix("\n...")


def _of(draft: Draft, fate: Fate) -> list[tuple[str, str]]:
    return [(key, note.text) for key, note in draft.notes.items() if note.fate == fate]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def report_lines(draft: Draft) -> Iterator[str]:
    counts = ", ".join(f"{len(_of(draft, fate))} {title}" for fate, title in _TITLES.items())
    yield f"{len(draft.values)} keys of {draft.system}: {counts}"
    for fate, title in _TITLES.items():
        for key, text in _of(draft, fate):
            yield f"  {title}: {key}={_short(public(draft.values[key], key))} -> {text}"


def report_json(draft: Draft) -> dict[str, Any]:
    keys = [
        {"key": key, "value": public(draft.values[key], key), "fate": note.fate, "text": note.text}
        for key, note in draft.notes.items()
    ]
    options = {
        path: {"value": public(option.value, path), "origin": option.origin} for path, option in draft.options.items()
    }
    return {"system": draft.system, "keys": keys, "options": options}


# Hydra's `defaults` lists: the other files that a configuration is composed of.

_HEADER = re.compile(r"\A(?:\s*#[^\n]*\n)*?\s*#\s*@package\s+(\S+)", re.M)
_ENTRY = re.compile(r"(?:override\s+|optional\s+)*/?(?P<group>[^@]*)(?:@(?P<package>.*))?")

Tree = dict[str, Any]


def composed(tree: Tree, path: Path, read: Callable[[Path], Tree], *, above: tuple[Path, ...] = ()) -> Tree:
    """`tree`, which was read from `path`, over the files of its `defaults`; `_self_` is last unless the list says more.

    Groups are folders next to the first file of `above`, the files that include this one. What is not found stays in
    the tree under `defaults`, entry by entry. Raises ConfigError for a file that includes itself.
    """
    entries: Any = tree.pop("defaults", None)
    if not isinstance(entries, list):
        return tree if entries is None else tree | {"defaults": entries}
    above = (*above, path)
    chosen = _chosen(cast("list[Any]", entries))
    if "_self_" not in chosen:
        chosen["_self_"] = ""
    result: Tree = {}
    lost: Tree = {}
    for group, name in chosen.items():
        if group == "_self_":
            result = _merged(result, tree)
            continue
        base, _, package = group.partition("@")
        file = _file(above[0].parent, path.parent, base, name)
        if file is None:
            lost[group.replace("../", "").replace(".", "/")] = name
            continue
        if file.resolve() in [parent.resolve() for parent in above]:
            raise ConfigError(f"{path}: its defaults include {file}, which includes it", code="config.unreadable_file")
        part = composed(read(file), file, read, above=above)
        deeper = part.pop("defaults", {})
        lost |= deeper if isinstance(deeper, dict) else {base: deeper}
        header = _HEADER.match(file.read_text(encoding="utf-8"))
        where = package or (header[1] if header else base.replace("/", ".") if name and ".." not in base else "")
        result = _merged(result, _at("" if where in ("_global_", "_here_", "_group_") else where, part))
    return result | ({"defaults": lost} if lost else {})


def _chosen(entries: list[Any]) -> dict[str, str]:
    """`GROUP@PACKAGE` -> the file that is chosen in the group, empty for a file without one. Overrides come last."""
    chosen: dict[str, str] = {}
    for entry in entries:
        pairs = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {str(entry): ""}
        for key, name in pairs.items():
            match = _ENTRY.fullmatch(str(key).strip())
            if match is None or match["group"].startswith("hydra/") or name is None:
                continue
            group = match["group"] + (f"@{match['package']}" if match["package"] else "")
            if str(key).startswith("override ") and group not in chosen:
                group = next((known for known in chosen if known.partition("@")[0] == match["group"]), group)
            chosen[group] = str(name)
    return chosen


def _file(root: Path, near: Path, base: str, name: str) -> Path | None:
    relative = f"{base}/{name}" if name else base
    candidates = [folder / f"{relative.removesuffix('.yaml')}.yaml" for folder in (near, root)]
    return next(filter(Path.is_file, candidates), None)


def _at(package: str, tree: Tree) -> Tree:
    for name in reversed(package.split(".") if package else []):
        tree = {name: tree}
    return tree


def _merged(below: Tree, above: Tree) -> Tree:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[name] = _merged(cast("Tree", old), cast("Tree", value)) if both else value
    return merged


_KEY_WITHOUT_DOT = "model_engine"  # A key of verl; every other word without a dot is an assignment of the shell.
_KEY = re.compile(rf"(?:\+{{0,2}}[a-z]\w*(?:\.\w+)+|{_KEY_WITHOUT_DOT})=.*", re.S)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_VARIABLE = re.compile(r"(\w+|[@*])(?:\[[@*]\])?(?::?[-=](.*))?", re.S)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n.*?^\s*\2$", re.S | re.M)
_BETWEEN_WORDS = " \t\r\n;&|()<>"
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def script_words(text: str) -> Iterator[str]:
    """The words of a shell script that set a key, in their order. Raises ValueError for a quote that is not closed.

    A variable has the value that the script gives it before, or its default in `${NAME:-default}`. Assignments in all
    branches of a condition are carried out. What only a shell knows remains as text.
    """
    return filter(_KEY.fullmatch, _Reader(text, {"HOME": [str(Path.home())]}).words())


class _Reader:
    """Reads words from left to right, as a shell does, and keeps the variables. A list has several values."""

    def __init__(self, text: str, variables: dict[str, list[str]]) -> None:
        self._text = text.replace("\\\n", " ")
        self._place = 0
        self._variables = variables

    def words(self, *, in_list: bool = False) -> Iterator[str]:
        """All words but assignments, which are carried out. `in_list`: only those before the end of a list."""
        while self._skip_to_word(in_list=in_list):
            words = self._word()
            match = None if in_list or not words else _ASSIGNMENT.fullmatch(words[0])
            if match is None or match[1] == _KEY_WITHOUT_DOT:
                yield from words
                continue
            name, adds, value = match.groups()
            if not value and self._next() == "(":
                self._place += 1
                values = list(self.words(in_list=True))
            else:
                values = [" ".join([value, *words[1:]])]
            self._variables[name] = self._variables.get(name, []) + values if adds else values

    def _next(self) -> str:
        return self._text[self._place : self._place + 1]

    def _skip_to_word(self, *, in_list: bool) -> bool:
        """Move to the next word. False when there is none in the text, or in the list."""
        while letter := self._next():
            if letter == "#":
                self._until("\n")
            elif heredoc := _HEREDOC.match(self._text, self._place):
                self._place = heredoc.end()
            elif letter in _BETWEEN_WORDS:
                self._place += 1
                if letter == ")" and in_list:
                    return False
            else:
                return True
        return False

    def _word(self) -> list[str]:
        """The word at the place: several or none where a variable outside of quotes, or a list, is replaced."""
        words, is_empty = [""], True
        while (letter := self._next()) and letter not in _BETWEEN_WORDS:
            self._place += 1
            if letter == "'":
                parts, is_empty = [self._until("'")], False
            elif letter == '"':
                parts = self._quoted()
                is_empty = is_empty and not parts
            elif letter == "$" and self._next() == "(":
                parts = self._expansion()
            elif letter == "$":
                parts = [part for value in self._expansion() for part in value.split()]
            elif letter == "`":
                parts = [f"`{self._until('`')}`"]
            else:
                parts = [self._escaped() if letter == "\\" else letter]
            words = [*words[:-1], words[-1] + (parts or [""])[0], *parts[1:]]
        return [] if is_empty and words == [""] else words

    def _quoted(self) -> list[str]:
        """The text after `"`: none or several texts where it is the name of a list."""
        texts, is_list = [""], False
        while (letter := self._next()) != '"':
            if not letter:
                raise ValueError('a quote " is not closed')
            self._place += 1
            if letter == "$":
                is_list = re.match(r"[@*]|\{\w+\[[@*]\]\}", self._text[self._place :]) is not None
                parts = self._expansion()
                texts = [*texts[:-1], texts[-1] + (parts or [""])[0], *parts[1:]]
            elif letter == "\\" and self._next() in '$`"\\':
                texts[-1] += self._escaped()
            else:
                texts[-1] += letter
        self._place += 1
        return [] if is_list and texts == [""] else texts

    def _expansion(self) -> list[str]:
        if self._text.startswith("((", self._place):
            text = self._balanced("(", ")")
            number = _number(re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", self._first_value, text))
            return [f"$({text})" if number is None else str(number)]
        if self._next() == "(":
            return [f"$({self._balanced('(', ')')})"]
        name = re.compile(r"\w+|[@*]").match(self._text, self._place)
        if self._next() != "{" and name is None:
            return ["$"]
        if name is not None:
            self._place = name.end()
        text = name[0] if name is not None else self._balanced("{", "}")
        match = _VARIABLE.fullmatch(text)
        return [f"${text}"] if match is None else self._values(match[1], match[2])

    def _values(self, name: str, default: str | None) -> list[str]:
        values = self._variables.get(name, [])
        if name in "@*" or values not in ([], [""]):
            return values
        if default is not None:
            return [" ".join(_Reader(default, self._variables).words(in_list=True))]
        return values or [f"${name}"]

    def _first_value(self, match: re.Match[str]) -> str:
        return self._values(match[1], None)[0]

    def _balanced(self, opening: str, closing: str) -> str:
        start, depth = self._place, 0
        while letter := self._next():
            self._place += 1
            depth += (letter == opening) - (letter == closing)
            if depth == 0:
                return self._text[start + 1 : self._place - 1]
        raise ValueError(f"a bracket {opening} is not closed")

    def _until(self, end: str) -> str:
        start = self._place
        end_place = self._text.find(end, start)
        if end_place < 0 and end != "\n":
            raise ValueError(f"a quote {end} is not closed")
        self._place = len(self._text) if end_place < 0 else end_place + 1
        return self._text[start : self._place - (end_place >= 0)]

    def _escaped(self) -> str:
        self._place += 1
        return self._text[self._place - 1 : self._place]


def _number(text: str) -> int | None:
    def value(node: ast.AST) -> int:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case _:
                raise ValueError(text)

    try:
        return value(ast.parse(text.strip(), mode="eval"))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
