"""An agent whose run is struck at every stage of its turns. The workflow is loaded by the controller, `run` by workers.

The strike is made inside of the controller, right after the stage is recorded, so that it hits exactly that stage.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal.agent.session import Session
from areal.agent.session_server import TurnJournal
from areal.api.config import AgentConfig, GenerationHyperparameters
from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.data.tokenizer import Tokenizer
from areal.workflow.agent import AgentWorkflow

STAGES = ("intent", "generated", "delivered", "ended", "adopted")
TARGETS = ("controller", "agent", "connection")
TURNS = 2
_BETWEEN = 3
"""Sessions that end between two strikes of one controller, so that all is up again."""


async def run(row: dict[str, Any], client: Any, session: Any) -> float:
    """Two turns; any error that the SDK does not retry ends the session without a reward."""
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    for _ in range(TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        messages += [completion.choices[0].message, {"role": "user", "content": "And then?"}]
    return float(len(messages[1].content or "") % 3)


class StruckAgent(AgentWorkflow):
    """Strikes `target` once at each stage. The strikes that were made are files in `folder`."""

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        *,
        agent_config: AgentConfig,
        target: str,
        folder: str,
        agent: str = "",
        online: bool = False,
    ) -> None:
        super().__init__(gconfig, tokenizer, agent_config=agent_config, agent=agent, online=online)
        self._target, self._folder = target, Path(folder)
        self._folder.mkdir(exist_ok=True)
        self._num_ended = 0
        self._group_of: dict[str, str] = {}
        self._open: set[str] = set()
        """Groups with unfinished sessions."""
        self._struck: set[str] = set()
        """Those that were open at the last strike."""

    def _new_session(self, engine: InferenceEngine, group_id: str) -> Session:
        session = super()._new_session(engine, group_id)
        self._group_of[session.session_id] = group_id
        self._open.add(group_id)
        return session

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        await self._services.start()
        journal = self._services.journal
        assert journal is not None
        if not isinstance(journal, _StruckJournal):
            self._services.journal = _StruckJournal(journal, self)  # pyright: ignore[reportAttributeAccessIssue]
        group = await super().arun_episode(engine, data)
        for session_id in {turn_id.partition(".")[0] for turn_id in group.turn_ids}:
            self._num_ended += 1
            self._open.discard(self._group_of[session_id])
        self.reached("ended")
        return group

    def reached(self, stage: str) -> None:
        """Strike if it is the turn of this stage. No session is struck twice: agents and SDKs give up after some."""
        done = len(list(self._folder.iterdir()))
        if done == len(STAGES) or self._num_ended < _BETWEEN or self._struck & self._open:
            return
        wanted = STAGES[done]
        if wanted == stage or (wanted == "adopted" and self._has_waiting()):
            self._num_ended, self._struck = 0, set(self._open)
            (self._folder / f"{done}-{wanted}").touch()
            self._strike()

    def _has_waiting(self) -> bool:
        """Whether an accepted episode is in no batch yet."""
        ledger = self._folder.parent / "agents" / self._target / "ledger"
        text = b"".join(path.read_bytes() for path in sorted(ledger.glob("events-*.jsonl")))
        return b'"accepted"' in text[text.rfind(b'"batched"') + 1 :]

    def _strike(self) -> None:
        match self._target:
            case "controller" | "online":
                os.kill(os.getpid(), signal.SIGKILL)
            case "agent":
                for worker in self._services.pool._workers:
                    worker.process.kill()
            case _:
                runner = self._services._runner
                assert runner is not None
                assert runner.server is not None
                for transport in [
                    connection.transport for connection in runner.server.connections if connection.transport
                ]:
                    transport.abort()


class _StruckJournal:
    """The journal of a run, which tells the workflow what it wrote."""

    def __init__(self, journal: TurnJournal, workflow: StruckAgent) -> None:
        self._journal, self._workflow = journal, workflow

    def intent(self, turn_ids: Sequence[str]) -> None:
        self._journal.intent(turn_ids)
        self._workflow.reached("intent")

    def generated(self, turn_id: str, token_ids: Sequence[int]) -> None:
        self._journal.generated(turn_id, token_ids)
        self._workflow.reached("generated")

    def delivered(self, turn_ids: Sequence[str]) -> None:
        self._journal.delivered(turn_ids)
        self._workflow.reached("delivered")

    async def durable(self) -> None:
        await self._journal.durable()

    async def aclose(self) -> None:
        await self._journal.aclose()
