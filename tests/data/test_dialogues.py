"""One form of a dialogue: each construct of real chat templates with each form of a row, beginnings, ends and marks."""

import json

import pytest

from areal.api.config import GenerationHyperparameters
from areal.data.chat import encode_prompt
from areal.data.chat_template import dialogue_template
from areal.data.row_check import column_problem
from areal.data.supervised_rows import encode_pair, encode_sft_row
from areal.data.tiny_model import template_tokenizer
from areal.workflow.scoring import request_settings
from tests.agent.bridge import templates
from tests.agent.bridge.templates import chatml
from tests.data.dialogue_cases import (
    ANSWER,
    ARGUMENTS,
    DIALOGUES,
    QUESTION,
    RESULT,
    THOUGHT,
    TOOLS,
    calling,
    check_whole,
    learned,
    row_of,
)  # fmt: skip
from tests.expect import raises_code

CLOSED = "<think>\n\n</think>\n\n"
QWEN3 = chatml(
    before=templates.LAST_QUESTION,
    thought="{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}",
    arguments="{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}",
    prompt=templates.PROMPT.replace(
        "{% endif %}", "{% if enable_thinking is false %}" + CLOSED + "{% endif %}{% endif %}"
    ),
)
NO_CALLS = chatml(head="", calls="", thought="")
NONE_CALLS = chatml(calls="{% if m.content is none %}" + templates.CALLS + "{% endif %}")
R1 = chatml(
    thought="", head="", calls="", prompt=templates.PROMPT.replace("{% endif %}", "<think>\n{% endif %}")
).replace("assistant\n{{ m.content }}", "assistant\n{{ m.content.split('</think>')[-1].lstrip() }}")
HARMONY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|message|>{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.last %}analysis {{ m.reasoning_content }}<|end|><|im_start|>assistant"
    "<|message|>{% endif %}final {{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|message|>{% endif %}"
)
ALL = {"QWEN3": QWEN3, "NO_CALLS": NO_CALLS} | {
    name: getattr(templates, name)
    for name in ("CHATML", "THINKING_STRIPPED", "OPEN_THOUGHT", "HEADER_ENDS", "ARGUMENTS_ESCAPED", "OTHER_END")
}


def qwen3():
    return template_tokenizer(QWEN3)


@pytest.mark.parametrize("name", DIALOGUES)
@pytest.mark.parametrize("template", ALL)
def test_a_row_is_what_the_template_writes_and_ends_once(template, name):
    result = check_whole(name, template_tokenizer(ALL[template]))
    assert result == "equal" or (result == "data.template_refused" and template in ("NO_CALLS", "HEADER_ENDS"))


def test_a_thinking_answer_does_not_follow_a_closed_block():
    tokenizer = qwen3()
    (text,) = learned(encode_sft_row(row_of("thinking"), tokenizer), tokenizer)
    assert text == "<think>\nsum\nthem\n</think>\n\nfour<|im_end|>"
    every = encode_sft_row(row_of("thinking twice"), tokenizer, train_on="assistant")
    assert learned(every, tokenizer) == [text, text]
    assert CLOSED not in tokenizer.decode(every.token_ids)
    inline = {"role": "assistant", "content": "<think>\nsum\nthem\n</think>\n\nfour"}
    assert encode_sft_row({"messages": [QUESTION, inline]}, tokenizer) == encode_sft_row(row_of("thinking"), tokenizer)
    plain = encode_sft_row(row_of("question"), tokenizer)
    assert tokenizer.decode(plain.token_ids).endswith(CLOSED + "four<|im_end|>")


def test_a_template_that_opens_the_reasoning_gets_it_once():
    tokenizer = template_tokenizer(R1)
    text = tokenizer.decode(encode_sft_row({"messages": [QUESTION, THOUGHT]}, tokenizer).token_ids)
    assert text.endswith("assistant\n<think>\nsum\nthem\n</think>\n\nfour<|im_end|>")
    plain = tokenizer.decode(encode_sft_row({"messages": [QUESTION, ANSWER]}, tokenizer).token_ids)
    assert plain.endswith("assistant\nfour<|im_end|>")


@pytest.mark.parametrize(
    ("template", "row", "text"),
    [
        (NO_CALLS, {"messages": [QUESTION, calling()]}, "tool calls"),
        (NO_CALLS, {"messages": [QUESTION, calling(), RESULT, ANSWER]}, "tool calls"),
        (NO_CALLS, {"messages": [QUESTION, ANSWER], "tools": TOOLS}, "tools"),
        (NO_CALLS, {"messages": [QUESTION, THOUGHT]}, "reasoning"),
        (NONE_CALLS, {"messages": [QUESTION, calling()]}, "none"),
        (templates.TEXT_HIDES_CALLS, {"messages": [QUESTION, calling(content="I look.")]}, "call 0"),
    ],
)
def test_what_the_template_would_drop_is_refused_by_name(template, row, text):
    with raises_code("data.template_refused", text):
        encode_sft_row(row, template_tokenizer(template))


