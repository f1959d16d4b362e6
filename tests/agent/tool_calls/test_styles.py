"""Calls as models of each family write them."""

import json

import pytest

from areal.agent.tool_calls import split_answer, style_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}},
            },
        },
    }
    for name in ("weather", "time")
]


def split(text, style, *, tools=TOOLS, special=(), template="<think></think>", **options):
    chosen = style_of(style, template, special)
    return split_answer(text, [1, 2], chosen, tools=tools, turn_id="t", **options)


DSML = "｜DSML｜"
CASES = {
    "hermes": 'Look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "Look.\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "mistral": 'Look.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}, '
    '{"name": "time", "arguments": {}}]',
    "deepseek": "Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Bonn", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "deepseek_dsml": f'Look.<{DSML}function_calls>\n<{DSML}invoke name="weather">\n'
    f'<{DSML}parameter name="city" string="true">Bonn</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>\n'
    f'<{DSML}invoke name="time">\n</{DSML}invoke>\n</{DSML}function_calls>',
    "glm": "Look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>time</tool_call>",
    "kimi": "Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Bonn", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Bonn", "days": 2}<|call|><|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}'
    "<|call|>",
    "llama3_json": 'Look.<|python_tag|>{"name": "weather", "parameters": {"city": "Bonn", "days": 2}}; '
    '{"type": "function", "name": "time", "parameters": {}}',
}


@pytest.mark.parametrize("style", CASES)
def test_two_calls_after_a_text(style):
    result = split(CASES[style], style)
    assert [(call.name, json.loads(call.arguments)) for call in result.tool_calls] == [
        ("weather", {"city": "Bonn", "days": 2}),
        ("time", {}),
    ]
    assert (result.text, result.num_malformed) == ("Look.", 0)
    assert result.reasoning == ("Hm." if style == "gpt_oss" else "")
    assert len({call.call_id for call in result.tool_calls}) == 2


def test_pythonic_calls_are_the_whole_answer():
    result = split('<|python_start|>[weather(city="Bonn", days=2), time()]<|python_end|>', "pythonic")
    assert [(call.name, call.arguments) for call in result.tool_calls] == [
        ("weather", '{"city": "Bonn", "days": 2}'),
        ("time", "{}"),
    ]
    assert result.text == ""
    assert split("[1, 2]", "pythonic").num_malformed == 0
    for text in ('[weather("Bonn")]', "[weather(city=x)]", "[time(), 1]", "[(lambda: 1)()]", "<|python_start|>[time("):
        assert split(text, "pythonic").num_malformed == 1


@pytest.mark.parametrize("style", ["hermes", "llama3_json", "mistral"])
def test_a_name_or_arguments_that_no_client_can_take_are_malformed(style):
    bad = ['{"name": "no name", "arguments": {}}', '{"name": "f", "arguments": [1]}', '{"arguments": {}}']
    bad += ['{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": {"a": "\\ud800"}}', '{"name": "f", ']
    bad += ['{"name": "f", "arguments": {"a":' + '{"a":' * 400 + "1" + "}" * 402]
    for body in bad:
        frame = {"hermes": f"<tool_call>{body}</tool_call>", "mistral": f"[TOOL_CALLS][{body}]"}
        result = split(frame.get(style, f"<|python_tag|>{body}"), style)
        assert (result.tool_calls, result.num_malformed) == ((), 1), body
        assert result.text


def test_mistral_calls_by_name():
    result = split('[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{"city": "B"}[TOOL_CALLS]time[ARGS]{}', "mistral")
    assert [call.name for call in result.tool_calls] == ["weather", "time"]
    assert result.tool_calls[0].model_id == "abcdef123"


