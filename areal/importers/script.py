"""Shell scripts that start a training: their `key.sub=value` words, with variables and arithmetic replaced."""

import ast
import operator
import re
from collections.abc import Iterator
from pathlib import Path

_KEY_WITHOUT_DOT = "model_engine"
"""Of verl; every other word without a dot is an assignment of the shell."""
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
            found = None if in_list or not words else _ASSIGNMENT.fullmatch(words[0])
            if found is None or found[1] == _KEY_WITHOUT_DOT:
                yield from words
                continue
            name, adds, value = found.groups()
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
        """The values of what follows a `$`."""
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
        found = _VARIABLE.fullmatch(text)
        return [f"${text}"] if found is None else self._values(found[1], found[2])

    def _values(self, name: str, default: str | None) -> list[str]:
        values = self._variables.get(name, [])
        if name in "@*" or values not in ([], [""]):
            return values
        if default is not None:
            return [" ".join(_Reader(default, self._variables).words(in_list=True))]
        return values or [f"${name}"]

    def _first_value(self, found: re.Match[str]) -> str:
        return self._values(found[1], None)[0]

    def _balanced(self, opening: str, closing: str) -> str:
        """The text in the pair of brackets that opens at the place."""
        start, depth = self._place, 0
        while letter := self._next():
            self._place += 1
            depth += (letter == opening) - (letter == closing)
            if depth == 0:
                return self._text[start + 1 : self._place - 1]
        raise ValueError(f"a bracket {opening} is not closed")

    def _until(self, end: str) -> str:
        """The text before `end`, which is passed."""
        start = self._place
        found = self._text.find(end, start)
        if found < 0 and end != "\n":
            raise ValueError(f"a quote {end} is not closed")
        self._place = len(self._text) if found < 0 else found + 1
        return self._text[start : self._place - (found >= 0)]

    def _escaped(self) -> str:
        self._place += 1
        return self._text[self._place - 1 : self._place]


def _number(text: str) -> int | None:
    """The value of an expression of whole numbers; None for others."""

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
