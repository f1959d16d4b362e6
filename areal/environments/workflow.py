"""Sessions of the environments that others published: the base of all adapters."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

from areal.agent.agent_run import MAX_TURNS, AgentOutcome
from areal.agent.directory import Entry
from areal.agent.session import Session
from areal.agent.turns import BUDGET_CODES, Message, TurnRefused, TurnRequest, answer_message
from areal.api.config import AgentConfig, GenerationHyperparameters
from areal.api.engine import InferenceEngine
from areal.api.errors import ConfigError
from areal.data.tokenizer import Tokenizer
from areal.environments.process import EnvironmentFailed, EnvironmentWorker, WorkerSetup
from areal.observe.spans import span
from areal.workflow.agent import SESSION_TRIES, FinishedSession, SessionWorkflow

_CHECKED_ENVIRONMENTS = 32
_CLOSE_LIMIT_S = 10.0


@dataclass(slots=True)
class Seat:
    """One player of an episode: its session, its side of the dialogue, and its rewards."""

    entry: Entry
    num_open: int  # Sessions that were open at its start.
    messages: list[Message] = field(default_factory=list[Message])
    turns: dict[str, float] = field(default_factory=dict[str, float])
    total: float = 0.0


class EnvironmentWorkflow(SessionWorkflow):
    """Each sample of a row is one episode in the worker of the adapter. Its failures are never rewards."""

    adapter: ClassVar[str]
    scores_answers: ClassVar[bool] = False
    """Whether the worker has `question`, `reference`, `extracted` and `score`, for a check of the reward."""

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        *,
        env: str = "",
        python: str = "",
        args: Mapping[str, Any] | None = None,
        max_concurrent: int | None = None,
        timeout_s: float = 60.0,
        agent_config: AgentConfig | None = None,
    ) -> None:
        """`env`: of rows that name none. `python`: interpreter with the package; empty = that of areal. `args`: of the
        adapter. `max_concurrent`: episodes at the same time; None = what the environment takes. `timeout_s`: limit of
        one call of the environment; agent.timeout_s is that of an episode."""
        for name, value in (("max_concurrent", max_concurrent), ("timeout_s", timeout_s)):
            if value is not None and value <= 0:
                raise ConfigError(f"workflow_args.{name}={value} must be above 0", code="workflow.invalid_args")
        super().__init__(gconfig, tokenizer, agent_config=agent_config)
        self._worker_setup = WorkerSetup(
            adapter=self.adapter, env=env, python=python, args=args or {}, max_concurrent=max_concurrent
        )
        self.worker = EnvironmentWorker(self._worker_setup)
        self.timeout_s = timeout_s

    async def _run_sessions(
        self, engine: InferenceEngine, row: dict[str, Any], group_id: str
    ) -> Sequence[FinishedSession]:
        sessions = self._services.sessions

        def new_seat(player: int) -> Seat:
            return Seat(sessions.add(self._session_of(player, engine, group_id, row)), sessions.num_open)

        for _ in range(SESSION_TRIES):
            seats = [new_seat(0)]
            try:
                with span("agent"):
                    outcomes = await self._ended(seats, row, new_seat)
            finally:
                for seat in seats:
                    await seat.entry.session.finish()
                    sessions.remove(seat.entry)
            if outcomes[0].status != "died":
                break
        trained = [number for number in range(len(seats)) if self._is_trained(number, row)]
        played = [number for number in trained if seats[number].entry.session.counts.turns] or trained[:1]
        return [
            await self._finished(seats[number].entry, outcomes[number], row, seats[number].num_open)
            for number in played
        ]

    def _is_trained(self, player: int, row: Mapping[str, Any]) -> bool:
        return True

    def _session_of(self, player: int, engine: InferenceEngine, group_id: str, row: Mapping[str, Any]) -> Session:
        return self._new_session(engine, group_id)

    async def _ended(
        self, seats: list[Seat], row: dict[str, Any], new_seat: Callable[[int], Seat]
    ) -> Sequence[AgentOutcome]:
        """Run an episode until it ends or fails: the outcome of each seat."""
        try:
            async with self.worker.place(), asyncio.timeout(self._config.timeout_s):
                return await self._episode(seats, row, new_seat)
        except TimeoutError:
            text = f"exceeded its limit of {self._config.timeout_s:g} s"
            failed = AgentOutcome(status="timeout", message=text)
        except TurnRefused as refused:
            failed = AgentOutcome(status="error", message=f"TurnRefused: {refused}", refusal=refused.code)
        except EnvironmentFailed as error:
            status = "died" if error.code == "env.server_died" else "error"
            failed = AgentOutcome(status="timeout" if error.code == "env.timeout" else status, message=str(error))
        if not any(self._is_trained(number, row) for number in range(len(seats))):
            seats.append(new_seat(len(seats)))  # of the other player of two, which is trained: it gets the failure
        return [failed] * len(seats)

    async def _episode(
        self, seats: list[Seat], row: dict[str, Any], new_seat: Callable[[int], Seat]
    ) -> Sequence[AgentOutcome]:
        """areal holds the dialogue. A package that calls the model needs another method."""
        key = seats[0].entry.session.session_id
        try:
            last = await self._dialogue(key, seats, row, new_seat)
        finally:
            await self.worker.close_episode(key, limit_s=_CLOSE_LIMIT_S)
        if last.get("reward", 0.0) is None:  # the environment could not measure
            return [AgentOutcome(status="ok", parts=last.get("parts", {}))] * len(seats)
        return [
            AgentOutcome(status="ok", reward=seat.total, rewards=seat.turns, parts=last.get("parts", {}))
            for seat in seats
        ]

    async def _dialogue(
        self, key: str, seats: list[Seat], row: dict[str, Any], new_seat: Callable[[int], Seat]
    ) -> Mapping[str, Any]:
        """Play until the environment or the budget of a session ends it. Returns the last answer of the environment."""
        state = await self.worker.call("reset", {"row": row}, episode=key, limit_s=self.timeout_s)
        for _ in range(MAX_TURNS):
            player = state.get("player", 0)
            while len(seats) <= player:
                seats.append(new_seat(len(seats)))
            seat = seats[player]
            seat.messages += state["messages"]
            try:
                answer = await _answered(seat, state.get("tools", ()))
            except TurnRefused as refused:
                if refused.code not in BUDGET_CODES:
                    raise
                return {}
            message = answer_message(answer)
            seat.messages.append(message)
            action = {"message": message, "is_cut": answer.finish_reason == "length"}
            state = await self.worker.call("step", action, episode=key, limit_s=self.timeout_s)
            if state.get("reward"):
                seat.turns[answer.turn_id] = float(state["reward"])
            for other, reward in zip(seats, state.get("rewards", ()), strict=False):
                other.total = float(reward)
            if state["done"]:
                return state
        return {}

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Start the worker, and the first and the last episode of each environment of the rows. ConfigError with the
        command that helps."""
        first = {row.get("env"): row for row in reversed(rows)}
        last = {row.get("env"): row for row in rows}
        ends = [row for name in first for row in (first[name], last[name])]
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
            try:
                thread.submit(asyncio.run, self._tried(ends[: 2 * _CHECKED_ENVIRONMENTS])).result()
            except EnvironmentFailed as error:
                name = f"workflow={self.adapter}"
                raise ConfigError(f"{name}: {error}", code=error.code) from error

    async def _tried(self, rows: Sequence[dict[str, Any]]) -> None:
        worker = EnvironmentWorker(self._worker_setup)
        try:
            for number, row in enumerate(rows):
                async with worker.place():
                    await self._tried_row(worker, f"check-{number}", row)
        finally:
            await worker.aclose()

    async def _tried_row(self, worker: EnvironmentWorker, key: str, row: dict[str, Any]) -> None:
        await worker.call("reset", {"row": row}, episode=key, limit_s=self.timeout_s)
        await worker.close_episode(key, limit_s=_CLOSE_LIMIT_S)

    async def aclose(self) -> None:
        await super().aclose()
        if not self._is_evaluation:
            await self.worker.aclose()


