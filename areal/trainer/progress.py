"""Length of a run: steps per epoch, last step, remaining steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from areal.api.config import BaseExperimentConfig
from areal.api.data import StepInfo
from areal.api.errors import ConfigError, TrainingDiverged
from areal.data.prompt_stream import step_limits, steps_per_epoch
from areal.observe.log import get_logger


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLength:
    """Number of train steps of a run: the smallest limit by epochs, steps and sequences applies."""

    steps_per_epoch: int | Fraction
    """A fraction without drop_last: a batch at the border of two epochs has rows of both and counts for the first."""
    total_steps: int

    @classmethod
    def of(cls, config: BaseExperimentConfig, *, num_rows: int, samples_per_row: int = 1) -> TrainingLength:
        """Raises ConfigError when the dataset does not fill one batch."""
        data, per_epoch = config.train_dataset, steps_per_epoch(config, num_rows)
        if per_epoch == 0:
            message = f"train_dataset.batch_size={data.batch_size} exceeds the {num_rows} usable rows of {data.path}"
            raise ConfigError(message, code="data.too_few_rows")
        limits = step_limits(config, num_rows, samples_per_row=samples_per_row)
        return cls(steps_per_epoch=per_epoch, total_steps=min(limits.values()))

    def info(self, step: int) -> StepInfo:
        """The position of step `step`, counted from 0."""
        epoch = math.floor(step / Fraction(self.steps_per_epoch))
        first, following = math.ceil(epoch * self.steps_per_epoch), math.ceil((epoch + 1) * self.steps_per_epoch)
        return StepInfo(
            step=step,
            epoch=epoch,
            epoch_step=step - first,
            steps_per_epoch=following - first,
            total_steps=self.total_steps,
        )


class Progress:
    """The remaining steps of a trainer; `stop` ends them early, when the goal is reached."""

    def __init__(self, length: TrainingLength, *, start_step: int = 0, ended: bool = False) -> None:
        """`ended`: the goal was reached before `start_step`."""
        self.length = length
        self.start_step = self.steps_done = start_step
        self._stopped = ended

    @property
    def is_complete(self) -> bool:
        """Whether no step remains from the start on: the run was already complete."""
        return self._stopped or self.start_step >= self.length.total_steps

    def remaining_steps(self) -> Iterator[StepInfo]:
        if self.is_complete:
            get_logger("trainer").info("training is already complete: %d steps done", self.start_step)
        for step in range(self.start_step, self.length.total_steps):
            if self._stopped:
                return
            yield self.length.info(step)
            self.steps_done = step + 1

    def stop(self) -> None:
        self._stopped = True


@contextlib.contextmanager
def updating(role: str, step: int) -> Iterator[None]:
    """The update of the model `role` in train step `step` (from 0): names both in the error of its engine."""
    try:
        yield
    except TrainingDiverged as error:
        raise error.at(role, step + 1) from error
