"""No text makes a parser raise, and valid calls come back as they were."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.agent.tool_calls import STYLES, split_answer, style_of

MARKERS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=", ">", "</function>", "<parameter=", "\n"),
    *("</parameter>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|channel|>", "<|message|>", "<|end|>"),
    *("<|start|>", "<|call|>", "to=functions.f", "analysis", "<|tool_call_begin|>", "<|tool_call_end|>", "<arg_key>"),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "functions.f:0",
        "<|tool_call_argument_begin|>",
    ),
    *("</arg_key>", "<arg_value>", "</arg_value>", "<｜DSML｜invoke", ' name="f">', "</｜DSML｜invoke>", "[", "]", "("),
    *('<｜DSML｜parameter name="a">', "</｜DSML｜parameter>", '{"name": "f", "arguments": {"a": 1}}', '{"a": 1}', "{"),
    *("```json\n", "```", "a=1", ";", ",", "}", ")", "f", '"', "\0", "é", "9" * 5000, "[" * 3000, "-" * 3000, "\\"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=5)), max_size=14).map("".join)
PARAMETERS = {"properties": {"a": {"type": ["integer", "null"]}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]


@pytest.mark.parametrize("style", STYLES)
@given(text=TEXTS, in_reasoning=st.booleans())
def test_any_text_is_split_and_what_it_calls_can_be_sent(style, text, in_reasoning):
    chosen = style_of(style, "<think></think>", ["<|end|>"])
    result = split_answer(text, [1], chosen, tools=TOOLS, turn_id="t", in_reasoning=in_reasoning)
    for call in result.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    is_plain = not (result.tool_calls or result.reasoning or in_reasoning or "think>" in text)
    if is_plain and style in ("none", "hermes", "qwen3_coder", "glm", "pythonic"):
        assert result.text == text.replace("<|end|>", "")


NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True)
PLAIN = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<|[\r"), max_size=12)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), PLAIN),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(PLAIN, inner, max_size=3)),
    max_leaves=4,
)


def typed(value):
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object", type(None): "null"}
    return {"type": kinds[type(value)]}


def shown(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


JSON_STYLES = {
    "hermes": ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "llama3_json": ('{"name": "', '", "parameters": ', "}"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", ""),
    "deepseek": ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "kimi": ("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "gpt_oss": ("<|channel|>commentary to=functions.", "<|message|>", "<|call|>"),
}
"""What is before the name, before the arguments and after them."""
TEXT_STYLES = {
    "qwen3_coder": (
        "<tool_call>\n<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n</tool_call>",
    ),
    "glm": ("<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
    "deepseek_dsml": (
        *('<｜DSML｜invoke name="', '">\n', '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>\n"),
        "</｜DSML｜invoke>",
    ),
    "pythonic": ("[", "(", "", "=", ",", ")]"),
}  # fmt: skip
"""What is before the name, after it, before a key, after it, after a value, and at the end."""


def written(style, name, arguments):
    if style in JSON_STYLES:
        before, between, after = JSON_STYLES[style]
        return f"{before}{name}{between}{json.dumps(arguments, ensure_ascii=False)}{after}"
    before, after_name, before_key, after_key, after_value, end = TEXT_STYLES[style]
    show = repr if style == "pythonic" else shown
    pairs = [f"{before_key}{key}{after_key}{show(value)}{after_value}" for key, value in arguments.items()]
    return f"{before}{name}{after_name}{''.join(pairs)}{end}"


@pytest.mark.parametrize("style", [*JSON_STYLES, *TEXT_STYLES])
@given(data=st.data())
def test_a_valid_call_comes_back_as_it_was(style, data):
    is_plain = style in TEXT_STYLES
    keys = st.from_regex(r"[a-z]{1,6}x", fullmatch=True) if is_plain else PLAIN
    name = data.draw(st.from_regex(r"[a-z]{1,6}x", fullmatch=True) if style == "pythonic" else NAMES)
    arguments = data.draw(st.dictionaries(keys, VALUES, max_size=3))
    properties = {key: typed(value) for key, value in arguments.items()}
    tools = [{"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}]
    answer = written(style, name, arguments)
    result = split_answer(answer, [1], style_of(style, ""), tools=tools, turn_id="t")
    assert [(call.name, json.loads(call.arguments)) for call in result.tool_calls] == [(name, arguments)]
    assert (result.text, result.num_malformed) == ("", 0)
