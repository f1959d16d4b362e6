"""Time that the session server needs to parse a request and to write its reply, for each dialect.

    python benchmark/agent_dialects.py [--turns 1]

Prints one line of JSON: microseconds for a dialogue of `turns` turns with a tool call each.
"""

import argparse
import json
import time
from collections.abc import Callable

import orjson

from areal.agent.dialects import chat_completions, messages, responses
from areal.agent.dialects.dialect import Dialect, Sent
from areal.agent.turns import ToolCall, TurnAnswer

SENT = Sent(created_s=0, token_text=str)
CALL = ToolCall(call_id="abcdefghi", name="add", arguments='{"a": 1, "b": 2}')
ANSWER = TurnAnswer(
    turn_id="turn",
    text="The answer is as follows. " * 10,
    reasoning="Let me see. " * 40,
    tool_calls=(CALL,),
    finish_reason="tool_calls",
    num_prompt_tokens=500,
    token_ids=tuple(range(200)),
    logprobs=(-0.5,) * 200,
)


def bodies(turns: int) -> dict[Dialect, bytes]:
    """A request of each dialect after `turns` turns."""
    chat, items, blocks = [], [], []
    for number in range(turns):
        call_id, text, name, arguments = f"call{number}", "some text " * 20, CALL.name, CALL.arguments
        question = {"role": "user", "content": text}
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        chat += [question, {"role": "assistant", "content": text, "tool_calls": [call]}]
        chat.append({"role": "tool", "tool_call_id": call_id, "content": "3"})
        items += [question, {"role": "assistant", "content": text}]
        items.append({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})
        items.append({"type": "function_call_output", "call_id": call_id, "output": "3"})
        use = {"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)}
        blocks += [question, {"role": "assistant", "content": [{"type": "text", "text": text}, use]}]
        result = {"type": "tool_result", "tool_use_id": call_id, "content": "3"}
        blocks.append({"role": "user", "content": [result]})
    return {
        chat_completions.DIALECT: orjson.dumps({"model": "m", "messages": chat}),
        responses.DIALECT: orjson.dumps({"model": "m", "input": items}),
        messages.DIALECT: orjson.dumps({"model": "m", "max_tokens": 9, "messages": blocks}),
    }


def us_of(function: Callable[[], object], seconds: float = 0.3) -> float:
    """Median of the microseconds that a call takes."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


def measure(turns: int) -> dict[str, dict[str, float]]:
    """Dialect -> microseconds to parse a request, and to write the reply whole and as events."""
    seconds: dict[str, dict[str, float]] = {}
    for dialect, data in bodies(turns).items():
        asked = dialect.parse(orjson.loads(data))
        seconds[dialect.name] = {
            "parse_us": round(us_of(lambda data=data, dialect=dialect: _parsed(dialect, data)), 1),
            "reply_us": round(us_of(lambda d=dialect, a=asked: orjson.dumps(d.reply(a, [ANSWER], SENT))), 1),
            "events_us": round(us_of(lambda d=dialect, a=asked: b"".join(d.stream(a, SENT)([ANSWER]))), 1),
        }
    return seconds


def _parsed(dialect: Dialect, data: bytes) -> object:
    body = orjson.loads(data)
    orjson.dumps(body, option=orjson.OPT_SORT_KEYS)  # for the fingerprint
    return dialect.parse(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1, help="turns of the dialogue")
    print(json.dumps(measure(parser.parse_args().turns)))


if __name__ == "__main__":
    main()
