"""What is certain of an answer while it is generated is the beginning of what it is in the end, in every dialect."""

import asyncio
import functools
from collections import defaultdict

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from areal.agent.answer_stream import AnswerSplit, TokenText
from areal.agent.dialects import chat_completions, completions, messages, responses
from areal.agent.dialects.dialect import Sent
from areal.agent.session import Session
from areal.agent.tool_calls import STYLES, split_answer, style_of
from tests.agent.policies import ChunkEngine, tool_tokenizer
from tests.agent.test_dialects import CHAT, COMPLETION, MESSAGE, MESSAGE_TOOLS, RESPONSE, RESPONSE_TOOLS
from tests.agent.test_dialects import TOOLS as CHAT_TOOLS
from tests.agent.test_session import setup_of
from tests.agent.tool_calls.test_any_text import MARKERS, TOOLS
from tests.agent.tool_calls.test_styles import CASES

SPECIAL = ["<|end|>", "<|im_end|>", "<|call|>"]
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=9)
PIECES = [*MARKERS, *CASES.values(), " ", "\n\n", "<|im_end|>", "<thi", "<|", '\n{"name": "f", ']
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=12).map("".join)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("template", ["<think></think>", ""])
@given(
    text=TEXTS, cuts=CUTS, has_tools=st.booleans(), in_reasoning=st.booleans(), may_close=st.booleans(),
    is_cut=st.booleans(),
)  # fmt: skip
def test_what_is_certain_of_a_text_is_its_beginning(
    style, template, text, cuts, has_tools, in_reasoning, may_close, is_cut
):
    chosen = style_of(style, template, SPECIAL)
    options = {"in_reasoning": in_reasoning, "may_close": may_close and not has_tools}
    split = AnswerSplit(chosen, has_tools=has_tools, **options)
    tools = TOOLS if has_tools else []
    whole = split_answer(text, [1], chosen, turn_id="t", is_cut=is_cut, tools=tools, **options)
    done, said = 0, ("", "")
    while done < len(text):
        size = cuts[done % len(cuts)]
        split.add(text[done : done + size])
        done += size
        assert split.text.startswith(said[0])
        assert split.reasoning.startswith(said[1])
        said = split.text, split.reasoning
    assert whole.text.startswith(split.text)
    assert whole.reasoning.startswith(split.reasoning)


@pytest.mark.parametrize(
    ("pieces", "style", "texts", "thoughts"),
    [
        (["He", "llo <", "b> ", "you"], "hermes", ["He", "Hello", "Hello <b>", "Hello <b> you"], [""] * 4),
        (["<thi", "nk>\nwhy", "\n</th", "ink>\n\nso"], "hermes", ["", "", "", "so"], ["", "why", "why", "why"]),
        (["Look.\n<tool", "_call>{}", " no"], "hermes", ["Look.", "Look.", "Look."], [""] * 3),
        (["Look. [TOOL", "_SHED]"], "mistral", ["Look.", "Look. [TOOL_SHED]"], [""] * 2),
        (['{"na', 'me of'], "llama3_json", ["", '{"name of'], [""] * 2),
        (['{"na', 'me": 1'], "llama3_json", ["", ""], [""] * 2),
        (["[f(", "a=1)]"], "pythonic", ["", ""], [""] * 2),
        (["a\n<think>", "b</think>c"], "hermes", ["a", "a"], [""] * 2),
        (["<|channel|>analysis<|mess", "age|>why<|e", "nd|><|start|>assistant<|channel|>final<|message|>so"], "gpt_oss",
         ["", "", "so"], ["", "why", "why"]),
    ],
)  # fmt: skip
def test_text_is_certain_as_soon_as_it_can_be(pieces, style, texts, thoughts):
    split = AnswerSplit(style_of(style, "<think></think>"), has_tools=True, in_reasoning=False, may_close=False)
    result = []
    for piece in pieces:
        split.add(piece)
        result.append((split.text, split.reasoning))
    assert result == list(zip(texts, thoughts, strict=True))


@given(text=st.text(max_size=30), cuts=CUTS, num_broken=st.integers(0, 3))
def test_the_text_of_tokens_has_no_half_characters(text, cuts, num_broken):
    """The tokens of the tokenizer are bytes; the answer is cut inside of the last character."""
    tokenizer = tool_tokenizer()
    ids = [*tokenizer.encode(text), *tokenizer.encode("🧑")[:num_broken]]
    result, parts, done = TokenText(tokenizer.decode), [], 0
    while done < len(ids):
        size = cuts[done % len(cuts)]
        parts.append(result.add(ids[done : done + size]))
        done += size
        assert text.startswith("".join(parts))
    assert "".join(parts) == text.rstrip("\ufffd")
    assert "".join([*parts, result.rest()]) == tokenizer.decode(ids)


