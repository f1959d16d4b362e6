"""The meaning of an `allocation_mode`: backends, their devices and their parallel sizes."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field

from areal.api.errors import ConfigError
from areal.api.registry import entries

# ----------------------------------------------------------------------------------------------------------------------
# The syntax of `allocation_mode`: text to parts, with errors that name the column.

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
        if len(parts) != 1 or parts[0].backend not in entries("backends"):
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
            if backend in entries("backends"):
                self._fail(f"{backend} has no attn/ffn form", "servers have sizes d, t and p only")
            attention, experts = self._hybrid()
            return Part(column, backend, name, attention, experts)
        letters = _SERVER_LETTERS if backend in entries("backends") else _TRAIN_LETTERS
        return Part(column, backend, name, self._sizes(letters, backend or "a trainer"), None)

    def _backend(self) -> str:
        known = (*entries("backends"), *TRAIN_BACKENDS)
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
            choices = ", ".join(f"{name} ({LETTERS[name]})" for name in allowed)
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
        is_next = self._symbol() == symbol
        self.place += is_next
        return is_next

    def _expect(self, symbol: str, hint: str) -> None:
        if not self._accept(symbol):
            self._fail(f"{symbol!r} is missing", hint)

    def _fail(self, problem: str, hint: str) -> None:
        raise AllocationError(self.text, self._column(), problem, hint)


__all__ = ["AllocationError", "AllocationMode", "ModelAllocation", "ParallelDims", "check_supported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Parallel sizes of one model. Expert layers distribute ep x etp x edp over the same devices."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    """Tensor size inside expert layers."""

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> int:
        """Data-parallel size of expert layers."""
        return self.world_size // (self.pp * self.etp * self.ep)

    def __str__(self) -> str:
        if self.etp == 1:
            sizes = _written(t=self.tp, p=self.pp, c=self.cp, e=self.ep)
            return f"d{self.dp}{sizes}"
        attention = _written(t=self.tp, p=self.pp, c=self.cp)
        return f"(attn:d{self.dp}{attention}|ffn:d{self.edp}{_written(t=self.etp, p=self.pp, e=self.ep)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAllocation:
    """The devices of one model: `native:d2` is two servers, `fsdp:d4` one trainer of four ranks."""

    backend: str
    parallel: ParallelDims
    name: str = ""
    shares_with: int | None = None
    """Index in `AllocationMode.allocations` of the part whose devices this part shares; None = own devices."""

    @property
    def is_inference(self) -> bool:
        return self.backend in entries("backends")

    @property
    def num_replicas(self) -> int:
        """Number of servers of an inference part; 1 for a trainer."""
        return self.parallel.dp if self.is_inference else 1

    @property
    def instance_size(self) -> int:
        """Number of devices of one server or of the trainer."""
        return self.parallel.world_size // self.num_replicas

    def __str__(self) -> str:
        name = f"[{self.name}]" if self.name else ""
        return f"{self.backend}{name}:{self.parallel}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationMode:
    """All models of a run. `str(mode)` parses back to an equal mode."""

    allocations: tuple[ModelAllocation, ...]
    evaluation: str = ""
    """`cpu` or `eval` when an evaluation process uses the servers, else empty."""

    @staticmethod
    def parse(text: str) -> AllocationMode:
        """Parse an `allocation_mode`. Raises AllocationError with column and hint."""
        syntax = read_syntax(text)
        _check_names(text, syntax)
        allocations: list[ModelAllocation] = []
        for component in syntax.components:
            anchor = len(allocations)
            for index, part in enumerate(component):
                allocation = _allocation(text, part, shares_with=anchor if index else None)
                size, expected = allocation.parallel.world_size, allocations[anchor].parallel.world_size if index else 0
                if index and size != expected:
                    problem = f"{allocation} needs {size} devices but shares {expected}"
                    raise AllocationError(text, part.column, problem, "parts joined by | need equal device counts")
                allocations.append(allocation)
        return AllocationMode(allocations=tuple(allocations), evaluation=syntax.evaluation)

    def __str__(self) -> str:
        text = ""
        for index, allocation in enumerate(self.allocations):
            joint = "" if index == 0 else "+" if allocation.shares_with is None else "|"
            text += f"{joint}{allocation}"
        return f"{text}+{self.evaluation}" if self.evaluation else text

    @property
    def inference(self) -> ModelAllocation | None:
        """The first inference part."""
        return next((allocation for allocation in self.allocations if allocation.is_inference), None)

    @property
    def train(self) -> list[ModelAllocation]:
        """The trainers, in order."""
        return [allocation for allocation in self.allocations if not allocation.is_inference]

    @property
    def num_train_ranks(self) -> int:
        """Trainer ranks; 0 for an evaluation."""
        return sum(allocation.parallel.world_size for allocation in self.train)

    @property
    def world_size(self) -> int:
        """Total number of devices; shared devices count once."""
        return sum(allocation.parallel.world_size for allocation in self.allocations if allocation.shares_with is None)


def check_supported(mode: AllocationMode) -> None:
    """Raise ConfigError unless this version can launch `mode`: servers + a trainer (RL), a trainer alone (SFT), or
    servers + eval (an evaluation without training).

    Trainers are fsdp:dMtKcLeJ or megatron with all sizes.
    Servers are native:dN, sglang:dNtK or vllm:dNtK: N servers, each of K devices.
    """
    for allocation in mode.allocations:
        _check_part(allocation)
    shape = [allocation.is_inference for allocation in mode.allocations]
    alone = all(allocation.shares_with is None for allocation in mode.allocations)
    if not alone or shape not in ([[True]] if mode.evaluation else [[True, False], [False]]):
        raise _unsupported(
            f"{mode} cannot be launched: use native:dN+fsdp:dM, sglang:dNtK+fsdp:dM, vllm:dNtK+fsdp:dM, "
            "without servers fsdp:dM, or to evaluate only native:dN+eval"
        )


def _check_part(allocation: ModelAllocation) -> None:
    """Raise ConfigError with an alternative unless this version can run the part in these sizes."""
    dims = allocation.parallel
    if allocation.backend == "native" and dims != ParallelDims(dp=dims.dp):
        other = f"sglang:d{dims.dp}t{dims.tp * dims.pp}"
        raise _unsupported(f"{allocation} splits a model, and native servers cannot: use native:d{dims.dp} or {other}")
    if allocation.is_inference and dims != ParallelDims(dp=dims.dp, tp=dims.tp):
        instead = f"{allocation.backend}:d{dims.dp}t{dims.tp * dims.pp}"
        raise _unsupported(f"{allocation} has pipeline stages (p), which do not support weight updates: use {instead}")


def _unsupported(message: str) -> ConfigError:
    return ConfigError(message, code="config.unsupported")


def _written(**sizes: int) -> str:
    return "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1)


def _check_names(text: str, syntax: Syntax) -> None:
    parts = [part for component in syntax.components for part in component]
    seen: set[str] = set()
    for part in parts:
        if part.name in seen:
            raise AllocationError(text, part.column, f"the name {part.name!r} is used twice", "use different names")
        seen |= {part.name} - {""}
    sharing = [part for component in syntax.components for part in component[1:]]
    bare = [part for part in parts if not part.backend]
    for group, problem in (
        (sharing, "a part that shares devices has no name"),
        (parts if len(syntax.components) > 2 else [], "a name is missing: with three or more parts each needs one"),
        (bare if len(bare) > 1 else [], "two trainers without backend need names"),
    ):
        for part in group:
            if not part.name:
                raise AllocationError(text, part.column, problem, "write for example fsdp[actor]:d4")


def _allocation(text: str, part: Part, shares_with: int | None) -> ModelAllocation:
    """Check the sizes of a part and convert it."""
    sizes, experts = part.sizes, part.expert_sizes
    dims = ParallelDims(
        dp=sizes.get("d", 1),
        tp=sizes.get("t", 1),
        pp=sizes.get("p", 1),
        cp=sizes.get("c", 1),
        ep=(sizes if experts is None else experts).get("e", 1),
        etp=1 if experts is None else experts.get("t", 1),
    )
    needs_megatron = experts is not None or dims.pp > 1 or dims.ep > 1
    backend = part.backend or ("megatron" if needs_megatron else "fsdp")
    if experts is not None:
        _check_experts(text, part, dims, experts)
    if backend == "fsdp" and (dims.pp > 1 or dims.etp > 1):
        hint = f"write megatron:{dims} or leave out p, and t of experts"
        raise AllocationError(text, part.column, "fsdp has no pipeline and does not split an expert", hint)
    if dims.world_size % (dims.pp * dims.etp * dims.ep):
        problem = f"{dims.world_size} devices cannot be split into p{dims.pp} x expert t{dims.etp} x e{dims.ep}"
        chosen = "e" if dims.etp == 1 else "e x t of ffn"
        raise AllocationError(text, part.column, problem, f"choose {chosen} so that it divides d x c x t")
    return ModelAllocation(backend=backend, name=part.name, parallel=dims, shares_with=shares_with)


def _check_experts(text: str, part: Part, dims: ParallelDims, experts: dict[str, int]) -> None:
    """Both halves of an attn/ffn part must cover the same devices; ffn has the p of attn, and what remains as d."""
    pipeline = experts.get("p", dims.pp)
    if pipeline != dims.pp:
        problem = f"attn has p{dims.pp} but ffn has p{pipeline}"
        raise AllocationError(text, part.column, problem, "use the same p in both")
    if (data := experts.get("d")) is None:
        return
    covered = data * dims.ep * dims.etp * pipeline
    if covered != dims.world_size:
        product = f"d{data} x e{dims.ep} x t{dims.etp} x p{pipeline}"
        problem = f"attn covers {dims.world_size} devices but ffn {product} covers {covered}"
        raise AllocationError(text, part.column, problem, "make both products equal, or leave out d of ffn")
