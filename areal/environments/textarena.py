"""`workflow: textarena`: games, as self-play or against an older version of the policy."""

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from areal.agent.session import Session
from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import ConfigError
from areal.api.workflow import EPISODE_ID
from areal.environments.curriculum import opened
from areal.environments.workflow import EnvironmentWorkflow
from areal.system.durable import append_whole, finish_interrupted_writes
from areal.system.process import ProcessContext

_OPPONENT = "opponent_policy"  # Key that is added to a row: the adapter of the opponent.


def opponent_steps(options: Mapping[str, Any]) -> int | None:
    """N of `opponent: {steps: N}` in the arguments of a game; None for a function, or without an opponent."""
    opponent, trained = options.get("opponent"), options.get("trained", 0)
    if opponent is None or isinstance(opponent, str):
        return None
    steps = opponent.get("steps") if isinstance(opponent, Mapping) and len(opponent) == 1 else None
    if type(steps) is not int or steps < 1:
        text = f"opponent={opponent}: write FILE:FUNCTION, or {{steps: N}} with a whole number N of at least 1"
        raise ConfigError(text, code="workflow.invalid_args")
    if trained not in (0, 1):
        raise ConfigError(f"trained={trained}: write 0 or 1, the player that is trained", code="workflow.invalid_args")
    return steps


class Opponents:
    """The older policy of each episode, recorded before the episode starts: after a kill it plays again.

    `folder` has the policies that are in use, and `opponents.jsonl` with a line for every episode.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file, events = opened(folder / "opponents.jsonl")
        finish_interrupted_writes(folder)
        self._lock = asyncio.Lock()
        self._newest = events[-1]["policy"] if events else ""
        self._names: dict[int, str] = {}  # Those of the episodes that have not ended, by episode.
        self._before: dict[int, str] = {event["episode"]: event["policy"] for event in events}
        """Those of an earlier process, whose episodes that have not ended run again before any new one starts."""

    @asynccontextmanager
    async def of_episode(self, episode: int, engine: InferenceEngine, steps: int) -> AsyncIterator[str]:
        """The policy that was kept last, if it is of this period of `steps` versions, else the one that is served. The
        servers hold it until the end of the context."""
        if episode in self._before:
            self._names[episode] = self._before.pop(episode)
        try:
            async with self._lock:
                unused = [] if episode in self._names else await self._begin(episode, engine, steps)
            await asyncio.to_thread(os.fsync, self._file.fileno())
            policy = self._names[episode]
            async with engine.older_policy(self._folder / policy):
                for folder in unused:  # which the servers do not hold any more, since they hold the new policy
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                yield policy
        except Exception:
            self._names.pop(episode, None)
            raise
        del self._names[episode]  # not after it was cancelled: then it runs again

    async def _begin(self, episode: int, engine: InferenceEngine, steps: int) -> list[Path]:
        """Record the policy of a new episode. If it is another one, returns the folders that nothing needs any more."""
        self._before.clear()
        period, policy = range(engine.version // steps * steps, engine.version + 1), self._newest
        is_new = not policy or _version(policy) not in period
        if is_new:
            policy = (await engine.keep_policy(self._folder)).name
        line = {"episode": episode, "policy": policy}
        append_whole(self._file, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        self._newest = self._names[episode] = policy
        used = {*self._names.values()}
        return [path for path in self._folder.glob("policy-v*") if path.name not in used] if is_new else []

    def close(self) -> None:
        self._file.close()


def _version(name: str) -> int:
    return int(name.removeprefix("policy-v").partition("-")[0])


class TextArenaWorkflow(EnvironmentWorkflow):
    """In a game of two players without `args.opponent` the policy is both, each with a session.

    With `args.opponent: {steps: N}` the player that is not `args.trained` is an older version, which is not trained.
    """

    adapter = "textarena"

    _opponents: Opponents | None = None

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            opponent_steps(self._options(row))
        super().check_rows(rows)

    def needs_adapters(self, rows: Sequence[dict[str, Any]]) -> bool:
        return any(opponent_steps(self._options(row)) is not None for row in rows)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        episode, steps = EPISODE_ID.get(), opponent_steps(self._options(data))
        if steps is None or self._is_evaluation or episode is None:
            return await super().arun_episode(engine, data)
        if self._opponents is None:
            context = ProcessContext.from_env()
            assert context is not None, "episodes with ids are those of a run"
            self._opponents = Opponents(Path(context.run_dir) / "environments" / "opponents")
        async with self._opponents.of_episode(episode, engine, steps) as policy:
            group = await super().arun_episode(engine, data | {_OPPONENT: policy})
        group.stats["opponent_version"] = _version(policy)
        return group

    def _options(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**self._worker_setup.args, **(row.get("config") or {})}

    def _is_trained(self, player: int, row: Mapping[str, Any]) -> bool:
        return _OPPONENT not in row or player == self._options(row).get("trained", 0)

    def _session_of(self, player: int, engine: InferenceEngine, group_id: str, row: Mapping[str, Any]) -> Session:
        if self._is_trained(player, row):
            return super()._session_of(player, engine, group_id, row)
        return Session(secrets.token_hex(6), replace(self._setup, adapter=row[_OPPONENT]), engine, group_id=group_id)

    async def aclose(self) -> None:
        await super().aclose()
        if self._opponents is not None and not self._is_evaluation:
            self._opponents.close()
