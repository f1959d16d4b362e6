"""Shell scripts that start a training: their `key.sub=value` words, with variables and arithmetic replaced."""

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

_ARITHMETIC = re.compile(r"\$\(\(([^$`;]+?)\)\)(?!\))")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^}]*))?[^}]*\}|(\w+))")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}


def script_words(text: str) -> Iterator[str]:
    """The words of a shell script that set a key, in their order.

    A variable has the value that the script gives it before, or its default in `${NAME:-default}`. What only a shell
    knows remains as text.
    """
    variables = {"HOME": str(Path.home())}
    compact = re.sub(r"\$\(\(.*?\)\)(?!\))", lambda found: found[0].replace(" ", ""), text)
    for word in shlex.split(compact, comments=True):
        name, equals, value = _replaced(word, variables).partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            variables[name] = value
        elif equals and re.fullmatch(r"\+{0,2}[a-z]\w*(\.\w+)+", name):
            yield f"{name}={value}"


def _replaced(word: str, variables: Mapping[str, str]) -> str:
    def value_of(found: re.Match[str]) -> str:
        name: str = found[1] or found[3]
        return variables.get(name) or found[2] or f"${name}"

    def number_of(found: re.Match[str]) -> str:
        names = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), found[1])
        value = _number(names)
        return found[0] if value is None else str(value)

    return _ARITHMETIC.sub(number_of, _VARIABLE.sub(value_of, word))


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
        return value(ast.parse(text, mode="eval"))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
