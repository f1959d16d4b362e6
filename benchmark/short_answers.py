"""CPU of the controller per short answer, in groups as in training and one by one as in evaluations.

    python benchmark/short_answers.py [--prompts 256] [--group 16] [--repeats 5]

The quickstart's workflow, tokenizer and reward; a client of the native server whose requests are answered at once,
without sockets. Counted: prompts, requests, routing, answers, trajectories, the encoding of an episode and its verdict,
and the messages to the process that computes rewards. Not counted: that process, the server, the ledger.

Prints one line of JSON, for groups and for single answers: microseconds of `time.process_time` per answer, the minimum
of all repeats; the time to write and parse the JSON of the same requests and answers; and the ratio of the two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import orjson
import uvloop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from areal.api.config import GenerationHyperparameters, InferenceEngineConfig  # noqa: E402
from areal.api.data import GenerationResponse  # noqa: E402
from areal.data.tiny_model import character_tokenizer  # noqa: E402
from areal.fleet.fleet import Fleet  # noqa: E402
from areal.fleet.native import NativeReplica  # noqa: E402
from areal.fleet.replica import AnswerForm, ReplicaInfo  # noqa: E402
from areal.fleet.server_client import ServerClient  # noqa: E402
from areal.ledger.payload import EncodedEpisode, TokenLimits  # noqa: E402
from areal.rollout.controller_process import collecting_cycles  # noqa: E402
from areal.rollout.evaluation import evaluate_episode  # noqa: E402
from areal.rollout.executor import EpisodeEngine, verdict_on  # noqa: E402
from areal.workflow.rlvr import RLVRWorkflow  # noqa: E402
from benchmark.scale_servers import MemoryRegistry  # noqa: E402
from examples.quickstart.task import CHARACTERS, SPECIALS, make_rows  # noqa: E402

REWARD = str(ROOT / "examples/quickstart/task.py") + ":sorted_digits_reward"
LIMITS = TokenLimits(vocab_size=2**31, newest_version=0)
ANSWER_IDS = [3, 4, 5, 6, 7, 1]
"""Five digits and the end."""


def answer_json() -> bytes:
    """One answer, as the native server writes it."""
    meta = {
        "id": f"{0:032x}-000000",
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": 6,
        "completion_tokens": len(ANSWER_IDS),
        "cached_tokens": 0,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": len(ANSWER_IDS)}],
        "output_token_logprobs": [[-0.12345678, token, None] for token in ANSWER_IDS],
    }
    return orjson.dumps({"output_ids": ANSWER_IDS, "meta_info": meta})


class AnswersAtOnce(ServerClient):
    """Requests are answered in the next turn of the loop."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(name, address)
        self.exchanged: list[tuple[bytes, bytes]] = []
        """Requests and their answers."""
        self._one = answer_json()

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        return b"{}"

    async def answers(self, path: str, body: dict[str, Any], *, is_streamed: bool) -> AsyncGenerator[bytes, None]:
        assert not is_streamed
        asked, answer = orjson.dumps(body, default=list), self._one
        if path == "/generate_group":
            answer = b"[" + b",".join([self._one] * asked.count(b'"rid"')) + b"]"
        self.exchanged.append((asked, answer))
        await asyncio.sleep(0)
        yield answer


class SimulatedReplica(NativeReplica):
    """The client of a native server that is not there."""

    max_group = 256

    def __init__(self, name: str, address: str, form: AnswerForm) -> None:
        super().__init__(name, address, form=form)
        self._client = self.server = AnswersAtOnce(name, address)

    async def info(self) -> ReplicaInfo:
        return ReplicaInfo(version=0, vocab_size=16, context_length=64, weights_whole=True)


def json_s(exchanged: Sequence[tuple[bytes, bytes]]) -> float:
    """Seconds of CPU to write these requests and to parse their answers."""
    requests, answers = [orjson.loads(asked) for asked, _ in exchanged], [answer for _, answer in exchanged]
    began_s = time.process_time()
    for request, answer in zip(requests, answers, strict=True):
        orjson.dumps(request)
        orjson.loads(answer)
    return time.process_time() - began_s


async def measure(*, num_prompts: int, group_size: int, repeats: int) -> dict[str, Any]:
    servers: list[AnswersAtOnce] = []

    def client(name: str, address: str, form: AnswerForm) -> SimulatedReplica:
        replica = SimulatedReplica(name, address, form)
        servers.append(replica.server)
        return replica

    config = InferenceEngineConfig(health_check_interval_s=3600.0, setup_timeout=5.0, canary="off")
    fleet = Fleet(MemoryRegistry(1), 1, config, client)
    await fleet.start()
    tokenizer = character_tokenizer([*SPECIALS, *CHARACTERS])
    settings = GenerationHyperparameters(n_samples=group_size, max_new_tokens=8)
    workflow = RLVRWorkflow(REWARD, settings, tokenizer)
    rows: list[dict[str, Any]] = [*make_rows(num_prompts, seed=0)]
    counted: list[GenerationResponse] = []

    async def train(row: dict[str, Any]) -> None:
        group = await workflow.arun_episode(EpisodeEngine(fleet, counted.append), row)
        verdict = verdict_on(0, group, accept=None, limits=LIMITS)
        assert isinstance(verdict, EncodedEpisode)

    async def evaluate(row: dict[str, Any]) -> None:
        assert await evaluate_episode(fleet, single, row, count_answer=counted.append) is not None

    single = workflow.for_evaluation(settings)
    kinds = {"groups": (train, num_prompts * group_size), "single": (evaluate, num_prompts)}
    result: dict[str, Any] = {"prompts": num_prompts, "group_size": group_size}
    for name, (episode, num_answers) in kinds.items():
        taken: list[tuple[float, float]] = []
        for _ in range(1 + repeats):  # the first one starts the process of the rewards
            counted.clear()
            for server in servers:
                server.exchanged.clear()
            began_s = time.process_time()
            await asyncio.gather(*map(episode, rows))
            used_s = time.process_time() - began_s
            assert len(counted) == num_answers
            taken.append((used_s, sum(json_s(server.exchanged) for server in servers)))
        used_s, bare_s = (min(times) / num_answers for times in zip(*taken[1:], strict=True))
        result[f"us_per_answer_{name}"] = round(used_s * 1e6, 1)
        result[f"json_us_per_answer_{name}"] = round(bare_s * 1e6, 1)
        result[f"times_json_{name}"] = round(used_s / bare_s, 1)
    await workflow.aclose()
    await fleet.close()
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--group", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in the controller's process
        measured = measure(num_prompts=args.prompts, group_size=args.group, repeats=args.repeats)
        print(json.dumps(runner.run(collecting_cycles(measured))))


if __name__ == "__main__":
    main()
