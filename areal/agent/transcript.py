"""The transcript of a session: its turns as a tree of tokens, and the prompt of the next turn from its messages."""

import itertools
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from areal.agent.bridge import BridgeGap, CallStart, PromptBridge
from areal.agent.images import DialogueImages
from areal.agent.token_tree import EqualSpan, TokenNode, TokenTree, align, path_to, tokens_to
from areal.agent.turns import Message, TurnRefused, TurnRequest
from areal.api.columns import joined, packed_ids
from areal.api.data import GenerationResponse
from areal.api.images import ImageRef

OnDrift = Literal["fork", "realign", "reject"]
Encode = Callable[[str, bool], list[int]]
"""Text, and whether the tokenizer adds its special tokens -> token ids."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """The prompt of a turn, and where the transcript continues with it. Nothing is stored until an answer is added."""

    token_ids: Sequence[int]
    """All tokens of the prompt."""
    after: TokenNode
    """The prompt extends the path of this node ..."""
    new_token_ids: Sequence[int]
    """... by these fixed tokens."""
    number: int
    """Different for each context of a transcript."""
    is_fork: bool = False
    """The prompt extends no earlier answer although there is one."""
    is_drift: bool = False
    """The messages extend an earlier answer, the rendered tokens do not."""
    realigned: "Realignment | None" = None
    num_forced: int = 0
    """Tokens at the end of the prompt that the answer begins with: they are delivered with it, and not trained."""
    keys: tuple[Hashable, ...] = ()
    """The tools and each message of the request, in a form that can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Realignment:
    """The path of an answer is overwritten by a new rendering."""

    turn_id: str
    spans: list[EqualSpan]


@dataclass(slots=True, kw_only=True)
class Turn:
    """One answer in a transcript."""

    turn_id: str
    number: int
    """Counts the contexts that were answered, from 0: answers to one context have one number."""
    node: TokenNode
    """The end of its tokens."""
    finished: bool
    """False if a length limit cut it."""
    num_tokens: int
    """Generated tokens, also those that a realignment overwrote."""
    message: Message
    """As delivered to the client."""
    is_overwritten: bool = False
    """A realignment changed its path, so that bridges do not extend it."""


@dataclass(slots=True)
class _Place:
    """A position in the tree of delivered messages."""

    turn_ids: list[str] = field(default_factory=list[str])
    """The answers whose delivered message is the last one."""
    next: dict[Hashable, "_Place"] = field(default_factory=dict[Hashable, "_Place"])


