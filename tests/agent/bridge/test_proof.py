"""Each construct of real chat templates: which rows of the table it breaks, and which dialogue shows it first."""

import datetime

import pytest

from areal.agent.bridge import TemplateBridge, TemplateScenario, compare, summary
from areal.data.tiny_model import template_tokenizer
from tests.agent.bridge import templates
from tests.expect import raises_code


def bridge_of(template, **scenario) -> TemplateBridge:
    return TemplateBridge(template_tokenizer(template), TemplateScenario(**scenario))


def broken(bridge, *, max_answers=2):
    """Row -> reason and counterexample, of the rows that are not proved."""
    return {
        f"{row.shape} {row.following}": (row.gap.reason, row.counterexample)
        for row in bridge.table(max_answers=max_answers)
        if row.gap is not None
    }


@pytest.mark.parametrize(
    "name",
    ["CHATML", "LAST_TURN_DIFFERS", "CALL_IDS", "ARGUMENTS_ESCAPED", "ARGUMENTS_MAPPING", "ARGUMENTS_ADDED",
     "DATED", "OTHER_END", "HEADER_ENDS", "PARTS", "INLINE_THOUGHT"],
)  # fmt: skip
def test_proved_in_every_row_and_equal_to_the_full_rendering(name):
    bridge = bridge_of(getattr(templates, name))
    assert broken(bridge) == {}
    result = compare(bridge, num_dialogues=8, seed=3)
    assert (result.num_different, result.num_edits, result.gaps) == (0, 0, {})
    assert result.num_bridges > 10


@pytest.mark.parametrize(
    ("name", "thinking", "first"),
    [
        ("THINKING_STRIPPED", True, {"A(r,c) U": ("answer_edited", "U A(r,c) U")}),
        ("EMPTY_THOUGHT", False, {"A(c) U": ("history_edited", "U A(c) U")}),
        ("MOVED_TOOLS", False, {"A(c) U": ("history_edited", "U A(c) U"), "A(t) TU": ("history_edited", "U A(t) TU")}),
        ("COMPARED", False, {"A(c) U": ("history_edited", "U A(c) U")}),
        ("MOVED_SYSTEM", False, {"A(c) U": ("history_edited", "S U A(c) U")}),
        ("NEWLINE_UNLESS_LAST", False, {"A(t) T": ("history_edited", "U A(t) T A(t) T")}),
        ("NO_PROMPT", False, {"A(c) U": ("no_prompt", "U A(c) U")}),
        ("ONE_CALL", False, {"A(t,t) T": ("refused", "U A(t,t) TT")}),
        ("NO_USER_AFTER_TOOL", False, {"A(t) TU": ("refused", "U A(t) TU")}),
        ("TAIL_DIFFERS", False, {"A(c) U": ("tail_differs", "U A(c) U")}),
        ("TEXT_HIDES_CALLS", False, {"A(c,t) T": ("answer_edited", "U A(c,t) T")}),
    ],
)
def test_the_shortest_dialogue_that_fails(name, thinking, first):
    bridge = bridge_of(getattr(templates, name), enable_thinking=thinking)
    rows = broken(bridge)
    assert {row: rows.get(row) for row in first} == first
    result = compare(bridge, num_dialogues=4, seed=1)
    assert result.num_different == result.num_edits == 0
    assert {f"{shape} {following}" for shape, following in result.gaps} <= set(rows)


def test_thinking_that_only_a_question_strips_leaves_the_tool_loop():
    rows = broken(bridge_of(templates.THINKING_STRIPPED, enable_thinking=True))
    assert {row.split()[1] for row in rows} == {"U", "TU"}


