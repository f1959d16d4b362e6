"""The cost of a turn in the session server: parse, find the context, answer, record, reply; without the policy.

    python benchmark/agent_sessions.py [--sessions 500] [--turns 8]

A scripted policy answers at once. One line of JSON: `us_per_turn` (CPU time), `p99_ms` (longest wait of 1 in 100 turns
at the given rate), and for 8 and 128 turns the ratio of rendering and tokenising the whole history again to this.
"""

import argparse
import asyncio
import json
import time

import orjson

from areal.agent.bridge import template_bridge
from areal.agent.dialects import chat_completions
from areal.agent.dialects.dialect import Attempt, Sent
from areal.agent.session import Session, SessionLimits, SessionSetup
from areal.agent.tool_calls import style_of
from areal.agent.transcript import Transcript
from areal.api.config import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse
from areal.data.template_tokenizer import template_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The result of this step is forty-two, and the next step is to look it up. "


class InstantPolicy:
    """Implements InferenceEngine."""

    version = 0

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

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

    async def turn(self) -> float:
        """One turn. Returns its seconds in the server."""
        body = orjson.loads(orjson.dumps({"model": "policy", "messages": self.messages}))
        began = time.perf_counter()
        asked = chat_completions.DIALECT.parse(body, Attempt(str(len(self.messages)), 0))
        answers = await self.session.answer(asked.turn)
        orjson.dumps(chat_completions.DIALECT.reply(asked, answers, Sent(created_s=0, token_text=str)))
        self.session.delivered(answers)
        seconds = time.perf_counter() - began
        self.messages += [{"role": "assistant", "content": answers[0].text}, {"role": "user", "content": TEXT}]
        return seconds


def make(num_sessions: int) -> tuple[list[Client], Transcript]:
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


async def paced(clients: list[Client], turns: int, per_s: float) -> list[float]:
    """Turns of all clients at a steady rate; seconds of each."""
    found: list[float] = []
    began = time.perf_counter()
    for number in range(turns * len(clients)):
        await asyncio.sleep(max(began + number / per_s - time.perf_counter(), 0))
        found.append(await clients[number % len(clients)].turn())
    return found


async def compare(turns: int) -> float:
    """Seconds of rendering the whole history in each turn, over those of the server, after `turns` turns."""
    (client,), bridge = make(1)
    ours = again = 0.0
    for _ in range(turns):
        began = time.perf_counter()
        bridge.prompt(client.messages, ())
        again += time.perf_counter() - began
        ours += await client.turn()
    return again / ours


async def measure(num_sessions: int, turns: int, per_s: float) -> dict[str, float]:
    clients, _ = make(num_sessions)
    cpu_s = time.process_time()
    seconds = sorted(await paced(clients, turns, per_s))
    cpu_s = time.process_time() - cpu_s
    return {
        "sessions": num_sessions,
        "turns": len(seconds),
        "us_per_turn": round(cpu_s / len(seconds) * 1e6, 1),
        "p99_ms": round(seconds[int(0.99 * len(seconds))] * 1e3, 3),
        "ratio_8_turns": round(await compare(8), 2),
        "ratio_128_turns": round(await compare(128), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--turns", type=int, default=4, help="turns of each session")
    parser.add_argument("--per-second", type=float, default=200.0, help="turns of all sessions together")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(measure(given.sessions, given.turns, given.per_second))))


if __name__ == "__main__":
    main()
