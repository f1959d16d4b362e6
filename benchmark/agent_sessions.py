"""The cost of a turn in the session server, over HTTP on loopback, with a scripted policy that answers at once.

    python benchmark/agent_sessions.py [--sessions 500] [--turns 8] [--per-second 200]

Another process has one connection for each session and sends the turns at a steady rate. One line of JSON:
`us_per_turn` (CPU time of the server), `p99_ms` (of the server's time from the head of a request to its whole reply),
`round_trip_p99_ms` (as the client sees it, with its own time), `idle_loop_lag_p99_ms` (how late a loop that does
nothing is meanwhile: on a busy machine the times above contain it), and for 8 and 128 turns the CPU time of rendering
and tokenising the whole history in each turn, over that of a session's way to the same tokens.

    python benchmark/agent_sessions.py --history [--dialogues 8] [--turns 16] [--versus dc162d8a] [--rounds 5]

Dialogues with a native server of a random model of 1M parameters in float32, all at once over HTTP. A turn adds 200
tokens to a dialogue: the answer before it, of 40 tokens, and 160 others. `prefilled_ratio`: tokens that the server
computed as prompts, over those that the turns added; `first_turn_ms`, `last_turn_ms`: from the requests of a turn to
its last answer; `equal_answers`: the share of those with the same tokens and the same bits of log-probabilities when
the server's cache is flushed before each turn. With --versus the same for another commit, in turn; the median of the
rounds counts.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from inference_throughput import build_checkpoint
from loop_timer import idle_loop
from other_tree import compared

from areal.agent.bridge import TemplateBridge, template_bridge
from areal.agent.dialects import chat_completions
from areal.agent.dialects.dialect import Sent
from areal.agent.directory import Sessions
from areal.agent.session import Session, SessionLimits, SessionSetup
from areal.agent.session_server import SessionServer
from areal.agent.tool_calls import style_of
from areal.agent.transcript import Transcript
from areal.api.config import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse
from areal.api.engine import InferenceEngine
from areal.data.tiny_model import template_tokenizer
from areal.rollout.controller_process import collecting_cycles

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The result of this step is forty-two, and the next step is to look it up. "


class InstantPolicy(InferenceEngine):
    """Answers at once."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    @property
    def version(self) -> int:
        return 0

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        size = len(self._token_ids)
        return GenerationResponse(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=self._token_ids,
            output_logprobs=[-1.0] * size,
            output_versions=[0] * size,
            stop_reason="stop",
        )


class Client:
    """A session and the history that its agent sends."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.messages = [{"role": "user", "content": TEXT}]

    async def turn(self) -> None:
        """One turn without HTTP."""
        body = orjson.loads(orjson.dumps({"model": "policy", "messages": self.messages}))
        asked = chat_completions.DIALECT.parse(body)
        answers = await self.session.answer(replace(asked.turn, fingerprint=str(len(self.messages))))
        orjson.dumps(chat_completions.DIALECT.reply(asked, answers, Sent(created_s=0, token_text=str)))
        self.session.delivered(answers)
        self.messages += [{"role": "assistant", "content": answers[0].text}, {"role": "user", "content": TEXT}]


def make(num_sessions: int) -> tuple[list[Client], TemplateBridge]:
    tokenizer = template_tokenizer(TEMPLATE)
    bridge = template_bridge(tokenizer)
    settings = GenerationHyperparameters(
        max_new_tokens=256, max_tokens=1 << 20, stop_token_ids=sorted(bridge.stop_token_ids)
    )
    setup = SessionSetup(
        tokenizer=tokenizer,
        settings=settings,
        limits=SessionLimits(),
        sampling="client",
        new_transcript=lambda: Transcript(bridge),
        style=style_of("hermes", TEMPLATE),
    )
    ids = tokenizer.encode(f"{TEXT}<|im_end|>", add_special_tokens=False)
    policy = InstantPolicy(ids)
    return [Client(Session(f"{number:08x}", setup, policy)) for number in range(num_sessions)], bridge


async def compare(turns: int, sessions: int) -> float:
    """CPU time of rendering and tokenising the whole history in each turn, over that of a session's way to the same
    tokens, in sessions of `turns` turns. The first session only warms up."""
    clients, bridge = make(sessions + 1)
    spent = {"session": 0.0, "again": 0.0}

    def timed(name: str, function: Callable[..., Any], *args: Any) -> Any:
        began = time.process_time()
        result = function(*args)
        spent[name] += time.process_time() - began
        return result

    for number, client in enumerate(clients):
        if number == 1:
            spent.update(session=0.0, again=0.0)
        transcript = client.session.transcript
        transcript.context = partial(timed, "session", transcript.context)  # type: ignore[method-assign]
        for _ in range(turns):
            timed("again", bridge.prompt, client.messages, ())
            await client.turn()
    return spent["again"] / spent["session"]


class Clock:
    """Seconds of each request in the server."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @web.middleware
    async def timed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.perf_counter()
        try:
            return await handler(request)
        finally:
            self.seconds.append(time.perf_counter() - began)


