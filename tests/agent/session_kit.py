"""A session server on loopback over sessions with scripted answers."""

import asyncio
import contextlib

from areal.agent.directory import OpenedSession
from areal.agent.rehearsal import WholeStream
from areal.agent.session_server import SessionServer
from areal.agent.turns import ToolCall, TurnAnswer, TurnRefused
from tests.rollout.http_kit import listening
from tests.run_token import TOKEN

KEY, OTHER_KEY = "key-of-a-session", "key-of-another-session"


def answer(text="four", *, reasoning="", calls=(), turn_id="turn-1", finish_reason=None, num_tokens=3):
    return TurnAnswer(
        turn_id=turn_id,
        text=text,
        reasoning=reasoning,
        tool_calls=tuple(calls),
        finish_reason=finish_reason or ("tool_calls" if calls else "stop"),
        num_prompt_tokens=7,
        num_cached_tokens=4,
        token_ids=tuple(range(num_tokens)),
        logprobs=tuple(-0.5 * (index + 1) for index in range(num_tokens)),
    )


def call(name="add", arguments='{"a": 2, "b": 2}', call_id="call-1"):
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def in_thread(function):
    """The result of a function that uses a synchronous client; it runs from now on."""
    return asyncio.ensure_future(asyncio.to_thread(function))


class ScriptedSession:
    """Gives its answers in their order, the last one for all further turns. A TurnRefused is raised."""

    def __init__(self, *script):
        self.script = list(script) or [answer()]
        self.requests, self.delivered_answers = [], []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked, self.answered = asyncio.Event(), asyncio.Event()

    async def answer(self, request):
        self.requests.append(request)
        self.asked.set()
        await self.may_answer.wait()
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.answered.set()
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, tuple) else (step,) * request.num_answers

    def stream(self, request):
        return WholeStream(self.answer(request))

    def delivered(self, answers):
        self.delivered_answers.append(tuple(answers))

    async def count_tokens(self, request):
        self.requests.append(request)
        return 7


class ScriptedDirectory:
    def __init__(self, **sessions):
        self.sessions = sessions
        self.opened, self.rewards = [], []

    def find(self, key):
        key.encode()  # a real directory hashes it
        return self.sessions.get(key)

    async def open(self, wish):
        self.opened.append(wish)
        if wish.group == "full":
            raise TurnRefused("full", code="agent.full", status=429, retry_after_s=2.5)
        self.sessions["new"] = ScriptedSession()
        return OpenedSession(key="new", session_id="s1", timeout_s=60.0)

    async def finish(self, key, reward):
        if key not in self.sessions:
            raise TurnRefused("unknown", code="agent.unknown_session", status=404)
        self.rewards.append((key, reward))


@contextlib.asynccontextmanager
async def served(*script, session=None, **options):
    """(address, session with KEY, directory) of a server on loopback. `session`: None = a scripted one."""
    session = session or ScriptedSession(*script)
    directory = ScriptedDirectory(**{KEY: session, OTHER_KEY: ScriptedSession()})
    server = SessionServer(directory, admin_token=TOKEN, token_text=lambda token_id: f"t{token_id}", **options)
    async with listening(server.application(), auto_decompress=False, access_log=None) as address:
        yield address, session, directory
