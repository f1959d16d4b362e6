"""What is certain of an answer while the policy generates it, for clients that read it as a stream."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from areal.agent.tool_calls import (
    CALL_MARKERS,
    CALL_OPENINGS,
    DEFAULT_REASONING,
    HARMONY_END,
    HARMONY_MESSAGE,
    AnswerStyle,
    cleaned,
    harmony_kind,
)
from areal.agent.turns import TurnAnswer
from areal.api.data import TokenChunk

_HALF = "\ufffd"  # What a tokenizer writes for the bytes of half a character.
_OPENING_LENGTH = 4096  # Characters among which those of an opening are, with white space between them.


class TokenText:
    """The text of tokens that arrive in pieces. Each piece is decoded with the one before it, not with all of them."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_old = 0  # Tokens of the window whose text was returned.
        self._returned = ""  # Text of the window that was returned.

    def add(self, token_ids: Sequence[int]) -> str:
        """The further text, up to the last whole character."""
        self._window += token_ids
        text = self._decode(self._window)
        whole = text.rstrip(_HALF)
        if whole != text and not whole.startswith(self._returned):  # further bytes may make it whole again
            return ""
        new, self._returned = whole[len(self._returned) :], whole
        if whole == text:
            del self._window[: self._num_old]
            self._num_old, self._returned = len(self._window), self._decode(self._window)
        return new

    def rest(self) -> str:
        """What `add` has not returned: bytes at the end that are no whole character."""
        return self._decode(self._window)[len(self._returned) :]


class AnswerSplit:
    """The beginning of `split_answer` from the beginning of a text: what no later text can change.

    A call, and all after its marker, is known at the end only, as is reasoning that follows text. White space before a
    call is no part of the text.
    """

    def __init__(self, style: AnswerStyle, *, has_tools: bool, in_reasoning: bool, may_close: bool) -> None:
        """The arguments are those of `split_answer`."""
        self.text = self.reasoning = ""
        self._style = style
        self._has_tools, self._in_reasoning, self._may_close = has_tools, in_reasoning, may_close
        self._rest = ""  # Text that is not certain yet.
        self._spaces = ""  # White space after `text` that is part of it if more text follows.
        self._newlines = ""  # The same of a thought.
        self._num_thoughts = 0
        self._follows_thought: bool | None = None  # Whether the text does; None before its first character.
        self._thinks = False  # `reasoning` has text of the current thought.
        self._thought_start = 0  # Length of `reasoning` before it.
        self._markers = CALL_MARKERS.get(style.name, ()) if has_tools else ()
        if has_tools and style.name != "gpt_oss":
            self._markers = (*self._markers, (style.reasoning or DEFAULT_REASONING)[0])
        self._step = self._head if style.name == "gpt_oss" else self._begin
        self._ends_body = self._think

    def add(self, text: str) -> None:
        self._rest += text
        while self._step():
            pass

    # Each step returns whether another one follows at once.

    def _begin(self) -> bool:
        if self._style.reasoning is None:
            self._step = self._open
            return True
        start, end = self._style.reasoning
        text = self._rest.lstrip()
        if start.startswith(text) and text != start:
            return False
        if text.startswith(start):
            self._rest, self._step = text[len(start) :], self._thought
        elif self._in_reasoning:
            self._step = self._thought
        elif self._may_close:
            places = [place for marker in (start, end) if (place := self._rest.find(marker)) >= 0]
            if not places:
                return False
            self._step = self._thought if self._rest.startswith(end, min(places)) else self._open
        else:
            self._step = self._open
        return True

    def _thought(self) -> bool:
        assert self._style.reasoning is not None
        before, marker, after = self._rest.partition(self._style.reasoning[1])
        if not marker:
            self._think(self._certain())
            return False
        self._think(before)
        self._rest, self._step = after, self._open
        return True

    def _open(self) -> bool:
        """The text may be a call as a whole."""
        squeezed = "".join(self._rest[:_OPENING_LENGTH].split())
        for opening in CALL_OPENINGS.get(self._style.name, ()) if self._has_tools else ():
            if opening.startswith(squeezed) or squeezed.startswith(opening):
                return False
        self._step = self._speak
        return True

    def _speak(self) -> bool:
        place = min((at for marker in self._markers if (at := self._rest.find(marker)) >= 0), default=-1)
        if place < 0:
            self._say(self._certain())
        else:
            self._say(self._rest[:place])
            self._step = self._wait
        return False

    def _wait(self) -> bool:
        self._rest = ""
        return False

    def _head(self) -> bool:
        head, marker, after = self._rest.partition(HARMONY_MESSAGE)
        if not marker:
            return False
        kind = harmony_kind(head)
        self._rest, self._step = after, self._wait if kind == "call" else self._body
        self._ends_body = self._think if kind == "thought" else self._say
        return True

    def _body(self) -> bool:
        end = HARMONY_END.search(self._rest)
        self._ends_body(self._rest[: end.start()] if end else self._certain())
        if end:
            self._rest, self._step, self._thinks = self._rest[end.end() :], self._head, False
        return end is not None

    def _certain(self) -> str:
        """Takes the text before what may be the beginning of a marker."""
        text, style = self._rest, self._style
        starts = range(max(len(text) - style.longest, 0), len(text))
        place = next((at for at in starts if text[at:] in style.beginnings), len(text))
        if style.special_tokens is not None:
            place = max(
                place, *(match.end() for match in style.special_tokens.finditer(text) if match.start() < place), 0
            )
        self._rest = text[place:]
        return text[:place]

    def _think(self, text: str) -> None:
        if not text:
            return
        if not self._thinks:
            self.reasoning += "\n" if self._num_thoughts else ""
            self._thinks, self._newlines, self._thought_start = True, "", len(self.reasoning)
            self._num_thoughts += 1
        text = self._newlines + cleaned(text, self._style)
        if len(self.reasoning) == self._thought_start:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        self.reasoning, self._newlines = self.reasoning + body, text[len(body) :]

    def _say(self, text: str) -> None:
        text = self._spaces + cleaned(text, self._style)
        if text and self._follows_thought is None:
            self._follows_thought = self._num_thoughts > 0
        if self._follows_thought and not self.text:
            text = text.lstrip("\n")
        body = text.rstrip() if self._has_tools else text
        self.text, self._spaces = self.text + body, text[len(body) :]


class StreamedAnswer:
    """One answer that is generated: `answer` has what is certain of it, and no finish reason."""

    def __init__(
        self,
        answer: TurnAnswer,
        split: AnswerSplit,
        decode: Callable[[list[int]], str],
        stop_ids: Sequence[int],
        forced: Sequence[int],
    ) -> None:
        """`answer`: without text and tokens. `stop_ids`: tokens that are no text at the end. `forced`: tokens that the
        answer begins with."""
        self.answer = answer
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._split = split
        self._text = TokenText(decode)
        self._stop_ids = stop_ids
        self._pending = list(forced)  # Tokens whose text is not known yet.
        self._raw: list[str] = []

    def add(self, chunk: TokenChunk) -> None:
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        known = [*self._pending, *chunk.token_ids]
        self._pending = known[-1:] if known and known[-1] in self._stop_ids else []
        self._raw.append(self._text.add(known[: len(known) - len(self._pending)]))
        self._split.add(self._raw[-1])
        self.answer = replace(
            self.answer,
            text=self._split.text,
            reasoning=self._split.reasoning,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
        )

    def raw_text(self) -> str:
        """All text with its markers and special tokens, of an answer that is whole."""
        return "".join([*self._raw, self._text.rest()])