async def measure(num_sessions: int, turns: int, per_s: float) -> dict[str, float]:
    clients, _ = make(num_sessions)
    directory, clock = Sessions(), Clock()
    keys = [directory.add(client.session).key for client in clients]
    server = SessionServer(directory, admin_token="benchmark", token_text=str)
    app = server.application()
    app.middlewares.insert(0, clock.timed)
    runner = web.AppRunner(app, access_log=None, logger=logging.getLogger("benchmark"), handler_cancellation=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    wish = {"url": site.name, "keys": keys, "turns": turns}
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with idle_loop() as idle_ms:
        cpu_s = time.process_time()
        output, _ = await process.communicate(orjson.dumps(wish | {"per_s": per_s}))
        cpu_s = time.process_time() - cpu_s
    await runner.cleanup()
    num = len(clock.seconds)
    if num != num_sessions * turns or process.returncode:
        raise SystemExit(f"{num} of {num_sessions * turns} turns; the client ended with {process.returncode}")
    return {
        "sessions": num_sessions,
        "turns": num,
        "us_per_turn": round(cpu_s / num * 1e6, 1),
        "p50_ms": p_ms(clock.seconds, 0.5),
        "p99_ms": p_ms(clock.seconds, 0.99),
        "idle_loop_lag_p99_ms": round(idle_ms[0], 3),
        **orjson.loads(output),
        "ratio_8_turns": round(await compare(8, 32), 2),
        "ratio_128_turns": round(await compare(128, 2), 2),
    }


def p_ms(seconds: list[float], share: float) -> float:
    """A percentile, in milliseconds."""
    return round(sorted(seconds)[int(share * len(seconds))] * 1e3, 3)


async def send_turns(url: str, keys: list[str], turns: int, per_s: float) -> dict[str, float]:
    """The client: `turns` turns of each session at a steady rate of all together, each over its own connection."""
    seconds: list[float] = []
    messages = [[{"role": "user", "content": TEXT}] for _ in keys]
    async with AsyncExitStack() as stack:
        https = [await stack.enter_async_context(aiohttp.ClientSession()) for _ in keys]

        async def turn(number: int) -> None:
            body = orjson.dumps({"model": "policy", "messages": messages[number]})
            headers = {"Authorization": f"Bearer {keys[number]}", "Content-Type": "application/json"}
            began_s = time.perf_counter()
            async with https[number].post(f"{url}/v1/chat/completions", data=body, headers=headers) as got:
                reply = await got.read()
            seconds.append(time.perf_counter() - began_s)
            message = orjson.loads(reply)["choices"][0]["message"]
            messages[number] += [message, {"role": "user", "content": TEXT}]

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(turns * len(keys)):
                await asyncio.sleep(max(began_s + number / per_s - time.perf_counter(), 0))
                group.create_task(turn(number % len(keys)))
    return {"per_second": round(len(seconds) / (time.perf_counter() - began_s), 1)} | {
        "round_trip_p99_ms": p_ms(seconds, 0.99)
    }


_ANSWER, _ADDED = 40, 200
"""Tokens of an answer, and of all that a turn adds."""


@contextlib.asynccontextmanager
async def native_server(context: int) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """The address of a server in another process, and a client of it."""
    token = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory() as folder:
        path = build_checkpoint(Path(folder), context)
        argv = ["-m", "areal.inference.server", "--model-path", str(path), "--dtype", "float32", "--device", "cpu"]
        argv += ["--num-threads", "1", "--max-total-tokens", str(16 * context), "--log-level", "error"]
        environment = {**os.environ, "AREAL_SERVER_TOKEN": token}
        process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(600)) as http:
            yield address, http
        process.terminate()
        await process.wait()