def test_ids_are_new_and_unique_and_that_of_the_answer_is_kept_beside():
    result = split(CASES["kimi"].replace("time:1", "weather:0"), "kimi")
    assert [call.model_id for call in result.tool_calls] == ["functions.weather:0"] * 2
    assert len({call.call_id for call in result.tool_calls}) == 2
    ids = {call.call_id for call in split(CASES["hermes"], "hermes").tool_calls}
    assert all(len(item) == 9 and item.isalnum() for item in ids)
    again = split_answer(CASES["hermes"], [1], style_of("hermes", ""), tools=TOOLS, turn_id="other")
    assert not ids & {call.call_id for call in again.tool_calls}


@pytest.mark.parametrize(("value", "expected"), [("7", 7), ("seven", "seven"), ("null", None), ("[1]", [1])])
def test_plain_arguments_have_the_type_of_the_schema(value, expected):
    text = f"<tool_call>weather<arg_key>days</arg_key><arg_value>{value}</arg_value><arg_key>city</arg_key>"
    actual = split(f"{text}<arg_value>{value}</arg_value></tool_call>", "glm")
    assert json.loads(actual.tool_calls[0].arguments) == {"days": expected, "city": value}


@pytest.mark.parametrize(
    ("text", "in_reasoning", "reasoning", "rest"),
    [
        ("<think>\nwhy\n</think>\n\nfour", False, "why", "four"), ("why</think>four", False, "why", "four"),
        ("why", True, "why", ""), ("<think>why", False, "why", ""), ("four <think>", False, "", "four <think>"),
        ("<think></think>four", False, "", "four"),
    ],
)  # fmt: skip
def test_reasoning_is_what_the_answer_begins_with(text, in_reasoning, reasoning, rest):
    result = split(text, "none", in_reasoning=in_reasoning)
    assert (result.reasoning, result.text) == (reasoning, rest)


@pytest.mark.parametrize("style", [style for style in CASES if style != "gpt_oss"])
@pytest.mark.parametrize(
    ("text", "in_reasoning", "names", "rest"),
    [
        ("<think>{}</think>no", False, [], "no"),
        ("{}</think>no", True, [], "no"),
        ("{}</think>no", False, [], "no"),
        ("<think>a</think>\n<think>{}</think>no", False, [], "no"),
        ("<think>{}", False, [], ""),
        ("{}\n<think>{}", False, ["weather", "time"], "Look."),
    ],
)
def test_calls_inside_of_reasoning_do_not_count(style, text, in_reasoning, names, rest):
    result = split(text.replace("{}", CASES[style]), style, in_reasoning=in_reasoning)
    assert [call.name for call in result.tool_calls] == names
    assert (result.text, result.num_malformed) == (rest, 0)


def test_reasoning_that_the_template_does_not_know_is_text_without_calls():
    result = split(f"<think>{CASES['hermes']}</think>no", "hermes", template="")
    assert (result.tool_calls, result.reasoning, result.num_malformed) == ((), "", 0)
    assert result.text == f"<think>{CASES['hermes']}</think>no"


MARKERS = {
    "hermes": "</tool_call>\n<tool_call>",
    "mistral": "[TOOL_CALLS]time[ARGS]{}",
    "deepseek": "<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n```",
    "deepseek_dsml": f"</{DSML}parameter></{DSML}invoke> <{DSML}parameter name=",
    "glm": "</arg_value></tool_call> <arg_key>",
    "kimi": "<|tool_call_end|><|tool_calls_section_end|>",
    "gpt_oss": "<|end|><|call|><|start|>assistant",
    "llama3_json": "<|python_tag|>; ",
    "qwen3_coder": "</parameter></function></tool_call> <parameter=days> <tool_call>",
}


@pytest.mark.parametrize("style", [*MARKERS])
@pytest.mark.parametrize("form", ["{}", "a </think> b{}c", "print('{}')\n<think>"])
def test_an_argument_may_contain_every_marker(style, form):
    city = form.replace("{}", MARKERS[style])
    shown = json.dumps(city, ensure_ascii=False)[1:-1] if '{"city"' in CASES[style] else city
    result = split(CASES[style].replace("Bonn", shown, 1), style)
    assert [(call.name, json.loads(call.arguments)) for call in result.tool_calls] == [
        ("weather", {"city": city, "days": 2}),
        ("time", {}),
    ]
    assert (result.text, result.num_malformed) == ("Look.", 0)