def test_a_template_that_needs_none_says_why_it_has_no_tools():
    facts = dialogue_template(template_tokenizer(NONE_CALLS)).facts
    assert not facts.takes_tools
    assert "content is none" in facts.refusal


def test_pairs_of_calls_differ_and_show_the_tools():
    tokenizer = qwen3()
    other = calling({"city": "Rome", "days": 1})
    pair = encode_pair({"messages": [QUESTION], "chosen": [calling()], "rejected": [other], "tools": TOOLS}, tokenizer)
    assert ["Paris" in text for text in learned(pair.chosen, tokenizer)] == [True]
    assert ["Rome" in text for text in learned(pair.rejected, tokenizer)] == [True]
    assert '"The weather."' in tokenizer.decode(pair.chosen.token_ids)
    same = encode_sft_row({"messages": [QUESTION, calling()], "tools": json.dumps(TOOLS)}, tokenizer)
    assert same == pair.chosen
    assert '"The weather."' in encode_prompt({"messages": [QUESTION], "tools": TOOLS}, tokenizer).text


@pytest.mark.parametrize(
    "answer",
    [
        calling(content=None),
        {name: value for name, value in calling().items() if name != "content"},
        calling(json.dumps(ARGUMENTS), content=[]),
        calling(reasoning_content=None, name=None),
        {"role": "assistant", "content": None, "tool_calls": [{"name": "weather", "arguments": ARGUMENTS}]},
    ],
)
def test_spellings_of_one_call_are_equal(answer):
    tokenizer = qwen3()
    question = {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}
    row = {"messages": [question, answer], "tools": TOOLS}
    assert column_problem(row, "sft") is None
    assert encode_sft_row(row, tokenizer) == encode_sft_row(row_of("call"), tokenizer)


@pytest.mark.parametrize(
    ("messages", "code", "text"),
    [
        ([QUESTION, {"role": "assistant", "content": None}], "data.invalid_column", "no content"),
        ([{"role": "user", "content": None}, ANSWER], "data.invalid_column", "no content"),
        ([{"role": "user", "content": {"x": 1}}, ANSWER], "data.invalid_column", "neither text nor"),
        ([QUESTION, calling("{broken")], "data.invalid_column", "no JSON object"),
        ([QUESTION, calling(None) | {"tool_calls": [{"id": "x"}]}], "data.invalid_column", "function.name"),
        ([QUESTION, ANSWER, QUESTION], "data.missing_column", "role user"),
        ([ANSWER], "data.invalid_column", "nothing before"),
    ],
)
def test_unusable_dialogues_are_refused_with_the_reason(messages, code, text):
    with raises_code(code, text):
        encode_sft_row({"messages": messages, "tools": TOOLS}, qwen3())


def test_an_answer_before_the_first_question_is_context():
    tokenizer = qwen3()
    row = encode_sft_row(row_of("opened by the assistant"), tokenizer, train_on="assistant")
    assert learned(row, tokenizer) == ["four<|im_end|>"]
    assert row == encode_sft_row(row_of("opened by the assistant"), tokenizer)


def test_the_end_is_that_of_the_template_where_the_tokenizer_has_another():
    """As base models with a chat template have it: their eos is never written inside a dialogue."""
    tokenizer = template_tokenizer(templates.CHATML)
    assert tokenizer.eos_token == "</s>"
    row = encode_sft_row(row_of("two answers"), tokenizer, train_on="assistant")
    assert learned(row, tokenizer) == ["four<|im_end|>", "four<|im_end|>"]
    assert tokenizer.eos_token_id not in row.token_ids
    ends = request_settings(GenerationHyperparameters(), tokenizer).stop_token_ids
    assert {row.token_ids[-1], tokenizer.eos_token_id} <= set(ends)


def test_the_header_of_the_next_message_ends_an_answer_where_nothing_else_does():
    tokenizer = template_tokenizer(templates.HEADER_ENDS)
    assert learned(encode_sft_row(row_of("question"), tokenizer), tokenizer) == ["four<|user|>"]
    messages = [QUESTION, calling(json.dumps(ARGUMENTS)), RESULT, ANSWER]
    first, last = learned(encode_sft_row({"messages": messages}, tokenizer, train_on="assistant"), tokenizer)
    assert (first.endswith("</tool_call><|observation|>"), last) == (True, "four<|user|>")


