"""Owns evaluation on the trainer's side: which modes are asked of the controller, and whether the goal is reached."""

from __future__ import annotations

from functools import partial

from areal.api.config import EvaluatorConfig
from areal.observe.log import get_logger
from areal.rollout.client import RolloutClient
from areal.trainer.weights import WeightPublisher


class Evaluator:
    """Asks the controller to run the held-out set under the current weights.

    Every rank asks, and all get the answer to one evaluation: a rank that waited for another one in a collective
    instead would lose patience (torch's time limit) with an evaluation that takes long.
    """

    def __init__(self, config: EvaluatorConfig, client: RolloutClient, weights: WeightPublisher) -> None:
        self._config = config
        self._client = client
        self._weights = weights

    def evaluate(self, steps_done: int) -> dict[str, float]:
        """Metrics `eval/<mode>/<name>` after `steps_done` train steps. Blocks until every row is scored."""
        values: dict[str, float] = {}
        for mode in self._config.modes:
            result = self._weights.ask(partial(self._client.evaluate, steps_done, mode), version=steps_done)
            values |= {f"eval/{mode}/{name}": value for name, value in result.items()}
        shown = ", ".join(f"{mode} {values[f'eval/{mode}/reward']:.3f}" for mode in self._config.modes)
        get_logger("trainer").info("evaluation after %d steps: reward %s", steps_done, shown)
        return values

    def goal_reached(self, values: dict[str, float]) -> bool:
        """True when every mode named in evaluator.stop_at has reached its number."""
        goals = self._config.stop_at
        return bool(goals) and all(values[f"eval/{mode}/reward"] >= goal for mode, goal in goals.items())
