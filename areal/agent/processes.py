"""The pool of worker processes that run agents, several sessions in each, with a time limit for each session."""

import asyncio
import dataclasses
import mmap
import tempfile

import orjson

from areal.agent.agent_run import AgentJob, AgentOutcome, LoadedAgents
from areal.agent.agent_worker import MARK_BYTES, MARK_VARIABLE, guilty_job
from areal.api.data import row_json
from areal.system.worker_process import CallingWorker, WorkerProcess, areal_worker

_START_LIMIT_S = 120.0


class _Worker(CallingWorker):
    def __init__(self) -> None:
        self._mark_file = tempfile.NamedTemporaryFile(prefix="areal-agents-")  # noqa: SIM115 - until the process ends
        self._mark_file.truncate(MARK_BYTES)
        self._mark = mmap.mmap(self._mark_file.fileno(), MARK_BYTES)
        env = {MARK_VARIABLE: self._mark_file.name}
        process = WorkerProcess(*areal_worker("areal.agent.agent_worker", env))
        super().__init__(process, "agent worker", start_limit_s=_START_LIMIT_S)

    async def run(self, job: AgentJob, timeout_s: float) -> AgentOutcome:
        """The outcome of a job. When this process ends before: `error` for the job that ended it, `died` for others."""
        text = f"exceeded its limit of {timeout_s:g} s"
        try:
            answer, is_late = await self.ask({"job": dataclasses.asdict(job)}, timeout_s)
        except TimeoutError:
            return AgentOutcome(status="timeout", message=f"{text} and blocked its process")
        except _Ended as ended:
            return ended.outcome
        outcome = AgentOutcome(**answer["outcome"])
        if is_late and outcome.status == "timeout":
            place = f" ({outcome.message})" if outcome.message else ""
            return dataclasses.replace(outcome, message=text + place)
        return outcome  # it ended just in time

    async def _receive(self, start_limit_s: float) -> None:
        try:
            await super()._receive(start_limit_s)
        finally:
            self._mark_file.close()  # the mapping stays

    def _failure(self, number: int) -> Exception:
        if number and number == guilty_job(self._mark):
            message = f"ProcessEnded: the agent ended it: {self.how}"
            return _Ended(AgentOutcome(status="error", message=message))
        return _Ended(AgentOutcome(status="died", message=self.how))


class _Ended(Exception):
    def __init__(self, outcome: AgentOutcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


class AgentPool:
    """Runs agents in worker processes, which it starts on demand. Used on one event loop only."""

    def __init__(self, *, num_workers: int, sessions_per_worker: int) -> None:
        """`num_workers` 0: agents run on the caller's event loop, without protection from their code."""
        self._num_workers = num_workers
        self._places = asyncio.Semaphore(max(num_workers, 1) * sessions_per_worker)
        self._workers: list[_Worker] = []
        self._inline = LoadedAgents()

    async def run(self, job: AgentJob, *, timeout_s: float) -> AgentOutcome:
        """Run a job when a place is free. The time limit counts from then. InputError when JSON cannot represent it."""
        async with self._places:
            if not self._num_workers:
                try:
                    return await asyncio.wait_for(self._inline.run(job), timeout_s)
                except TimeoutError:
                    return AgentOutcome(status="timeout", message=f"exceeded its limit of {timeout_s:g} s")
            plain = dataclasses.replace(job, row=orjson.loads(row_json(job.row)))
            return await self._worker().run(plain, timeout_s)

    def _worker(self) -> _Worker:
        """The live worker with the fewest sessions; a new one while all have some and there may be more."""
        self._workers = [worker for worker in self._workers if not worker.has_ended]
        least = min(self._workers, key=lambda worker: len(worker.calls), default=None)
        if least is None or (least.calls and len(self._workers) < self._num_workers):
            least = _Worker()
            self._workers.append(least)
        return least

    async def aclose(self) -> None:
        """End the workers; running jobs get the outcome `died`."""
        for worker in self._workers:
            await worker.aclose()
        await self._inline.aclose()