async def history(dialogues: int, turns: int) -> dict[str, float]:
    """The figures of one round in this process."""
    context = turns * _ADDED + _ANSWER + 1

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with http.post(address + path, data=orjson.dumps(body)) as answered:
            return orjson.loads(await answered.read())

    async def answer(number: int, turn: int, prompt: list[int]) -> list[Any]:
        sampling = {"max_new_tokens": _ANSWER, "ignore_eos": True, "sampling_seed": 1000 * number + turn}
        body = {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling}
        return (await post("/generate", body))["meta_info"]["output_token_logprobs"]

    async def talk(*, flushes: bool) -> tuple[list[list[Any]], list[float]]:
        """All answers, and the seconds of each turn."""
        draw = random.Random(0)
        prompts = [[draw.randrange(1, 1000) for _ in range(_ADDED)] for _ in range(dialogues)]
        answers: list[list[Any]] = []
        seconds: list[float] = []
        for turn in range(turns):
            if flushes:
                await post("/flush_cache", {})
            began_s = time.perf_counter()
            made = await asyncio.gather(*(answer(number, turn, prompt) for number, prompt in enumerate(prompts)))
            seconds.append(time.perf_counter() - began_s)
            answers += made
            for prompt, each in zip(prompts, made, strict=True):
                prompt += [entry[1] for entry in each] + [draw.randrange(1, 1000) for _ in range(_ADDED - _ANSWER)]
        return answers, seconds

    async with native_server(context) as (address, http):
        answers, seconds = await talk(flushes=False)
        async with http.get(f"{address}/server_info") as answered:
            figures = orjson.loads(await answered.read())
        again, _ = await talk(flushes=True)
    # The first token of an answer is drawn from the logits of the prompt.
    decoded = figures["generated_tokens_total"] - dialogues * turns
    return {
        "prefilled_ratio": round((figures["computed_tokens_total"] - decoded) / (dialogues * turns * _ADDED), 3),
        "first_turn_ms": round(seconds[0] * 1e3, 1),
        "last_turn_ms": round(seconds[-1] * 1e3, 1),
        "equal_answers": sum(answer == other for answer, other in zip(answers, again, strict=True)) / len(answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--turns", type=int, help="of each session: 4, with --history 16")
    parser.add_argument("--per-second", type=float, default=200.0, help="turns of all sessions together")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--history", action="store_true", help="measure dialogues with a native server")
    parser.add_argument("--dialogues", type=int, default=8, help="of --history, at once")
    parser.add_argument("--versus", metavar="REV", help="of --history: a commit, measured in turn with this tree")
    parser.add_argument("--rounds", type=int, default=5, help="of --history")
    parser.add_argument("--one", action="store_true", help="one round of --history in this process, as JSON only")
    args = parser.parse_args()
    if args.history:
        turns = args.turns or 16
        words = ["--history", "--one", "--dialogues", str(args.dialogues), "--turns", str(turns)]
        if args.one:
            print(json.dumps(asyncio.run(history(args.dialogues, turns))))
        else:
            print(json.dumps(compared("agent_sessions.py", words, args.versus, args.rounds)))
        return
    sent = send_turns(**orjson.loads(sys.stdin.buffer.read())) if args.client else None
    print(json.dumps(asyncio.run(collecting_cycles(sent or measure(args.sessions, args.turns or 4, args.per_second)))))


if __name__ == "__main__":
    main()
