"""Refuses a prompt that has no room for an answer before it is rendered: by its bytes, then by its least tokens."""

from collections.abc import Iterator

import orjson

from areal.agent.images import parts_of
from areal.agent.turns import TurnRefused, TurnRequest
from areal.data.tokenizer import Tokenizer

LARGE = 1 << 16  # Characters above which a prompt is read, rendered and tokenised in a thread.
_OF_MESSAGE = 64  # Characters that take as long as the frame of a message.
_PIECE = 1 << 14  # Characters that are tokenised at once.
_CUT_TOKENS = 8  # Tokens that a piece may have only because the text is cut there.
_BYTES_PER_TOKEN, _LEAST_BYTES = 64, 1 << 20  # A request may have this many bytes without its images.


def _texts(request: TurnRequest) -> Iterator[str]:
    """What every template shows, without reasoning, which some hide."""
    if isinstance(request.prompt, str):
        yield request.prompt
    for message in request.messages:
        content = message.get("content")
        yield from [content] if isinstance(content, str) else [part.get("text", "") for part in parts_of(message)]
        yield from (call["function"]["arguments"] for call in message.get("tool_calls") or ())
    if request.tools:
        yield orjson.dumps(request.tools).decode()


def is_large(request: TurnRequest) -> bool:
    return sum(map(len, _texts(request))) + _OF_MESSAGE * len(request.messages) > LARGE


def check_bytes(request: TurnRequest, max_tokens: int) -> None:
    """TurnRefused when a request has more bytes than any prompt of `max_tokens` tokens needs."""
    images = sum(len(part.get("url", "")) for message in request.messages for part in parts_of(message))
    limit = max(_BYTES_PER_TOKEN * max_tokens, _LEAST_BYTES)
    if request.num_bytes - images > limit:
        raise _too_long(f"the request has {request.num_bytes - images} bytes without images, the limit is {limit}")


def check_tokens(request: TurnRequest, tokenizer: Tokenizer, max_tokens: int) -> None:
    """TurnRefused when the messages of a request have more than `max_tokens` tokens, at least one each. Blocks: call in
    a thread."""
    count = len(request.messages)
    for text in _texts(request):
        for begin in range(0, len(text), _PIECE):
            ids = tokenizer.encode(text[begin : begin + _PIECE], add_special_tokens=False)
            count += max(len(ids) - _CUT_TOKENS, 0)
            if count >= max_tokens:
                raise _too_long(f"the prompt has at least {count} tokens")


def _too_long(problem: str) -> TurnRefused:
    message = f"{problem}: gconfig.max_tokens leaves no room for an answer"
    return TurnRefused(message, code="agent.prompt_too_long", status=400)