class Transcript:
    """The turns of one session. What the policy generated is never tokenised again.

    The next prompt extends the answer whose delivered messages begin the request; the bridge gives the tokens between.
    Where it cannot, the request is rendered in full, and the prefix that it shares with earlier tokens is stored once.
    """

    def __init__(
        self,
        bridge: PromptBridge,
        *,
        on_drift: OnDrift = "fork",
        max_tokens: int | None = None,
        encode: Encode | None = None,
        images: DialogueImages | None = None,
    ) -> None:
        """`on_drift`: what happens when messages extend an answer and tokens do not. fork: a new branch from the full
        rendering; both branches are trained. realign: a difference of at most 64 tokens overwrites the branch, and the
        overwritten tokens are not trained; a longer one forks. reject: the turn is refused. `max_tokens`: limit of a
        prompt and its answer; None = none. `encode`: tokenises plain prompts; None = only messages and token ids.
        `images`: of a policy that takes images.
        """
        self.images = images
        self._bridge = bridge
        self._on_drift: OnDrift = on_drift
        self._max_tokens = max_tokens
        self._encode = encode
        self._texts: dict[str, str] = {}  # plain prompt + answer -> turn id
        self._start = _Place()
        self._numbers: dict[int, int] = {}  # of contexts that have an answer
        self._next_context = itertools.count()
        self.tree = TokenTree()
        self.turns: dict[str, Turn] = {}
        """By turn id, in the order in which they were added."""
        self.num_forks = 0
        self.num_drifts = 0

    @property
    def num_turns(self) -> int:
        """Number of contexts that have an answer."""
        return len(self._numbers)

    @property
    def num_overwritten(self) -> int:
        """Generated tokens that realignments overwrote: they are not trained."""
        return sum(turn.num_tokens for turn in self.turns.values()) - self.tree.num_generated

    def context(self, request: TurnRequest, forced: Sequence[int] = ()) -> Context:
        """The prompt of a request. Changes nothing. TurnRefused on drift with `reject`, and when it is too long.

        `forced`: tokens that the answer begins with.
        """
        context = self._plain_context(request.prompt) if request.prompt is not None else self._chat_context(request)
        if forced:
            token_ids, new_ids = [*context.token_ids, *forced], [*context.new_token_ids, *forced]
            context = replace(context, token_ids=token_ids, new_token_ids=new_ids, num_forced=len(forced))
        if self._max_tokens is not None and len(context.token_ids) >= self._max_tokens:
            raise TurnRefused(
                f"the prompt has {len(context.token_ids)} tokens, and a prompt with its answer may have "
                f"{self._max_tokens}",
                code="agent.prompt_too_long",
                status=400,
            )
        return context

    def call_start(self, request: TurnRequest) -> CallStart | None:
        """What an answer to a request begins with that calls the required tool; None: it cannot be forced."""
        name = "" if request.tool_choice == "required" else request.tool_choice
        return self._bridge.call_start(request.messages, request.tools, name)

    def add_answer(self, context: Context, turn_id: str, response: GenerationResponse, message: Message) -> None:
        """Store an answer to a context; several answers to one context are several leaves.

        `turn_id`: not empty, unique in the transcript. `message`: the assistant message as delivered to the client.
        """
        if context.number not in self._numbers:
            self._numbers[context.number] = len(self._numbers)
            self.num_forks += context.is_fork
            self.num_drifts += context.is_drift
        node = self.tree.add_generated(
            self._end_of(context),
            turn_id,
            response.output_ids,
            response.output_logprobs,
            response.output_versions,
            temperature=response.temperature,
            experts=response.routed_experts,
        )
        self.turns[turn_id] = Turn(
            turn_id=turn_id,
            number=self._numbers[context.number],
            node=node,
            finished=response.stop_reason == "stop",
            num_tokens=len(response.output_ids),
            message=message,
        )
        if context.keys and isinstance(first := context.keys[0], tuple) and first[0] == "text":
            self._texts[first[1] + (message.get("content") or "")] = turn_id
            return
        place = self._start
        for key in (*context.keys, message_key(message)):
            place = place.next.setdefault(key, _Place())
        place.turn_ids.append(turn_id)

    def _end_of(self, context: Context) -> TokenNode:
        """The node that ends the tokens of a context."""
        if context.realigned is not None:
            turn = self.turns[context.realigned.turn_id]
            end = self.tree.overwrite(turn.node, context.realigned.spans, context.token_ids)
            if end is not None:
                self._move_turns(path_to(turn.node), path_to(end))
                return end
        return self.tree.add_fixed(context.after, context.new_token_ids)

    def _move_turns(self, old: list[TokenNode], new: list[TokenNode]) -> None:
        """After a path was overwritten: its turns end where their last tokens are now."""
        kept = {id(node) for node in new}
        ends = {node.turn_id: node for node in new if node.is_generated}
        for turn_id in {node.turn_id for node in old if node.is_generated and id(node) not in kept}:
            turn = self.turns[turn_id]
            turn.is_overwritten = True
            turn.node = ends.get(turn_id, turn.node)

    def _plain_context(self, prompt: str | tuple[int, ...]) -> Context:
        """The context of a plain prompt. Text that begins with a recorded prompt and answer extends them."""
        if not isinstance(prompt, str):
            return self._new_context(self.tree.root, list(prompt), ("ids", prompt))
        if self._encode is None:
            raise TurnRefused(
                "this session takes messages or token ids, no text", code="agent.plain_prompt", status=400
            )
        known = max((text for text in self._texts if prompt.startswith(text)), key=len, default=None)
        if known is None:
            return self._new_context(self.tree.root, self._encode(prompt, True), ("text", prompt))
        rest = self._encode(prompt[len(known) :], False)
        return self._new_context(self.turns[self._texts[known]].node, rest, ("text", prompt))

    def _chat_context(self, request: TurnRequest) -> Context:
        keys = (_frozen(request.tools), *(message_key(one) for one in request.messages))
        found, changed, num_messages = self._deepest_answer(keys)
        after, new_ids = self._rendered(request, found, num_messages)
        if changed is None and (found is None or found.is_overwritten or after is not self.tree.root):
            return self._new_context(after, new_ids, *keys)
        expected = changed or found
        assert expected is not None
        old, rendered = tokens_to(expected.node), tokens_to(after) + new_ids
        if rendered[: len(old)] == old:
            return self._new_context(expected.node, rendered[len(old) :], *keys)
        return self._drifted(expected, after, new_ids, keys)

    def _deepest_answer(self, keys: Sequence[Hashable]) -> tuple[Turn | None, Turn | None, int]:
        """The last answer that the request extends, the one after it that the client changed, and the number of
        messages up to and with the first."""
        place, found, num_messages = self._start, None, 0
        for index, key in enumerate(keys):
            following = place.next.get(key)
            if following is None:
                answers = [ids[-1] for other in place.next.values() if (ids := other.turn_ids)]
                is_changed = index > 0 and bool(answers) and _is_answer(key)
                return found, self.turns[answers[-1]] if is_changed else None, num_messages
            place = following
            if place.turn_ids and index + 1 < len(keys):
                found, num_messages = self.turns[place.turn_ids[0]], index
        return found, None, num_messages

    def _rendered(self, request: TurnRequest, turn: Turn | None, num_messages: int) -> tuple[TokenNode, list[int]]:
        """The tokens of a request after those of an answer that it extends; after no tokens where no bridge does it."""
        messages = request.messages
        if turn is not None and not turn.is_overwritten:
            bridge = self._bridge.extension(messages[:num_messages], messages[num_messages:], request.tools)
            if not isinstance(bridge, BridgeGap):
                bridge = self._placed(bridge, messages[num_messages:])
                last = turn.node.token_ids[-1:]
                if not last or last[0] not in self._bridge.stop_token_ids:
                    return turn.node, bridge
                if last == bridge[:1]:
                    return turn.node, bridge[1:]
        return self.tree.root, self._placed(self._bridge.prompt(messages, request.tools), messages)

    def _placed(self, token_ids: list[int], messages: Sequence[Message]) -> list[int]:
        return token_ids if self.images is None else self.images.placed(token_ids, messages)

    def plain(self, token_ids: Sequence[int]) -> tuple[Sequence[int], list[ImageRef]]:
        """Tokens of the tree as the policy sees them, and the images in them."""
        return (token_ids, []) if self.images is None else self.images.plain(token_ids)

    def _new_context(
        self,
        after: TokenNode,
        new_ids: Sequence[int],
        *keys: Hashable,
        is_drift: bool = False,
        realigned: Realignment | None = None,
    ) -> Context:
        is_fork = bool(self.turns) and after is self.tree.root and realigned is None
        if is_fork:
            whole = {id(node) for node in self.tree.match(after, new_ids)}
            is_fork = not any(id(turn.node) in whole for turn in self.turns.values())
        return Context(
            token_ids=joined("i", (tokens_to(after), new_ids)),
            after=after,
            new_token_ids=packed_ids(new_ids),
            number=next(self._next_context),
            is_fork=is_fork,
            is_drift=is_drift,
            realigned=realigned,
            keys=keys,
        )

    def _drifted(self, turn: Turn, after: TokenNode, new_ids: Sequence[int], keys: tuple[Hashable, ...]) -> Context:
        """The context of a request whose messages extend `turn` and whose tokens do not."""
        if self._on_drift == "reject":
            text = "the history is rendered differently from the tokens that the policy received and generated"
            raise TurnRefused(f"{text}, and agent.on_drift is reject", code="agent.drift", status=400)
        realigned = None
        if self._on_drift == "realign" and not turn.is_overwritten:
            spans = align(tokens_to(turn.node), tokens_to(after) + new_ids)
            realigned = None if spans is None else Realignment(turn_id=turn.turn_id, spans=spans)
        return self._new_context(after, new_ids, *keys, is_drift=True, realigned=realigned)


_PLAIN = {"role", "content"}


def message_key(message: Message) -> Hashable:
    """What must be equal in two messages so that they are the same message: absent, None and empty fields are equal,
    and arguments of tool calls are compared as JSON."""
    content = message.get("content") or ""
    content = _frozen(content) if isinstance(content, list) else content
    if message.keys() <= _PLAIN:
        return message.get("role"), content, (), ""
    calls = tuple(
        (call.get("id"), call["function"]["name"], _arguments(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    )
    others = {name: value for name, value in message.items() if name not in ("role", "content", "tool_calls") and value}
    return message.get("role"), content, calls, _frozen(others) if others else ""


def _is_answer(key: Hashable) -> bool:
    return isinstance(key, tuple) and bool(key) and key[0] == "assistant"


def _arguments(value: Any) -> str:
    """Arguments of a tool call, given as a mapping or as JSON text, in one spelling."""
    if not isinstance(value, str):
        return _frozen(value)
    try:
        return _frozen(json.loads(value))
    except ValueError:
        return value


def _frozen(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
