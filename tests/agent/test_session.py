"""One session: budgets, retries, several answers, time limits, and the stages of its turns."""

import asyncio

import pytest

from areal.agent.bridge import template_bridge
from areal.agent.session import Session, SessionBudget, SessionLimits, SessionSetup
from areal.agent.session_server import TurnJournal
from areal.agent.tool_calls import style_of
from areal.agent.transcript import Transcript, trajectories
from areal.agent.turns import TurnRefused, TurnRequest, TurnSettings, answer_message
from areal.api.config import GenerationHyperparameters
from areal.api.errors import ServerUnavailable
from areal.data.tiny_model import template_tokenizer
from tests.agent.bridge.templates import CHATML, NO_USER_AFTER_TOOL
from tests.agent.policies import ScriptedEngine, tool_tokenizer
from tests.expect import raises_code

QUESTION = {"role": "user", "content": "2+2?"}


def setup_of(
    *, limits=None, sampling="client", style="hermes", template=CHATML, max_new_tokens=50, special_tokens=()
) -> SessionSetup:
    tokenizer = template_tokenizer(template)
    bridge, max_tokens = template_bridge(tokenizer), 10 * max_new_tokens
    gconfig = GenerationHyperparameters(
        max_new_tokens=max_new_tokens, max_tokens=max_tokens, temperature=0.7,
        stop_token_ids=sorted(bridge.stop_token_ids),
    )  # fmt: skip
    return SessionSetup(
        tokenizer=tokenizer,
        settings=gconfig,
        limits=limits or SessionLimits(),
        sampling=sampling,
        new_transcript=lambda: Transcript(bridge, max_tokens=max_tokens, encode=lambda text, _: tokenizer.encode(text)),
        style=style_of(style, tokenizer.chat_template, special_tokens),
    )


def session_of(engine, *, events=None, **options) -> Session:
    return Session("s1", setup_of(**options), engine, events=events)


def request(text="2+2?", **options) -> TurnRequest:
    return TurnRequest(messages=({"role": "user", "content": text},), fingerprint=text, **options)


async def test_ids_of_calls_are_unique_in_the_session_and_the_prompt_keeps_those_of_the_policy() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}, "id": "mine"}</tool_call>'
    engine = ScriptedEngine(lambda prompt: text)
    session = session_of(engine, template=CHATML.replace("{{ message", "{{ message.tool_call_id }}{{ message"))
    dialogue = [QUESTION]
    for turn in range(3):
        (answer,) = await session.answer(TurnRequest(messages=tuple(dialogue), tools=(ADD,), fingerprint=str(turn)))
        (call,) = answer.tool_calls
        dialogue += [answer_message(answer), {"role": "tool", "tool_call_id": call.call_id, "content": "1"}]
        assert session.turn_of(call.call_id) == answer.turn_id
    assert len({call["id"] for item in dialogue for call in item.get("tool_calls", ())}) == 3
    assert session.transcript.num_forks == 0
    assert [message.get("tool_call_id") for message in session.last_messages if message["role"] == "tool"] == [
        "mine",
        "mine",
    ]


@pytest.mark.parametrize("is_sent_back", [True, False])
async def test_reasoning_that_a_client_does_not_send_back_is_restored(is_sent_back) -> None:
    texts = iter(["<think>\nhm\n</think>\n\nfour", "five"])
    engine = ScriptedEngine(lambda prompt: next(texts))
    session = session_of(engine)
    (answer,) = await session.answer(request())
    message = answer_message(answer)
    assert (answer.text, answer.reasoning) == ("four", "hm")
    if not is_sent_back:
        del message["reasoning_content"]
    await session.answer(TurnRequest(messages=(QUESTION, message, QUESTION), fingerprint="2"))
    assert (session.transcript.num_forks, session.transcript.num_drifts) == (0, 0)
    assert "hm" in tool_tokenizer().decode(list(engine.requests[-1].input_ids))
    assert session.last_messages[1]["reasoning_content"] == "hm"


def numbered() -> ScriptedEngine:
    counter = iter(range(100))
    return ScriptedEngine(lambda prompt: str(next(counter)))


async def test_a_marked_retry_gets_the_recorded_answer_and_an_equal_request_a_new_one() -> None:
    session = session_of(numbered())
    (first,) = await session.answer(request())
    (second,) = await session.answer(request())
    (again,) = await session.answer(request(retry_count=1))
    assert (first.text, second.text) == ("0", "1")
    assert again == first
    assert session.counts.retries == 1
    assert session.transcript.num_turns == 2


async def test_a_retry_of_equal_requests_gets_the_one_that_was_not_delivered() -> None:
    session = session_of(numbered())
    (first,) = await session.answer(request())
    session.delivered([first])
    (second,) = await session.answer(request())
    assert await session.answer(request(retry_count=1)) == (second,)


