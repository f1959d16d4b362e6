"""A bridge with one token per character: `<` begins a message, `>` ends it, `!` ends reasoning."""

import struct
from collections.abc import Sequence

from areal.agent.bridge import BridgeGap
from areal.agent.turns import TurnRequest
from areal.api.columns import ExpertShape, RoutedExperts
from areal.api.data import GenerationResponse, StopReason

END = ord(">")
ROLES = {"assistant": "<a", "user": "<u", "tool": "<t", "system": "<s"}


class CharBridge:
    """With `strips`, the reasoning of answers disappears as soon as a user message follows, as many templates do."""

    stop_token_ids = frozenset({END})

    def __init__(self, *, strips: bool = False) -> None:
        self.strips = strips
        self.num_rendered = 0

    def prompt(self, messages, tools) -> list[int]:
        last_user = max((i for i, item in enumerate(messages) if item["role"] == "user"), default=-1)
        parts = [f"[{tool['function']['name']}]" for tool in tools]
        for index, each in enumerate(messages):
            thought = each.get("reasoning_content") or ""
            if self.strips and index < last_user:
                thought = ""
            parts.append(f"{ROLES[each['role']]}{thought and thought + '!'}{each.get('content') or ''}>")
        self.num_rendered += 1
        return [ord(character) for character in "".join(parts) + "<a"]

    def extension(self, history, new_messages, tools) -> list[int] | BridgeGap:
        if self.strips and any(message["role"] == "user" for message in new_messages):
            return BridgeGap(reason="history_edited", detail="reasoning is stripped")
        text = "".join(f"{ROLES[message['role']]}{message.get('content') or ''}>" for message in new_messages)
        return [END, *(ord(character) for character in text + "<a")]


def messages_of(*texts: str):
    """`u:hello` is a user message."""
    roles = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    return tuple({"role": roles[text[0]], "content": text[2:]} for text in texts)


def request_of(*texts: str, tools=()) -> TurnRequest:
    return TurnRequest(messages=messages_of(*texts), tools=tools)


SHAPE = ExpertShape(1, 2, 256)


def experts_of(token_ids, version: int) -> RoutedExperts:
    """Rows (token, version)."""
    return RoutedExperts(SHAPE, b"".join(struct.pack("<2h", token, version) for token in token_ids))


def response_of(
    text: str, *, version: int = 1, stop_reason: StopReason = "stop", context: Sequence[int] | None = None
) -> GenerationResponse:
    """An answer of one token per character; the log-probability of a token is -its id / 1000."""
    ids = [ord(character) for character in text]
    return GenerationResponse(
        request_id="r",
        input_ids=[],
        output_ids=ids,
        output_logprobs=[-item / 1000 for item in ids],
        output_versions=[version] * len(ids),
        stop_reason=stop_reason,
        routed_experts=None if context is None else experts_of([*context, *ids][:-1], version),
    )


def answer(transcript, request: TurnRequest, text: str, turn_id: str, **options):
    """Add an answer `reasoning!content>` to a request, and return the delivered message."""
    context = transcript.context(request)
    reasoning, mark, content = text.rstrip(">").rpartition("!")
    message = {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if mark else {})
    transcript.add_answer(context, turn_id, response_of(text, context=context.token_ids, **options), message)
    return message


def text_of(token_ids) -> str:
    return "".join(chr(item) for item in token_ids)