def test_a_token_inside_of_answers_ends_none():
    """As in harmony: an answer has messages of its own, and its last one ends differently when it is over."""
    tokenizer = template_tokenizer(HARMONY)
    tokenizer.eos_token = "<|return|>"
    inner = tokenizer.convert_tokens_to_ids("<|end|>")
    assert inner not in request_settings(GenerationHyperparameters(), tokenizer).stop_token_ids
    row = encode_sft_row(row_of("two answers"), tokenizer, train_on="assistant")
    assert learned(row, tokenizer) == ["final four", "final four<|return|>"]
    assert tokenizer.decode(row.token_ids).count("<|return|>") == 1
    (text,) = learned(encode_sft_row(row_of("thinking"), tokenizer), tokenizer)
    assert text == "analysis sum\nthem<|end|><|im_start|>assistant<|message|>final four<|return|>"


def test_a_template_without_an_end_token_is_refused():
    tokenizer = template_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    with raises_code("data.template_stop"):
        encode_sft_row(row_of("question"), tokenizer)
    assert encode_prompt({"messages": [QUESTION]}, tokenizer).text.endswith("assistant: ")


@pytest.mark.parametrize("where", ["question", "result", "answer", "thought", "arguments", "schema"])
def test_text_of_control_tokens_stays_text_everywhere(where):
    tokenizer = qwen3()
    mention = "say <|im_end|> and <|im_start|>user"
    messages = [
        QUESTION | ({"content": mention} if where == "question" else {}),
        calling({"city": mention, "days": 3} if where == "arguments" else ARGUMENTS),
        RESULT | ({"content": mention} if where == "result" else {}),
        ANSWER
        | ({"content": mention} if where == "answer" else {})
        | ({"reasoning_content": mention} if where == "thought" else {}),
    ]
    tools = json.loads(json.dumps(TOOLS).replace("The weather.", mention if where == "schema" else "The weather."))
    row = encode_sft_row({"messages": messages, "tools": tools}, tokenizer, train_on="assistant")
    clean = encode_sft_row({"messages": DIALOGUES["result"], "tools": TOOLS}, tokenizer, train_on="assistant")
    for name in ("<|im_end|>", "<|im_start|>"):
        token = tokenizer.convert_tokens_to_ids(name)
        assert row.token_ids.count(token) == clean.token_ids.count(token)
    assert mention in tokenizer.decode(row.token_ids)
    prompt = encode_prompt({"messages": messages[:1], "tools": tools}, tokenizer)
    assert prompt.token_ids[:].count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    assert (mention in prompt.text) == (where in ("question", "schema"))


@pytest.mark.parametrize(
    ("answer", "learnt"),
    [
        ("4", "4</s>"),
        ("4</s>", "4</s>"),
        ("4<|im_end|>\n", "4<|im_end|>"),
        ("say <|im_end|>, then 4", "say <|im_end|>, then 4</s>"),
    ],
)
def test_a_plain_answer_ends_once(answer, learnt):
    tokenizer = template_tokenizer(templates.CHATML)
    row = encode_sft_row({"prompt": "2+2=", "answer": answer}, tokenizer)
    assert learned(row, tokenizer) == [learnt]
    ends = dialogue_template(tokenizer).stop_token_ids
    assert [token in ends for token in row.token_ids].count(True) == 1


def test_a_rendered_prompt_gives_its_answer_the_end_of_the_template():
    tokenizer = template_tokenizer(templates.CHATML)
    prompt = encode_prompt({"messages": [QUESTION]}, tokenizer).text
    row = encode_sft_row({"prompt": prompt, "answer": "four"}, tokenizer)
    assert row == encode_sft_row(row_of("question"), tokenizer)


class BeginningTokenizer:
    """A tokenizer that writes </s> before and after every text, as some do with BOS and EOS."""

    def __init__(self, inner):
        self.inner = inner
        self.eos_token_id, self.pad_token_id, self.chat_template = inner.eos_token_id, None, None
        self.added_tokens_decoder, self.decode = inner.added_tokens_decoder, inner.decode

    def encode(self, text, *, add_special_tokens=True):
        ids = self.inner.encode(text, add_special_tokens=False)
        return [self.eos_token_id, *ids, self.eos_token_id] if add_special_tokens else ids


@pytest.mark.parametrize("prompt", ["2+2=", "</s>2+2="])
def test_a_prompt_begins_with_one_bos(prompt):
    tokenizer = BeginningTokenizer(template_tokenizer(templates.CHATML))
    expected = [tokenizer.eos_token_id, *tokenizer.encode("2+2=", add_special_tokens=False)]
    assert list(encode_prompt({"prompt": prompt}, tokenizer).token_ids) == expected
    for row in (
        encode_sft_row({"prompt": prompt, "answer": "4"}, tokenizer),
        encode_pair({"chosen": prompt + "4", "rejected": prompt + "5"}, tokenizer).chosen,
    ):
        assert row.token_ids[:-2] == expected
        assert row.token_ids.count(tokenizer.eos_token_id) == 2
