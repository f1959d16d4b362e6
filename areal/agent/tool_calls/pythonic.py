"""Calls as a Python list, `[f(a=1), g(b="x")]` (Llama 4). The text is parsed, never executed."""

import ast

from areal.agent.tool_calls.pieces import Broken, Call, Piece, Schemas, checked_call

_MAX_LENGTH = 100_000
_MARKERS = ("<|python_start|>", "<|python_end|>")


def pythonic(text: str, schemas: Schemas) -> list[Piece]:
    """One list of calls with keyword arguments, as the whole answer."""
    source = text
    is_marked = _MARKERS[0] in text
    for marker in _MARKERS:
        source = source.replace(marker, "")
    source = source.strip()
    if not (source.startswith("[") and source.endswith("]")):
        return [Broken(text)] if is_marked else [text]
    try:
        tree = ast.parse(source, mode="eval").body if len(source) <= _MAX_LENGTH else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.List) or not tree.elts or not all(isinstance(one, ast.Call) for one in tree.elts):
        looks_like_call = is_marked or (isinstance(tree, ast.List) and any(isinstance(x, ast.Call) for x in tree.elts))
        return [Broken(text)] if looks_like_call else [text]
    return [_call(one, source) for one in tree.elts if isinstance(one, ast.Call)]


def _call(node: ast.Call, source: str) -> Call | Broken:
    text = ast.get_source_segment(source, node) or source
    try:
        arguments = {one.arg: ast.literal_eval(one.value) for one in node.keywords}
        name = ast.unparse(node.func)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Broken(text)
    if node.args or None in arguments:
        return Broken(text)
    return checked_call(name, arguments, source=text)