async def test_a_turn_continues_when_its_client_leaves_and_the_retry_finds_it() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine(lambda prompt: "4", gate=gate)
    session = session_of(engine)
    left = asyncio.create_task(session.answer(request()))
    await engine.arrived.wait()
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    gate.set()
    (answer,) = await session.answer(request(retry_count=1))
    assert answer.text == "4"
    assert len(engine.requests) == 1


async def test_a_retry_after_a_lost_server_samples_again() -> None:
    engine = numbered()
    lost = iter([True, False])
    generate = engine.agenerate

    async def agenerate(inputs):
        if next(lost):
            raise ServerUnavailable("gone", code="fleet.no_replica")
        return await generate(inputs)

    engine.agenerate = agenerate
    session = session_of(engine)
    with pytest.raises(TurnRefused) as caught:
        await session.answer(request())
    assert (caught.value.status, caught.value.code) == (503, "agent.no_server")
    (answer,) = await session.answer(request(retry_count=1))
    assert answer.text == "0"


async def test_several_answers_to_one_request_are_leaves() -> None:
    session = session_of(numbered())
    answers = await session.answer(request(num_answers=3))
    assert sorted(answer.text for answer in answers) == ["0", "1", "2"]
    assert len(session.transcript.tree.leaves()) == 3
    assert session.transcript.num_turns == 1


async def test_turns_beyond_the_budget_are_refused_with_a_reason() -> None:
    session = session_of(numbered(), limits=SessionLimits(max_turns=1))
    await session.answer(request())
    with pytest.raises(TurnRefused) as caught:
        await session.answer(request())
    assert (caught.value.status, caught.value.code) == (400, "agent.turn_budget")
    assert session.counts.refused == {"agent.turn_budget": 1}
    assert await session.answer(request(retry_count=1))


async def test_the_turn_under_way_is_cut_by_the_budget_of_tokens() -> None:
    session = session_of(ScriptedEngine(lambda prompt: "abcdefgh"), limits=SessionLimits(max_tokens=5))
    (answer,) = await session.answer(request())
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 5)
    with raises_code("agent.token_budget"):
        await session.answer(request())


async def test_the_turn_under_way_ends_with_length_when_the_time_of_its_session_is_over() -> None:
    session = session_of(
        ScriptedEngine(lambda prompt: "4", gate=asyncio.Event()), limits=SessionLimits(max_seconds=0.05)
    )
    (answer,) = await session.answer(request())
    assert (answer.finish_reason, answer.token_ids) == ("length", ())
    with raises_code("agent.time_budget"):
        await session.answer(request())
    assert session.counts.timed_out == 1


@pytest.mark.parametrize(("sampling", "temperature"), [("client", 0.2), ("config", 0.7)])
async def test_the_sampling_of_the_client_counts_unless_the_run_decides(sampling, temperature) -> None:
    engine = numbered()
    wishes = {"top_p": 0.9, "top_k": 5, "frequency_penalty": -0.5, "presence_penalty": 0.25}
    session = session_of(engine, sampling=sampling)
    await session.answer(request(settings=TurnSettings(temperature=0.2, max_new_tokens=7, **wishes)))
    (sent,) = engine.requests
    assert (sent.gconfig.temperature, sent.gconfig.max_new_tokens) == (temperature, 7)
    ours = {name: getattr(session_of(engine)._setup.settings, name) for name in wishes}
    assert {name: getattr(sent.gconfig, name) for name in wishes} == (wishes if sampling == "client" else ours)


async def test_the_end_of_a_session_cancels_its_turns() -> None:
    engine = ScriptedEngine(lambda prompt: "4", gate=asyncio.Event())
    session = session_of(engine)
    turn = asyncio.create_task(session.answer(request()))
    await engine.arrived.wait()
    await session.finish()
    with pytest.raises(asyncio.CancelledError):
        await turn
    with raises_code("agent.session_ended"):
        await session.answer(request())


async def test_the_journal_has_the_stages_of_each_turn_in_order(tmp_path) -> None:
    journal = TurnJournal(tmp_path)
    session = session_of(numbered(), events=journal)
    answers = await session.answer(request())
    session.delivered(answers)
    await journal.durable()
    await journal.aclose()
    lines = (tmp_path / "000001.jsonl").read_text().splitlines()
    assert [line.split('"')[3] for line in lines] == ["intent", "generated", "delivered"]


