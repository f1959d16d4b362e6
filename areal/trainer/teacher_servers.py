"""Teachers on inference servers: they score each finished episode, while other episodes are generated.

The scores are columns of the trajectories, so the ledger stores them: a batch that is trained again, or replayed, has
the scores of its first time. An answer without scores has no use for the policy, so its episode fails.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal.api.columns import ColumnSpec, to_array
from areal.api.config import TeacherConfig, TeacherServersConfig
from areal.api.config.rollout import server_url
from areal.api.data import ScoredRow, TokenScores, Trajectory, TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import ArealError, ConfigError, InputError, ServerUnavailable
from areal.api.metrics import gather_or_cancel
from areal.api.registry import registered
from areal.api.workflow import RolloutWorkflow
from areal.data.chat import encode_prompt
from areal.data.token_spans import common_spans, pieces_of, spread
from areal.data.tokenizer import Tokenizer, load_tokenizer
from areal.fleet.server_backend import ScoringCall
from areal.fleet.server_client import ServerClient
from areal.observe.log import get_logger
from areal.observe.spans import span
from areal.system.network import TEACHER_TOKEN

_log = get_logger(__name__)
_CALLS_PER_SERVER = 64
_ATTEMPTS = 4  # A request has this part of teacher.server_timeout_s on one server; it is then sent to another one.
_CHECK_LIMIT_S = 30.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0

TEACHER_LOGPROBS = ColumnSpec("teacher_logprobs", fill=0.0)
"""[T] float32: log-probability, in nats, that the teacher gives to each trained token."""
TEACHER_IDS = ColumnSpec("teacher_ids", "i4", fill=0, show="")
"""[T, top_k] int32: the teacher's likeliest tokens at the place of each trained token."""
TEACHER_TOP = ColumnSpec("teacher_top_logprobs", fill=0.0, show="")
"""[T, top_k] float32: their log-probabilities, in nats."""


# ----------------------------------------------------------------------------------------------------------------------
# One teacher, on one or more servers.


@dataclass(slots=True, eq=False)
class _Server:
    client: ServerClient
    num_running: int = 0


class TeacherServers:
    """The servers of one teacher. The one with the fewest requests gets the next; a request that fails goes to another
    one."""

    def __init__(self, options: TeacherServersConfig, teacher: TeacherConfig) -> None:
        self.tokenizer = load_tokenizer(options.tokenizer_path) if options.tokenizer_path else None
        self._top_k, self._timeout_s = teacher.top_k, teacher.server_timeout_s
        scoring = registered("backends", options.backend, key="teacher.servers.backend").load().scoring
        if scoring is None:
            text = f"teacher.servers.backend: {options.backend} servers do not score given tokens: use others"
            raise ConfigError(text, code="teacher.no_scores")
        self._scoring: ScoringCall = scoring
        addresses, token = map(server_url, options.server_addrs), os.environ.get(TEACHER_TOKEN, "")
        self._servers = [_Server(ServerClient("the teacher", url, token=token)) for url in addresses]
        self._room = asyncio.Semaphore(_CALLS_PER_SERVER * len(self._servers))

    async def scores(self, token_ids: Sequence[int], first: int) -> TokenScores:
        """Scores of the tokens from `first` on. ServerUnavailable if no server answers in time or an answer has another
        form, RequestError if refused."""
        if first == len(token_ids):
            return TokenScores([], [])
        last: ServerUnavailable | None = None
        failed: _Server | None = None
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                pause_s = _FIRST_PAUSE_S
                while True:
                    server = min(self._servers, key=lambda server: (server is failed, server.num_running))
                    try:
                        return await self._asked(server, token_ids, first, limit_s=self._timeout_s / _ATTEMPTS)
                    except ServerUnavailable as error:
                        failed = server
                        if error.code == "server.unreadable_answer":  # the next one would be the same
                            raise
                        if last is None:
                            _log.warning("%s; asked again for %g s", error, self._timeout_s)
                        last = error
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        except TimeoutError as error:
            why = f": {last}" if last is not None else ""
            text = f"no scores of the teacher after {self._timeout_s:g} s (teacher.server_timeout_s){why}"
            raise ServerUnavailable(text, code="teacher.unavailable") from error

    async def check(self) -> None:
        """Ask each server once. ServerUnavailable or RequestError names the one that gives no scores."""
        for server in self._servers:
            await self._asked(server, [1, 1], 1, limit_s=min(self._timeout_s, _CHECK_LIMIT_S))

    async def _asked(self, server: _Server, token_ids: Sequence[int], first: int, *, limit_s: float) -> TokenScores:
        row = ScoredRow(token_ids=list(token_ids), first=first)
        server.num_running += 1
        try:
            async with asyncio.timeout(limit_s):
                return await self._scoring.ask(server.client, row, self._top_k)
        except TimeoutError as error:
            raise server.client.no_answer(self._scoring.path, f"nothing in {limit_s:g} s") from error
        finally:
            server.num_running -= 1

    def close(self) -> None:
        for server in self._servers:
            server.client.close()


