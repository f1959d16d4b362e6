"""A policy for tests that answers from a script, in one token per character."""

import asyncio
from collections.abc import Callable

from areal.api.data import GenerationRequest, GenerationResponse

USER, ASSISTANT, TOOL, END = 1, 2, 3, 4
_ROLES = {"user": USER, "system": USER, "assistant": ASSISTANT, "tool": TOOL}
TEMPLATE = "{% for message in messages %}<tool_call>{% endfor %}"


class CharTokenizer:
    """A token per character, and a token per role."""

    eos_token_id = END
    pad_token_id = None
    chat_template = TEMPLATE
    _marks = {USER: "<u>", ASSISTANT: "<a>", TOOL: "<t>", END: "<e>"}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        found: list[int] = []
        while text:
            mark = next((i for i, shown in self._marks.items() if text.startswith(shown)), None)
            found.append(ord(text[0]) if mark is None else mark)
            text = text[1 if mark is None else 3 :]
        return found

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        shown = {mark: "" for mark in self._marks} if skip_special_tokens else self._marks
        return "".join(shown[token] if token in self._marks else chr(token) for token in token_ids)

    def apply_chat_template(self, conversation: list[dict], *, add_generation_prompt: bool = False, **options: object):
        text = ""
        for message in conversation:
            text += self._marks[_ROLES[message["role"]]] + (message["content"] or "")
            for call in message.get("tool_calls") or ():
                arguments = call["function"]["arguments"]
                text += f'<tool_call>{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}</tool_call>'
            text += "<e>"
        return text + ("<a>" if add_generation_prompt else "")


class ScriptedEngine:
    """Answers with what `answer` makes of the text of the prompt. Implements InferenceEngine."""

    version = 3

    def __init__(self, answer: Callable[[str], str], *, gate: asyncio.Event | None = None) -> None:
        """`gate`: answers wait for it."""
        self._answer = answer
        self._gate = gate
        self._tokenizer = CharTokenizer()
        self.requests: list[GenerationRequest] = []
        self.arrived = asyncio.Event()

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        self.requests.append(request)
        self.arrived.set()
        if self._gate is not None:
            await self._gate.wait()
        text = self._answer(self._tokenizer.decode(request.input_ids))
        ids = [*self._tokenizer.encode(text), END]
        cut = ids[: request.gconfig.max_new_tokens]
        return GenerationResponse(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=cut,
            output_logprobs=[-0.5] * len(cut),
            output_versions=[self.version] * len(cut),
            stop_reason="stop" if cut == ids else "length",
        )