async def _answered(seat: Seat, tools: Sequence[dict[str, Any]]) -> Any:
    """The answer of the policy to the dialogue of a seat."""
    size = sum(len(str(message.get("content", ""))) for message in seat.messages)
    session = seat.entry.session
    (answer,) = await session.answer(TurnRequest(messages=tuple(seat.messages), tools=tuple(tools), num_bytes=size))
    session.delivered([answer])
    return answer


class OpenEnvWorkflow(EnvironmentWorkflow):
    """Environments of OpenEnv, each episode in a session of their server. The reward of a step is that of the turn."""

    adapter = "openenv"


class VerifiersWorkflow(EnvironmentWorkflow):
    """Tasksets of verifiers. The package calls the policy itself, in a session, and scores its episode."""

    adapter = "verifiers"

    async def _episode(
        self, seats: list[Seat], row: dict[str, Any], new_seat: Callable[[int], Seat]
    ) -> Sequence[AgentOutcome]:
        entry = seats[0].entry
        session = {"base_url": f"{self._services.base_url}/v1", "key": entry.key}
        arguments, key = {"row": row, "session": session}, entry.session.session_id
        try:
            outcome = await self.worker.call("run", arguments, episode=key, limit_s=self._config.timeout_s)
        finally:  # which kills a worker that a task blocks
            await self.worker.close_episode(key, limit_s=_CLOSE_LIMIT_S)
        refused = entry.session.counts.refused
        refusal = next((code for code in sorted(BUDGET_CODES) if refused[code]), "")
        return [AgentOutcome(**outcome, refusal="" if outcome["status"] == "ok" else refusal)]

    async def _tried_row(self, worker: EnvironmentWorker, key: str, row: dict[str, Any]) -> None:
        await worker.call("check", {"row": row}, limit_s=self.timeout_s)


class NemoGymWorkflow(EnvironmentWorkflow):
    """Resources servers of NeMo-Gym. The server verifies a dialogue also when the budget of its session ended it."""

    adapter = "nemo_gym"

    async def _dialogue(
        self, key: str, seats: list[Seat], row: dict[str, Any], new_seat: Callable[[int], Seat]
    ) -> Mapping[str, Any]:
        if last := await super()._dialogue(key, seats, row, new_seat):
            return last
        last = await self.worker.call("verify", {}, episode=key, limit_s=self.timeout_s)
        seats[0].total = sum(last.get("rewards", ()))
        return last