def test_a_broken_byte_does_not_hold_the_text_after_it():
    """A tokenizer with byte fallback decodes the character before the byte otherwise once the byte has followed."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    result = TokenText(tokenizer.decode)
    euro = list("€".encode())
    assert [result.add(ids) for ids in (euro[:1], euro[1:], euro[:1])] == ["", "€", ""]
    assert result.add([256]).endswith("a")
    assert [result.add([256]), result.add(euro), result.rest()] == ["a", "€", ""]


SENT = Sent(created_s=1, token_text=lambda token_id: f"t{token_id}")
LOGPROBS = {"include": ["message.output_text.logprobs"]}
USAGE = {"stream_options": {"include_usage": True}}
DIALECTS = {
    "chat": (chat_completions.DIALECT, CHAT | {"n": 2, "logprobs": True} | USAGE, CHAT_TOOLS),
    "completions": (completions.DIALECT, COMPLETION | {"n": 2, "logprobs": 0, "max_tokens": 999} | USAGE, None),
    "responses": (responses.DIALECT, RESPONSE | LOGPROBS, RESPONSE_TOOLS),
    "messages": (messages.DIALECT, MESSAGE | {"max_tokens": 999}, MESSAGE_TOOLS),
}
WORDS = [
    *(
        "Look",
        " at ",
        "\n",
        "\n\n",
        "€",
        "🧑‍🚀",
        "日本",
        "stop!",
        "<think>",
        "</think>",
        "<thi",
        "<tool_call>",
        "<|im",
        "<",
    ),
    *('<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>', '{"name": "add"', "</tool_call>"),
]


@functools.cache
def setup():
    return setup_of(max_new_tokens=2000, special_tokens=["<|im_end|>"])


def assembled(name, events):
    """The reply that the events of a stream amount to, or the parts of it that they have."""
    bodies = [orjson.loads(event.split(b"data: ", 1)[1]) for event in events if event != b"data: [DONE]\n\n"]
    return {"chat": of_chat, "completions": of_completions, "responses": of_responses, "messages": of_messages}[name](
        bodies
    )


def of_chat(bodies):
    choices = defaultdict(lambda: {"content": "", "reasoning": "", "calls": {}, "logprobs": [], "ends": []})
    for body in bodies[:-1]:
        (choice,) = body["choices"]
        delta, result = choice["delta"], choices[choice["index"]]
        assert not result["ends"], "nothing follows the finish reason"
        result["content"] += delta.get("content") or ""
        result["reasoning"] += delta.get("reasoning_content") or ""
        result["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        result["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        for call in delta.get("tool_calls", ()):
            known = result["calls"].setdefault(call["index"], ["", "", ""])
            known[0] += call.get("id", "")
            known[1] += call["function"].get("name", "")
            known[2] += call["function"]["arguments"]
    return dict(choices), bodies[-1]["usage"]


def of_completions(bodies):
    choices = defaultdict(lambda: {"text": "", "tokens": [], "offsets": [], "ends": []})
    for body in bodies[:-1]:
        (choice,) = body["choices"]
        result = choices[choice["index"]]
        result["text"] += choice["text"]
        result["tokens"] += choice["logprobs"]["tokens"]
        result["offsets"] += choice["logprobs"]["text_offset"]
        result["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return dict(choices), bodies[-1]["usage"]


def of_responses(bodies):
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    items, texts, logprobs, is_open = [], {}, [], None
    for body in bodies:
        match body["type"]:
            case "response.output_item.added":
                assert is_open is None
                is_open = body["output_index"]
                assert is_open == len(items)
            case "response.output_item.done":
                assert is_open == body["output_index"]
                items.append(body["item"])
                is_open = None
            case "response.output_text.delta" | "response.reasoning_text.delta":
                assert is_open == body["output_index"]
                texts[is_open] = texts.get(is_open, "") + body["delta"]
                logprobs += body.get("logprobs", ())
    whole = bodies[-1]["response"]
    assert whole["output"] == items
    assert {at: item["content"][0]["text"] for at, item in enumerate(items) if "content" in item} == texts
    assert [item["content"][0]["logprobs"] for item in items if item["type"] == "message"] in ([logprobs], [])
    return joined_items(whole), whole["usage"]


def joined_items(whole):
    texts = {"reasoning": [], "message": []}
    for item in whole["output"]:
        if item["type"] in texts:
            texts[item["type"]].append(item["content"][0]["text"])
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    message = [item for item in whole["output"] if item["type"] == "message"]
    return "\n".join(texts["reasoning"]), texts["message"], calls, message, whole["status"]


def of_messages(bodies):
    blocks, is_open = [], None
    for body in bodies[1:-2]:
        if body["type"] == "content_block_start":
            assert (is_open, body["index"]) == (None, len(blocks))
            blocks.append(dict(body["content_block"]))
            is_open = body["index"]
        elif body["type"] == "content_block_stop":
            assert is_open == body["index"]
            is_open = None
        else:
            assert is_open == body["index"]
            kind = body["delta"]["type"]
            if kind == "input_json_delta":
                blocks[-1]["input"] = orjson.loads(body["delta"]["partial_json"])
            else:
                blocks[-1][kind.removesuffix("_delta")] += body["delta"][kind.removesuffix("_delta")]
    return joined_blocks(blocks), bodies[-2]["delta"]["stop_reason"], bodies[-2]["usage"]


def joined_blocks(blocks):
    thoughts = "\n".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    return thoughts, [block for block in blocks if block["type"] != "thinking"]


def expected(name, reply):
    """The same of an answer that is not streamed."""
    match name:
        case "chat":
            actual = {}
            for choice in reply["choices"]:
                message = choice["message"]
                calls = enumerate(message.get("tool_calls", ()))
                actual[choice["index"]] = {
                    "content": message["content"] or "",
                    "reasoning": message.get("reasoning_content", ""),
                    "calls": {at: [item["id"], *item["function"].values()] for at, item in calls},
                    "logprobs": choice["logprobs"]["content"],
                    "ends": [choice["finish_reason"]],
                }
            return actual, reply["usage"]
        case "completions":
            return {
                choice["index"]: {
                    "text": choice["text"],
                    "tokens": choice["logprobs"]["tokens"],
                    "offsets": choice["logprobs"]["text_offset"],
                    "ends": [choice["finish_reason"]],
                }
                for choice in reply["choices"]
            }, reply["usage"]
        case "responses":
            return joined_items(reply), reply["usage"]
        case _:
            return joined_blocks(reply["content"]), reply["stop_reason"], reply["usage"]


async def streamed_and_whole(name, text, cuts, fields):
    dialect, body, _ = DIALECTS[name]
    asked, replies = dialect.parse(body | fields | {"stream": True}), []
    session = Session("s1", setup(), ChunkEngine(lambda prompt: text, cuts))
    stream, events_of, events = session.stream(asked.turn), dialect.stream(asked, SENT), []
    while not stream.is_whole:
        events += events_of(await stream.grown(60.0))
    other = Session("s1", setup(), ChunkEngine(lambda prompt: text, cuts))
    replies = await other.answer(asked.turn)
    assert session.transcript.turns["s1.0"].message == other.transcript.turns["s1.0"].message
    return assembled(name, events), expected(name, orjson.loads(orjson.dumps(dialect.reply(asked, replies, SENT))))


@pytest.mark.parametrize("name", DIALECTS)
@given(
    text=st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=12).map("".join),
    cuts=CUTS, has_tools=st.booleans(), limit=st.sampled_from([7, 40, 999]),
)  # fmt: skip
def test_the_deltas_of_a_stream_are_the_answer(name, text, cuts, has_tools, limit):
    tools, fields = DIALECTS[name][2], {"max_output_tokens" if name == "responses" else "max_tokens": limit}
    if has_tools and tools:
        fields["tools"] = tools
    streamed, whole = asyncio.run(streamed_and_whole(name, text, cuts, fields))
    assert streamed == whole


def test_a_prefill_is_no_part_of_a_stream_of_messages():
    dialogue = [*MESSAGE["messages"], {"role": "assistant", "content": '{"a":'}]
    streamed, whole = asyncio.run(streamed_and_whole("messages", " 4}", [1], {"messages": dialogue}))
    assert streamed == whole
    assert whole[0] == ("", [{"type": "text", "text": " 4}"}])