def test_a_budget_of_tokens_is_shared_by_the_answers_of_a_turn() -> None:
    budget = SessionBudget(limits=SessionLimits(max_tokens=10), opened_s=0.0)
    assert budget.begin_turn(0.0, 2) == 5


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("choice", "forced", "rest"),
    [
        ("required", '<tool_call>{"name": "', 'add", "arguments": {"a": 1}}</tool_call>'),
        ("add", '<tool_call>{"name": "add", "arguments":', ' {"a": 1}}</tool_call>'),
    ],
)
async def test_a_required_call_is_begun_by_tokens_that_are_not_trained(choice, forced, rest) -> None:
    engine = ScriptedEngine(lambda prompt: rest if prompt.endswith("assistant\n" + forced) else "no")
    session = session_of(engine)
    (answer,) = await session.answer(request(tools=(ADD,), tool_choice=choice))
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("add", '{"a": 1}')]
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].call_id, "content": "1"}
    dialogue = ({"role": "user", "content": "2+2?"}, answer_message(answer), result)
    await session.answer(TurnRequest(messages=dialogue, tools=(ADD,), fingerprint="2"))
    assert session.transcript.num_forks == 0
    (row,) = trajectories(session.transcript, cut="tree", reward=1.0, session=0)
    decode = tool_tokenizer().decode
    trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert decode(trained) == f"{rest}<|im_end|>no<|im_end|>"
    assert f"{forced}{rest}<|im_end|>" in decode(row.token_ids)


SCHEMA = {
    "$defs": {"Kind": {"enum": ["a", "b"]}}, "type": "object", "required": ["n"], "additionalProperties": False,
    "properties": {
        "n": {"type": "integer"}, "k": {"$ref": "#/$defs/Kind"},
        "l": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}}]},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "has_it"),
    [
        ('{"n": 1}', True), (' {"n": 1, "k": "b", "l": [1, 2.5]}\n', True), ('{"n": 1, "l": null}', True),
        ('{"n": "1"}', False), ('{"n": true}', False), ('{"k": "a"}', False), ('{"n": 1, "k": "c"}', False),
        ('{"n": 1, "l": ["x"]}', False), ('{"n": 1, "m": 2}', False), ("[]", False), ("n is 1", False), ("", False),
    ],
)  # fmt: skip
async def test_an_answer_without_the_wanted_format_is_counted(text, has_it) -> None:
    session = session_of(ScriptedEngine(lambda prompt: text))
    await session.answer(request(answer_schema=SCHEMA))
    assert session.counts.format_errors == (not has_it)


async def test_an_answer_continues_a_text_that_is_not_trained() -> None:
    session = session_of(ScriptedEngine(lambda prompt: " 4}" if prompt.endswith('assistant\n{"a":') else "?"))
    (answer,) = await session.answer(request(prefill='{"a":'))
    assert answer.text == '{"a": 4}'
    await session.answer(TurnRequest(messages=(QUESTION, answer_message(answer), QUESTION), fingerprint="2"))
    assert session.transcript.num_forks == 0
    (row,) = trajectories(session.transcript, cut="tree", reward=1.0, session=0)
    trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert tool_tokenizer().decode(trained) == " 4}<|im_end|>?<|im_end|>"


async def test_a_forced_call_that_the_policy_does_not_complete_is_text_and_counted() -> None:
    session = session_of(ScriptedEngine(lambda prompt: "no"))
    (answer,) = await session.answer(request(tools=(ADD,), tool_choice="required"))
    assert (answer.text, answer.tool_calls) == ('<tool_call>{"name": "no', ())
    assert session.counts.malformed_calls == 1


async def test_a_required_call_is_refused_where_the_style_reads_no_call() -> None:
    session = session_of(ScriptedEngine(lambda prompt: "no"), style="none")
    with pytest.raises(TurnRefused) as caught:
        await session.answer(request(tools=(ADD,), tool_choice="required"))
    assert (caught.value.code, caught.value.status, caught.value.param) == (
        "agent.unsupported_field",
        400,
        "tool_choice",
    )
    assert session.counts.refused["agent.unsupported_field"] == 1


@pytest.mark.parametrize("ask", ["answer", "count_tokens"])
async def test_a_dialogue_that_the_chat_template_refuses_is_an_error_of_the_client(ask) -> None:
    session = session_of(numbered(), template=NO_USER_AFTER_TOOL)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    dialogue = (QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]})
    dialogue = (*dialogue, {"role": "tool", "tool_call_id": "c", "content": "4"}, QUESTION)
    with pytest.raises(TurnRefused) as caught:
        await getattr(session, ask)(TurnRequest(messages=dialogue, tools=(ADD,), fingerprint="1"))
    assert (caught.value.code, caught.value.status, caught.value.param) == ("agent.template_refused", 400, "messages")
    (answer,) = await session.answer(request())
    assert answer.text == "0"
