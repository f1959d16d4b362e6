"""The syntax of `allocation_mode`: text to parts, with errors that name the column."""

import difflib
import re
from dataclasses import dataclass, field

from areal.api.errors import ConfigError

INFERENCE_BACKENDS = ("native", "sglang", "vllm")
TRAIN_BACKENDS = ("fsdp", "megatron")
LETTERS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}

_SERVER_LETTERS, _TRAIN_LETTERS, _ATTENTION_LETTERS, _EXPERT_LETTERS = "dtp", "dtpce", "dtpc", "dtpe"
_TOKEN = re.compile(r"\s*(?:(?P<word>\w+)|(?P<symbol>[:+|\[\]().]))", re.ASCII)


class AllocationError(ConfigError):
    """An allocation_mode with invalid syntax or sizes; the last line of the message marks the column."""

    code = "allocation.invalid"

    def __init__(self, text: str, column: int, problem: str, hint: str) -> None:
        self.column = column  # counted from 1
        self.summary = f"column {column} of {text!r}: {problem}; {hint}"
        shown = re.sub(r"\s", " ", text)
        mark = f"\n  {shown}\n  {' ' * (column - 1)}^" if len(text) <= 200 else ""
        super().__init__(self.summary + mark)


@dataclass(frozen=True, slots=True)
class Part:
    """One allocation as written: `backend[name]:sizes`; backend and name can be empty."""

    column: int
    backend: str
    name: str
    sizes: dict[str, int]
    expert_sizes: dict[str, int] | None
    """Sizes of `ffn:`; None when the part does not have the attn/ffn form."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """A complete mode: components joined by +, each a list of parts that share devices."""

    components: list[list[Part]]
    evaluation: str = ""
    """`cpu` or `eval` at the end, else empty."""


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    column: int
    is_word: bool


def read_syntax(text: str) -> Syntax:
    """Parse `text`. Raises AllocationError."""
    return _Parser(text, _tokens(text)).mode()


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    place = 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            column = len(text) - len(text[place:].lstrip()) + 1
            problem = f"unexpected character {text[column - 1]!r}"
            raise AllocationError(text, column, problem, "write parts like native:d2 joined by + or |")
        group = "word" if match["word"] else "symbol"
        tokens.append(_Token(match[group], match.start(group) + 1, group == "word"))
        place = match.end()
    return tokens


@dataclass
class _Parser:
    text: str
    tokens: list[_Token]
    place: int = field(default=0)

    def mode(self) -> Syntax:
        if not self.tokens:
            raise AllocationError(self.text, 1, "the mode is empty", "write for example native:d1+fsdp:d1")
        components = [self._component()]
        while self._accept("+"):
            if self._word() in ("cpu", "eval") and self._word(1) is None and self._symbol(1) == "":
                return self._evaluation(components)
            components.append(self._component())
        if self.place < len(self.tokens):
            self._fail(f"unexpected {self.tokens[self.place].text!r}", "join parts by + (own devices) or | (shared)")
        return Syntax(components)

    def _evaluation(self, components: list[list[Part]]) -> Syntax:
        parts = [part for component in components for part in component]
        if len(parts) != 1 or parts[0].backend not in INFERENCE_BACKENDS:
            self._fail(f"{self._word()!r} needs exactly one inference part before it", "write native:d2+eval")
        return Syntax(components, evaluation=self._take())

    def _component(self) -> list[Part]:
        parts = [self._part()]
        while self._accept("|"):
            parts.append(self._part())
        return parts

    def _part(self) -> Part:
        column = self._column()
        backend = name = ""
        if self._word() is not None and self._word() != "attn" and self._symbol(1) in (":", "[", "."):
            backend = self._backend()
        if self._accept("["):
            name = self._name()
            self._expect("]", "close the name with ]")
        if backend or name:
            self._expect(":", "write sizes after a colon, for example fsdp:d4")
        if self._symbol() == "(" or (self._word() == "attn" and self._symbol(1) == ":"):
            if name:
                self._fail("an attn/ffn part cannot have a name", "remove the [name]")
            if backend in INFERENCE_BACKENDS:
                self._fail(f"{backend} has no attn/ffn form", "servers have sizes d, t and p only")
            attention, experts = self._hybrid()
            return Part(column, backend, name, attention, experts)
        letters = _SERVER_LETTERS if backend in INFERENCE_BACKENDS else _TRAIN_LETTERS
        return Part(column, backend, name, self._sizes(letters, backend or "a trainer"), None)

    def _backend(self) -> str:
        known = INFERENCE_BACKENDS + TRAIN_BACKENDS
        word = self._word() or ""
        if word not in known:
            guess = difflib.get_close_matches(word.lower(), known, n=1)
            self._fail(f"unknown backend {word!r}", f"write {guess[0]}" if guess else f"use one of {', '.join(known)}")
        self.place += 1
        if self._symbol() == ".":
            self._fail("the dotted form is not supported", f"write {word}: instead of {word}.")
        return word

    def _name(self) -> str:
        word = self._word()
        if word is None or word[0].isdigit():
            self._fail("a name is missing", "names start with a letter or _, for example [actor]")
        return self._take()

    def _hybrid(self) -> tuple[dict[str, int], dict[str, int]]:
        in_parentheses = self._accept("(")
        self._keyword("attn")
        attention = self._sizes(_ATTENTION_LETTERS, "attn")
        self._expect("|", "write the expert sizes: |ffn:e4")
        self._keyword("ffn")
        experts = self._sizes(_EXPERT_LETTERS, "ffn")
        if in_parentheses:
            self._expect(")", "close the parenthesis")
        return attention, experts

    def _keyword(self, word: str) -> None:
        if self._word() != word:
            self._fail(f"{word!r} is missing", "write (attn:d2t2|ffn:d1e4)")
        self.place += 1
        self._expect(":", f"write {word}: followed by its sizes")

    def _sizes(self, allowed: str, owner: str) -> dict[str, int]:
        """One or more letter-number pairs, with or without blanks between them."""
        characters: list[tuple[str, int]] = []
        while (word := self._word()) is not None and self._symbol(1) not in (":", "["):
            characters += [(letter, self._column() + k) for k, letter in enumerate(word)]
            self.place += 1
        if not characters:
            self._fail("sizes are missing", "write for example d4")
        sizes: dict[str, int] = {}
        place = 0
        while place < len(characters):
            letter, column = characters[place]
            self._check_letter(letter, column, allowed, owner, sizes)
            digits = ""
            while (place := place + 1) < len(characters) and characters[place][0].isdigit():
                digits += characters[place][0]
            if not digits or digits[0] == "0" or len(digits) > 6:
                problem = f"{letter}{digits} is not a size" if digits else f"a number is missing after {letter!r}"
                hint = f"write {letter}1 to {letter}999999, without a leading zero"
                raise AllocationError(self.text, column, problem, hint)
            sizes[letter] = int(digits)
        return sizes

    def _check_letter(self, letter: str, column: int, allowed: str, owner: str, seen: dict[str, int]) -> None:
        if letter in seen:
            problem, hint = f"{letter!r} ({LETTERS[letter]}) is repeated", "write each size once"
        elif letter in allowed:
            return
        elif letter.lower() in LETTERS and letter != letter.lower():
            problem, hint = f"unknown letter {letter!r}", f"write {letter.lower()}"
        elif letter in LETTERS:
            problem, hint = f"{owner} has no {LETTERS[letter]} size", f"use only {', '.join(allowed)}"
        else:
            choices = ", ".join(f"{one} ({LETTERS[one]})" for one in allowed)
            problem, hint = f"{letter!r} is not a size of {owner}", f"sizes are {choices}"
        raise AllocationError(self.text, column, problem, hint)

    def _word(self, ahead: int = 0) -> str | None:
        place = self.place + ahead
        return self.tokens[place].text if place < len(self.tokens) and self.tokens[place].is_word else None

    def _symbol(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self.tokens[place].text if place < len(self.tokens) and not self.tokens[place].is_word else ""

    def _column(self) -> int:
        return self.tokens[self.place].column if self.place < len(self.tokens) else len(self.text) + 1

    def _take(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1].text

    def _accept(self, symbol: str) -> bool:
        found = self._symbol() == symbol
        self.place += found
        return found

    def _expect(self, symbol: str, hint: str) -> None:
        if not self._accept(symbol):
            self._fail(f"{symbol!r} is missing", hint)

    def _fail(self, problem: str, hint: str) -> None:
        raise AllocationError(self.text, self._column(), problem, hint)
