"""PPOTrainer, the entry point of a user's script: serves rollouts in the controller, trains in a trainer rank.

Imports no torch, because the controller runs the same script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal.api.config import PPOConfig
from areal.api.workflow import AcceptFn, RolloutWorkflow
from areal.observe.log import get_logger
from areal.trainer.process_setup import join_run
from areal.trainer.progress import TrainingLength

Row = dict[str, Any]


class PPOTrainer:
    """Reinforcement learning of one policy. Acts according to the role that the launcher gave this process.

    `train_dataset` and `valid_dataset` are sequences of rows (dicts); the workflow gets one row per episode.
    """

    def __init__(
        self,
        config: PPOConfig,
        *,
        train_dataset: Sequence[Row],
        valid_dataset: Sequence[Row] | None = None,
        valid_sets: Mapping[str, Sequence[Row]] | None = None,
    ) -> None:
        """`valid_sets`: further held-out rows by the name of their set, which begins the names of their metrics."""
        self._context = join_run()
        self._config = config
        self._train_rows = train_dataset
        self._valid_sets = ({"": valid_dataset} if valid_dataset else {}) | dict(valid_sets or {})
        configured = {name: f"valid_sets[{name!r}]" for name in config.evaluator.sets}
        configured |= {} if config.valid_dataset is None else {"": "valid_dataset"}
        missing = [argument for name, argument in configured.items() if not self._valid_sets.get(name)]
        if missing and self._context.index == 0:
            text = "no evaluation runs of %s: the script did not pass it to PPOTrainer"
            get_logger("trainer").warning(text, ", ".join(missing))
        self._length = TrainingLength.of(config, num_rows=len(train_dataset), samples_per_row=config.gconfig.n_samples)

    def __enter__(self) -> PPOTrainer:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to release: `train` does it."""

    def train(
        self,
        workflow: RolloutWorkflow,
        *,
        eval_workflow: RolloutWorkflow | None = None,
        should_accept_fn: AcceptFn | None = None,
    ) -> None:
        """Run until training ends. `eval_workflow` None: the training workflow with evaluation sampling."""
        if self._context.role == "controller":
            from areal.trainer.serve import serve_rollouts

            serve_rollouts(
                self._config,
                self._context,
                workflow=workflow,
                eval_workflow=eval_workflow,
                accept=should_accept_fn,
                train_rows=self._train_rows,
                valid_sets=self._valid_sets,
                total_steps=self._length.total_steps,
            )
        else:
            from areal.trainer.ppo_loop import train_policy

            train_policy(self._config, self._context, self._length, has_valid=bool(self._valid_sets))