@pytest.mark.parametrize("style", CASES)
@pytest.mark.parametrize("is_cut", [True, False])
def test_an_answer_that_is_cut_inside_of_a_call_has_not_this_call(style, is_cut):
    """Cut anywhere, it has no call with other arguments than the whole answer, and is malformed inside a block."""
    text = CASES[style].replace('"days": 2', '"days": 25').replace("\n2\n", "\n25\n").replace(">2<", ">25<")
    whole = [(call.name, call.arguments) for call in split(text, style).tool_calls]
    assert json.loads(whole[0][1]) == {"city": "Bonn", "days": 25}
    for size in range(len(text)):
        result = split(text[:size], style, is_cut=is_cut)
        calls = [(call.name, call.arguments) for call in result.tool_calls]
        assert calls == whole[: len(calls)], text[:size]
        if is_cut and "Bonn" in text[:size] and not calls:
            assert result.num_malformed == 1, text[:size]


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", '<tool_call>{"name": "time", "arguments": {}}'),
        ("qwen3_coder", "<tool_call><function=weather><parameter=days>\n1"),
        ("qwen3_coder", "<tool_call><function=time></function>"),
        ("glm", "<tool_call>time"),
        ("glm", "<tool_call>weather<arg_key>days</arg_key><arg_value>1</arg_value>"),
        ("deepseek_dsml", f'<{DSML}invoke name="time">'),
        ("kimi", "<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}"),
        ("deepseek", "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}"),
        ("gpt_oss", "<|channel|>commentary to=functions.time<|message|>{}"),
        ("gpt_oss", "<|channel|>commentary to=functions.time <|constrain|>"),
        ("pythonic", "<|python_start|>[time()]"),
    ],
)
def test_a_block_that_is_not_closed_is_malformed_when_the_answer_is_cut(style, text):
    result = split(text, style, is_cut=True)
    assert (result.tool_calls, result.num_malformed) == ((), 1)


def test_a_call_that_an_argument_quotes_is_not_executed():
    quoted = CASES["qwen3_coder"].removeprefix("Look.\n")
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\nSo:\n{quoted}\n</parameter>\n</function>\n</tool_call>"
    result = split(text, "qwen3_coder")
    assert (result.tool_calls, result.num_malformed) == ((), 1)


def test_special_tokens_are_no_text():
    result = split("a<|x|>b<|im_end|>", "hermes", special=["<|im_end|>", "<|x|>"])
    assert result.text == "ab"


def test_without_tools_nothing_is_a_call():
    assert split(CASES["hermes"], "hermes", tools=()).text == CASES["hermes"]
    result = split(CASES["gpt_oss"], "gpt_oss", tools=())
    assert (result.tool_calls, result.num_malformed) == ((), 2)


@pytest.mark.parametrize(
    ("template", "style", "marker"),
    [
        ('{{- "<tool_call>\\n<function=" + name }}', "qwen3_coder", None),
        ('<tool_call>\n{"name": </think>', "hermes", "</think>"),
        ("<tool_call>{{ name }}<arg_key>", "glm", None),
        ("[TOOL_CALLS] [/THINK]", "mistral", "[/THINK]"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek", None),
        ("<｜DSML｜function_calls></think>", "deepseek_dsml", "</think>"),
        ("<|tool_call_begin|>", "kimi", None),
        ("<|start|>assistant<|channel|>", "gpt_oss", None),
        ("<|start_header_id|>", "llama3_json", None),
        ("<|start_header_id|><|python_start|>", "pythonic", None),
        (None, "none", None),
    ],
)
def test_the_chat_template_implies_the_style(template, style, marker):
    result = style_of("auto", template)
    assert (result.name, result.reasoning and result.reasoning[1]) == (style, marker)
    assert style_of("hermes", template).name == "hermes"