def _columns(trajectory: Trajectory, first: int, scores: TokenScores, top_k: int) -> dict[ColumnSpec, Any]:
    """The columns of a trajectory, 0 outside the loss."""
    size, mask = len(trajectory.token_ids), np.array(to_array("i", trajectory.loss_mask), dtype=bool)
    logprobs = np.zeros(size, np.float32)
    logprobs[first:] = scores.logprobs
    columns: dict[ColumnSpec, Any] = {TEACHER_LOGPROBS: np.where(mask, logprobs, np.float32(0))}
    if top_k:
        ids, top = np.zeros((size, top_k), np.int32), np.zeros((size, top_k), np.float32)
        ids[first:] = [[token for token, _ in place] for place in scores.top]
        top[first:] = [[logprob for _, logprob in place] for place in scores.top]
        columns |= {TEACHER_IDS: np.where(mask[:, None], ids, 0), TEACHER_TOP: np.where(mask[:, None], top, 0)}
    return columns


# ----------------------------------------------------------------------------------------------------------------------
# The workflow that asks them.


class TaughtWorkflow(RolloutWorkflow):
    """The episodes of another workflow, with the scores of the teachers. Evaluations have no teacher."""

    def __init__(self, workflow: RolloutWorkflow, config: TeacherConfig, tokenizer: Tokenizer) -> None:
        """`tokenizer`: of the policy."""
        self._workflow, self._config, self._tokenizer = workflow, config, tokenizer
        self._by_source: dict[str, TeacherServers] = {}
        for options in config.servers:
            servers = TeacherServers(options, config)
            self._by_source |= dict.fromkeys(options.sources or [""], servers)
        self.has_time_limit = workflow.has_time_limit

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup | None:
        teacher = self._teacher_of(data)
        group = await self._workflow.arun_episode(engine, data)
        if group is None or group.rejected:
            return group
        with span("teacher"):
            scored = await gather_or_cancel([self._scored(teacher, each, data) for each in group.trajectories])
        return replace(group, trajectories=list(scored))

    def _teacher_of(self, row: Mapping[str, Any]) -> TeacherServers:
        source = str(row.get(self._config.source_key) or "")
        teacher = self._by_source.get(source) or self._by_source.get("")
        if teacher is None:
            known = ", ".join(sorted(self._by_source))
            text = f"teacher.servers: none teaches a row whose {self._config.source_key} is {source!r}, only {known}"
            raise InputError(
                f"{text}: name it in sources, or leave the sources of one entry empty", code="teacher.none"
            )
        return teacher

    async def _scored(self, teacher: TeacherServers, trajectory: Trajectory, row: dict[str, Any]) -> Trajectory:
        if trajectory.images:
            raise InputError("teacher.servers score text only: remove the images", code="teacher.images")
        ids, mask = trajectory.token_ids, trajectory.loss_mask
        first = next((place for place, trained in enumerate(mask) if trained), None)
        if first is None:
            return trajectory
        if teacher.tokenizer is None:
            scores = await teacher.scores(ids, first)
        else:
            if not all(mask[first:]):
                text = "a teacher with its own tokenizer_path scores one answer to a prompt, and this row has several"
                raise InputError(f"{text}: use a teacher with the policy's tokens", code="teacher.several_answers")
            logprobs = list(trajectory.rollout_logprobs[first:])
            scores = TokenScores(await self._aligned(teacher, teacher.tokenizer, ids[first:], logprobs, row), [])
        columns = _columns(trajectory, first, scores, self._config.top_k)
        return replace(trajectory, columns={**trajectory.columns, **columns})

    async def _aligned(
        self,
        teacher: TeacherServers,
        other: Tokenizer,
        answer: Sequence[int],
        student_logprobs: list[float],
        row: dict[str, Any],
    ) -> list[float]:
        """The scores of an answer from a teacher with other tokens.

        The teacher gets the prompt of the row in its own chat template and the text of the answer in its own tokens. A
        last token without text ends the answer: it is the end token of the teacher. Tokens of an answer without any
        text keep `student_logprobs`, so they have no gradient.
        """
        ended = not self._tokenizer.decode([answer[-1]], skip_special_tokens=True) and other.eos_token_id is not None
        mine = pieces_of(self._tokenizer, answer[:-1] if ended else answer)
        other_ids = other.encode(mine.text, add_special_tokens=False)
        spans, kept = common_spans(mine, pieces_of(other, other_ids)), student_logprobs[: len(answer) - ended]
        prompt = list(encode_prompt(row, other).token_ids)
        ids = [*prompt, *other_ids, *([other.eos_token_id] if ended else [])]
        logprobs = (await teacher.scores(ids, len(prompt))).logprobs
        return spread(spans, logprobs, kept) + logprobs[len(other_ids) :]

    def check_row(self, row: dict[str, Any]) -> None:
        self._workflow.check_row(row)

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        self._workflow.check_rows(rows)

    def notice(self) -> str:
        return self._workflow.notice()

    def waits_for(self) -> str:
        return self._workflow.waits_for()

    def for_evaluation(self, gconfig: Any) -> RolloutWorkflow:
        return self._workflow.for_evaluation(gconfig)

    async def aclose(self) -> None:
        for servers in set(self._by_source.values()):
            servers.close()
        await self._workflow.aclose()


def teacher_problem(config: TeacherConfig) -> str:
    """Why the teachers' servers cannot score, found by one request to each; empty when they can."""

    async def ask() -> None:
        for options in config.servers:
            servers = TeacherServers(options, config)
            try:
                await servers.check()
            finally:
                servers.close()

    try:
        asyncio.run(ask())
    except ArealError as error:
        return str(error)
    return ""
