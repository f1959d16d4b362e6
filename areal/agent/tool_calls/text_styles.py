"""Styles whose arguments are plain text between markers: qwen3_coder, glm, deepseek_dsml. Schemas give the types."""

import re
from typing import NamedTuple

from areal.agent.tool_calls.pieces import (
    Block,
    Broken,
    Call,
    Piece,
    Schemas,
    blocks,
    checked_call,
    parsed_json,
    typed_value,
)


class _Form(NamedTuple):
    """How a style writes a call."""

    start: str
    end: str
    call: re.Pattern[str]
    """What lies between: name, body."""
    argument: re.Pattern[str]
    """One argument of the body: key, value, and is_text where the style says whether the value is text or JSON."""


def _pieces(text: str, schemas: Schemas, form: _Form) -> list[Piece]:
    return [
        _call(part, schemas, form) if isinstance(part, Block) else part for part in blocks(text, form.start, form.end)
    ]


def _call(block: Block, schemas: Schemas, form: _Form) -> Call | Broken:
    call = form.call.fullmatch(block.inner)
    if not call:
        return Broken(block.source)
    name, body, position, arguments = call["name"].strip(), call["body"], 0, {}
    schema = schemas.get(name, {})
    while body[position:].strip():
        found = form.argument.match(body, position)
        if not found:
            return Broken(block.source)
        key, value = found["key"].strip(), found["value"]
        match found.groupdict().get("is_text"):
            case "true":
                arguments[key] = value
            case "false":
                arguments[key] = parsed_json(value.strip())
            case _:
                arguments[key] = typed_value(value, schema.get(key))
        position = found.end()
    return checked_call(name, arguments, source=block.source)


_QWEN3_CODER = _Form(
    "<tool_call>",
    "</tool_call>",
    re.compile(r"\s*<function=(?P<name>[^>\n]{1,128})>(?P<body>.*?)(?:</function>\s*|\Z)", re.DOTALL),
    re.compile(  # one newline on each side of a value belongs to the format
        r"\s*<parameter=(?P<key>[^>\n]{1,128})>\n?(?P<value>.*?)\n?(?:</parameter>\s*|(?=<parameter=)|\Z)", re.DOTALL
    ),
)
_GLM = _Form(
    "<tool_call>",
    "</tool_call>",
    re.compile(r"\s*(?P<name>[A-Za-z0-9_.-]{1,128})\s*(?P<body>.*)", re.DOTALL),
    re.compile(r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.DOTALL),
)
_DSML = _Form(
    "<｜DSML｜invoke",
    "</｜DSML｜invoke>",
    re.compile(r'\s*name="(?P<name>[^"\n]{1,128})">(?P<body>.*)', re.DOTALL),
    re.compile(
        r'\s*<｜DSML｜parameter name="(?P<key>[^"\n]{1,128})"(?: string="(?P<is_text>true|false)")?>'
        r"(?P<value>.*?)</｜DSML｜parameter>\s*",
        re.DOTALL,
    ),
)


def qwen3_coder(text: str, schemas: Schemas) -> list[Piece]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5)."""
    return _pieces(text, schemas, _QWEN3_CODER)


def glm(text: str, schemas: Schemas) -> list[Piece]:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` (GLM 4.5 and later)."""
    return _pieces(text, schemas, _GLM)


def deepseek_dsml(text: str, schemas: Schemas) -> list[Piece]:
    """`<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE` ... (DeepSeek V3.2)."""
    return _pieces(re.sub(r"</?｜DSML｜(?:function_calls|tool_calls)>", "", text), schemas, _DSML)