def test_a_scope_leaves_out_the_dialogues_that_nobody_declares():
    stripped = bridge_of(templates.THINKING_STRIPPED, enable_thinking=True)
    assert {row.gap for row in stripped.table(max_answers=2, scope="tools")} == {None}
    assert {row.following for row in stripped.table(max_answers=1, scope="tools")} == {"T"}
    newline = bridge_of(templates.NEWLINE_UNLESS_LAST)
    assert [(str(row.shape), row.gap) for row in newline.table(max_answers=2, scope="chat")] == [("A(c)", None)]
    single = bridge_of(templates.ONE_CALL).table(max_answers=2, scope="one-call")
    assert {(row.shape.num_calls, row.gap) for row in single} == {(1, None)}
    bare = bridge_of(templates.TEXT_HIDES_CALLS)
    assert [str(row.shape) for row in bare.table(max_answers=2, scope="bare-call") if row.gap is None] == ["A(t)"]
    assert compare(stripped, num_dialogues=3, seed=0, scope="tools").gaps == {}


def test_the_error_of_a_template_that_refuses_calls_is_kept():
    calls = "{% set _ = m.tool_calls and m.tool_calls.append(1) %}"
    facts = bridge_of(templates.chatml(calls=calls)).facts
    assert (facts.takes_tools, facts.refusal.partition(":")[0]) == (False, "SecurityError")


def test_the_rows_of_an_empty_thought_are_proved_with_thinking():
    assert broken(bridge_of(templates.EMPTY_THOUGHT, enable_thinking=True)) == {}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("CHATML", "text"),
        ("ARGUMENTS_ADDED", "text"),
        ("ARGUMENTS_ESCAPED", "mapping"),
        ("ARGUMENTS_MAPPING", "mapping"),
    ],
)
def test_the_form_of_arguments_is_the_one_that_is_shown_as_it_is(name, form):
    assert bridge_of(getattr(templates, name)).facts.forms.arguments == form


def test_forms_of_content_and_reasoning():
    assert bridge_of(templates.PARTS).facts.forms.content == "parts"
    assert bridge_of(templates.INLINE_THOUGHT).facts.forms.reasoning_tags == ("<think>", "</think>")
    assert bridge_of(templates.CHATML).facts.forms.reasoning_key == "reasoning_content"


def test_end_tokens_are_those_that_the_template_writes_and_the_declared_ones():
    assert bridge_of(templates.CHATML).facts.stops == ("</s>", "<|im_end|>")
    assert bridge_of(templates.HEADER_ENDS).facts.stops == ("</s>", "<|user|>", "<|observation|>")


def test_a_declared_end_token_that_the_template_never_writes_ends_an_answer_too():
    tokenizer = template_tokenizer(templates.OTHER_END)
    alias = tokenizer.convert_tokens_to_ids("<|return|>")
    bridge = TemplateBridge(tokenizer, TemplateScenario(stop_token_ids=frozenset({alias})))
    assert alias in bridge.stop_token_ids


def test_the_date_is_that_of_the_scenario():
    day = datetime.date(2024, 2, 29)
    bridge = bridge_of(templates.DATED, date=day)
    assert "Today is 29 Feb 2024." in bridge.template.render([{"role": "user", "content": "hi"}])
    other = bridge_of(templates.DATED, date=datetime.date(2024, 3, 1))
    assert bridge.template.digest != other.template.digest
    undated = [bridge_of(templates.CHATML, date=item).template.digest for item in (day, datetime.date(2024, 3, 1))]
    assert undated[0] == undated[1]


def test_what_the_sandbox_refuses_is_an_error_of_the_template():
    with raises_code("data.template_refused"):
        bridge_of(templates.FORBIDDEN)


def test_a_template_without_an_end_token_is_refused():
    with raises_code("data.template_stop"):
        tokenizer = template_tokenizer("{% for m in messages %}{{ m.content }};{% endfor %}")
        tokenizer.eos_token = None
        TemplateBridge(tokenizer, TemplateScenario())


@pytest.mark.parametrize(
    ("name", "broken_row"),
    [("CHATML", ""), ("THINKING_STRIPPED", "A(r,c) U (answer_edited)"), ("NO_PROMPT", "A(r,c) U")],
)
def test_a_line_says_before_the_run_which_turns_extend_a_session(name, broken_row):
    text = summary(bridge_of(getattr(templates, name), enable_thinking=True).table(max_answers=2), "reject")
    assert broken_row in text
    assert ("agent.on_drift=reject" in text) == bool(broken_row)
