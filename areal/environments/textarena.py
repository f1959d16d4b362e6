"""`workflow: textarena`: games, as self-play or against an older version of the policy."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from areal.agent.session import Session
from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.workflow import EPISODE_ID
from areal.environments.curriculum import opened
from areal.environments.workflow import EnvironmentWorkflow
from areal.system.durable import append_whole
from areal.system.process import ProcessContext

_OPPONENT = "opponent_policy"
"""Key that is added to a row: the adapter of the opponent."""


class Opponents:
    """The older policy of each episode, recorded before the episode starts: after a kill it plays again.

    `folder` has the policies and `opponents.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file, events = opened(folder / "opponents.jsonl")
        self._names: dict[int, str] = {event["episode"]: event["policy"] for event in events}

    async def of_episode(self, episode: int, engine: InferenceEngine, steps: int) -> Path:
        """The newest policy that was kept, if it is of this period of `steps` versions, else the one that is served."""
        if episode not in self._names:
            period = range(engine.version // steps * steps, engine.version + 1)
            kept = [path.name for path in self._folder.glob("policy-v*") if _version(path.name) in period]
            name = max(kept, key=_version) if kept else (await engine.keep_policy(self._folder)).name
            line = {"episode": episode, "policy": name}
            append_whole(self._file, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            self._names[episode] = name
        return self._folder / self._names[episode]

    def close(self) -> None:
        self._file.close()


def _version(name: str) -> int:
    return int(name.removeprefix("policy-v"))


class TextArenaWorkflow(EnvironmentWorkflow):
    """In a game of two players without `args.opponent` the policy is both, each with a session.

    With `args.opponent: {steps: N}` the player that is not `args.trained` is an older version, which is not trained.
    """

    adapter = "textarena"

    _opponents: Opponents | None = None

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        episode, opponent = EPISODE_ID.get(), self._options(data).get("opponent")
        if not isinstance(opponent, Mapping) or self._is_evaluation or episode is None:
            return await super().arun_episode(engine, data)
        if self._opponents is None:
            context = ProcessContext.from_env()
            assert context is not None, "episodes with ids are those of a run"
            self._opponents = Opponents(Path(context.run_dir) / "environments" / "opponents")
        folder = await self._opponents.of_episode(episode, engine, opponent["steps"])
        async with engine.older_policy(folder):
            group = await super().arun_episode(engine, data | {_OPPONENT: folder.name})
        group.stats["opponent_version"] = _version(folder.name)
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
