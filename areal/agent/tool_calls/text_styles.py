"""Styles whose arguments are plain text between markers: qwen3_coder, glm, deepseek_dsml. Schemas give the types."""

import re

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

_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,128})>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,128})>(.*?)(?:</parameter>\s*|(?=<parameter=)|\Z)", re.DOTALL)


def qwen3_coder(text: str, schemas: Schemas) -> list[Piece]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5)."""
    return [
        _xml_call(part, schemas) if isinstance(part, Block) else part
        for part in blocks(text, "<tool_call>", "</tool_call>")
    ]


def _xml_call(block: Block, schemas: Schemas) -> Call | Broken:
    function = _FUNCTION.fullmatch(block.inner)
    if not function:
        return Broken(block.source)
    name, schema = function[1].strip(), schemas.get(function[1].strip(), {})
    position, body, arguments = 0, function[2], {}
    while body[position:].strip():
        parameter = _PARAMETER.match(body, position)
        if not parameter:
            return Broken(block.source)
        key, value = parameter[1].strip(), parameter[2]
        # One newline on each side belongs to the format.
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = typed_value(value, schema.get(key))
        position = parameter.end()
    return checked_call(name, arguments, source=block.source)


_GLM_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})\s*(.*)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def glm(text: str, schemas: Schemas) -> list[Piece]:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` (GLM 4.5 and later)."""
    return [
        _glm_call(part, schemas) if isinstance(part, Block) else part
        for part in blocks(text, "<tool_call>", "</tool_call>")
    ]


def _glm_call(block: Block, schemas: Schemas) -> Call | Broken:
    named = _GLM_NAME.fullmatch(block.inner)
    if not named:
        return Broken(block.source)
    name, body, position, arguments = named[1], named[2], 0, {}
    schema = schemas.get(name, {})
    while position < len(body):
        argument = _GLM_ARGUMENT.match(body, position)
        if not argument:
            return Broken(block.source)
        key = argument[1].strip()
        arguments[key] = typed_value(argument[2], schema.get(key))
        position = argument.end()
    return checked_call(name, arguments, source=block.source)


_INVOKE = re.compile(r'\s*name="([^"\n]{1,128})">(.*)', re.DOTALL)
_DSML_PARAMETER = re.compile(
    r'\s*<｜DSML｜parameter name="([^"\n]{1,128})"(?: string="(true|false)")?>(.*?)</｜DSML｜parameter>\s*', re.DOTALL
)


def deepseek_dsml(text: str, schemas: Schemas) -> list[Piece]:
    """`<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE` ... (DeepSeek V3.2)."""
    text = re.sub(r"</?｜DSML｜(?:function_calls|tool_calls)>", "", text)
    return [
        _dsml_call(part, schemas) if isinstance(part, Block) else part
        for part in blocks(text, "<｜DSML｜invoke", "</｜DSML｜invoke>")
    ]


def _dsml_call(block: Block, schemas: Schemas) -> Call | Broken:
    invoke = _INVOKE.fullmatch(block.inner)
    if not invoke:
        return Broken(block.source)
    name, body, position, arguments = invoke[1], invoke[2], 0, {}
    schema = schemas.get(name, {})
    while body[position:].strip():
        parameter = _DSML_PARAMETER.match(body, position)
        if not parameter:
            return Broken(block.source)
        key, is_text, value = parameter[1], parameter[2], parameter[3]
        match is_text:
            case "true":
                arguments[key] = value
            case "false":
                arguments[key] = parsed_json(value.strip())
            case _:
                arguments[key] = typed_value(value, schema.get(key))
        position = parameter.end()
    return checked_call(name, arguments, source=block.source)
