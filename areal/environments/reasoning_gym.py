"""`workflow: reasoning_gym`: questions of reasoning-gym, with a curriculum over its own levels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal.api.config import AgentConfig, GenerationHyperparameters
from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.workflow import EPISODE_ID
from areal.data.tokenizer import Tokenizer
from areal.environments.curriculum import Curriculum, CurriculumRule
from areal.environments.workflow import EnvironmentWorkflow
from areal.system.process import ProcessContext


class ReasoningGymWorkflow(EnvironmentWorkflow):
    """One question and one answer. `curriculum`: the level of each dataset follows the success rate of its groups."""

    adapter = "reasoning_gym"
    scores_answers = True

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
        curriculum: Mapping[str, Any] | None = None,
        agent_config: AgentConfig | None = None,
    ) -> None:
        super().__init__(
            gconfig,
            tokenizer,
            env=env,
            python=python,
            args=args,
            max_concurrent=max_concurrent,
            timeout_s=timeout_s,
            agent_config=agent_config,
        )
        self._rule = None if curriculum is None else CurriculumRule.of(curriculum)
        self._curriculum: Curriculum | None = None
        self._tops: dict[str, int | None] = {}

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        """One group on a question; its level is recorded before it starts."""
        if self._rule is None or self._is_evaluation:
            return await super().arun_episode(engine, data)
        env = data.get("env") or self._worker_setup.env
        if env not in self._tops:
            self._tops[env] = await self.worker.call("max_level", {"row": data}, limit_s=self.timeout_s)
        if (top := self._tops[env]) is None:  # the package has no levels for it
            return await super().arun_episode(engine, data)
        if self._curriculum is None:
            context = ProcessContext.from_env()
            folder = None if context is None else Path(context.run_dir) / "environments"
            self._curriculum = Curriculum(self._rule, None if folder is None else folder / "levels.jsonl")
        episode = EPISODE_ID.get()
        level = self._curriculum.begin(episode, env, top)
        group = await super().arun_episode(engine, data | {"level": level})
        if rewards := [trajectory.reward for trajectory in group.trajectories]:
            rate = sum(reward >= 1 for reward in rewards) / len(rewards)
            self._curriculum.end(episode, env, level, rate, top)
        group.stats[f"level/{env}"] = level
        return group

    async def aclose(self) -> None:
        await super().aclose()
        if self._curriculum is not None and not self._is_evaluation:
            self._curriculum.close()
