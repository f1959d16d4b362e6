"""The pool of worker processes that run agents, several sessions in each, with a time limit for each session."""

import asyncio
import dataclasses
import mmap
import tempfile

import orjson

from areal.agent.agent_run import AgentJob, AgentOutcome, LoadedAgents
from areal.agent.agent_worker import MARK_BYTES, MARK_VARIABLE, guilty_job
from areal.api.data import row_json
from areal.observe.log import get_logger
from areal.system.worker_process import WorkerEnded, WorkerProcess, areal_worker

_START_LIMIT_S = 120.0
_GRACE_S = 5.0  # What a cancelled agent has to end. Then its process is killed, with the other sessions in it.

_log = get_logger(__name__)


class _Worker:
    def __init__(self) -> None:
        self._mark_file = tempfile.NamedTemporaryFile(prefix="areal-agents-")  # noqa: SIM115 - until the process ends
        self._mark_file.truncate(MARK_BYTES)
        self._mark = mmap.mmap(self._mark_file.fileno(), MARK_BYTES)
        env = {MARK_VARIABLE: self._mark_file.name}
        self.process = WorkerProcess(*areal_worker("areal.agent.agent_worker", env))
        self.jobs: dict[int, asyncio.Future[AgentOutcome]] = {}
        self.ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._receive(), name=f"agent worker {self.process.pid}")
        self.has_ended = False

    async def run(self, number: int, job: AgentJob, timeout_s: float) -> AgentOutcome:
        """The outcome of a job. When this process ends before: `error` for the job that ended it, `died` for others."""
        done = self.jobs[number] = asyncio.get_running_loop().create_future()
        try:
            if not await self.ready:
                return AgentOutcome(status="died", message="its process did not start")
            self.process.send({"number": number, "job": dataclasses.asdict(job)})
            try:
                return await asyncio.wait_for(asyncio.shield(done), timeout_s)
            except TimeoutError:
                return await self._end_overdue(number, done, f"exceeded its limit of {timeout_s:g} s")
            except asyncio.CancelledError:
                self._cancel(number)
                raise
        finally:
            self.jobs.pop(number, None)

    async def _end_overdue(self, number: int, done: asyncio.Future[AgentOutcome], message: str) -> AgentOutcome:
        self._cancel(number)
        try:
            outcome = await asyncio.wait_for(asyncio.shield(done), _GRACE_S)
        except TimeoutError:
            _log.warning("agent worker %d does not answer: it is killed", self.process.pid)
            self.process.kill()
            return AgentOutcome(status="timeout", message=f"{message} and blocked its process")
        if outcome.status == "timeout":
            place = f" ({outcome.message})" if outcome.message else ""
            return dataclasses.replace(outcome, message=message + place)
        return outcome  # it ended just in time

    def _cancel(self, number: int) -> None:
        if not self.has_ended:
            self.process.send({"number": number})

    async def _receive(self) -> None:
        try:
            await self.process.connect(limit_s=_START_LIMIT_S)
            self.ready.set_result(True)
            while True:
                for message in await self.process.receive(limit_s=None):
                    if (done := self.jobs.get(message["number"])) is not None and not done.done():
                        done.set_result(AgentOutcome(**message["outcome"]))
        except (WorkerEnded, TimeoutError):
            pass
        finally:
            self.has_ended = True
            if not self.ready.done():
                self.ready.set_result(False)
            self.process.close()
            code = await asyncio.to_thread(self.process.end, wait_s=0.5)
            guilty = guilty_job(self._mark)
            self._mark_file.close()
            died = AgentOutcome(status="died", message=f"its process ended with exit code {code}")
            own = AgentOutcome(status="error", message=f"ProcessEnded: the agent ended its process, exit code {code}")
            for number, done in self.jobs.items():
                if not done.done():
                    done.set_result(own if number == guilty else died)

    async def aclose(self) -> None:
        self.process.kill()
        await asyncio.gather(self._task, return_exceptions=True)


class AgentPool:
    """Runs agents in worker processes, which it starts on demand. Used on one event loop only."""

    def __init__(self, *, num_workers: int, sessions_per_worker: int) -> None:
        """`num_workers` 0: agents run on the caller's event loop, without protection from their code."""
        self._num_workers = num_workers
        self._places = asyncio.Semaphore(max(num_workers, 1) * sessions_per_worker)
        self._workers: list[_Worker] = []
        self._numbers = 0
        self._inline = LoadedAgents()

    async def run(self, job: AgentJob, *, timeout_s: float) -> AgentOutcome:
        """Run a job when a place is free. The time limit counts from then. InputError when JSON cannot represent it."""
        async with self._places:
            if not self._num_workers:
                try:
                    return await asyncio.wait_for(self._inline.run(job), timeout_s)
                except TimeoutError:
                    return AgentOutcome(status="timeout", message=f"exceeded its limit of {timeout_s:g} s")
            self._numbers += 1
            plain = dataclasses.replace(job, row=orjson.loads(row_json(job.row)))
            return await self._worker().run(self._numbers, plain, timeout_s)

    def _worker(self) -> _Worker:
        """The live worker with the fewest sessions; a new one while all have some and there may be more."""
        self._workers = [worker for worker in self._workers if not worker.has_ended]
        least = min(self._workers, key=lambda worker: len(worker.jobs), default=None)
        if least is None or (least.jobs and len(self._workers) < self._num_workers):
            least = _Worker()
            self._workers.append(least)
        return least

    async def aclose(self) -> None:
        """End the workers; running jobs get the outcome `died`."""
        for worker in self._workers:
            await worker.aclose()
        await self._inline.aclose()
