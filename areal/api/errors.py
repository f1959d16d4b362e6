"""The errors that areal raises on purpose. One root; each class is also a built-in kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class ArealError(Exception):
    """Root of every error that areal raises on purpose.

    Programs and tests compare the `code`, never the message, which names the cause and what to do. A class whose errors
    all mean the same thing sets `code` in its body; every other error is raised with `code=`.
    """

    code = "areal.error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code

    @property
    def counted_as(self) -> str:
        """Equal for errors that are counted together."""
        return self.code


class ConfigProblem(NamedTuple):
    """One thing that is wrong in a configuration."""

    path: str
    """Dotted path of the option, or the file or command-line word that is wrong."""
    message: str
    """The value that was given and what to change."""
    code: str = "config.conflict"
    suggestion: str = ""
    """The option that an unknown key was probably meant to be."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ConfigError(ArealError, ValueError):
    """An error in the configuration that the user can fix: the message names the key, its value and what to change.

    `problems` holds every problem that was found, with its path and code. Without `code`, the code of the error is that
    of its problems where they all have the same one, else `config.invalid`. A word of the message that is longer than
    200 characters is shortened, so that a quoted value never fills the screen.
    """

    def __init__(self, message: str, *, code: str | None = None, problems: Sequence[ConfigProblem] = ()) -> None:
        codes = {problem.code for problem in problems}
        if code is None and problems:
            code = codes.pop() if len(codes) == 1 else "config.invalid"
        super().__init__(re.sub(r"(\S{80})\S{120,}", r"\1...", message), code=code)
        self.problems = tuple(problems)


class InputError(ArealError, ValueError):
    """Bad input data (a dataset row, a prompt, a checkpoint folder): the message names it and says what to do."""


class RequestError(ArealError, ValueError):
    """A generation or control request that can never succeed as sent (HTTP 400); a retry does not help."""


class ServerUnavailable(ArealError, ConnectionError):
    """A server or peer process does not answer (dead, hung or still starting); another one may."""


class RewardError(ArealError, RuntimeError):
    """A reward function raised, exceeded its time limit, killed its worker, or returned no finite number."""


class AgentFailed(RewardError):
    """The agent raised in every session of an episode. `error_type`: the name of the first exception; empty = none."""

    code = "agent.failed"

    def __init__(self, message: str, error_type: str) -> None:
        super().__init__(message)
        self.error_type = error_type

    @property
    def counted_as(self) -> str:
        return f"agent_error: {self.error_type}" if self.error_type else "agent_error"


class LedgerError(ArealError, RuntimeError):
    """The ledger cannot be written, or it contradicts itself."""


class WeightSyncError(ArealError, RuntimeError):
    """A weight update did not reach every replica."""


class StageError(ArealError, ValueError):
    """A field of a train batch, or an output of an engine, is missing where a stage of the update reads it."""

    code = "training.stage_missing"

    def __init__(self, field: str, stage: str = "") -> None:
        """`stage`: what adds the field, where its declaration names it."""
        self.field = field
        adds = stage or "the stage or the workflow that adds it"
        super().__init__(f"{field} is missing: call {adds} first, with an engine built for its role")


class ShapeError(ArealError, ValueError):
    """Tensors that must have one shape have several."""

    code = "algorithm.shapes_differ"


class TrainingDiverged(ArealError, ArithmeticError):
    """A loss, gradient or weight of a trained model is not finite. Equal on every trainer rank; a restart is useless.

    `kind`: loss, gradient or weight. `parameter`: Hugging Face name of the first parameter that is affected. `role` and
    `step` (train steps counted from 1) are empty until the training loop adds them with `at`.
    """

    code = "training.not_finite"

    def __init__(self, kind: str, parameter: str, learning_rate: float, *, role: str = "", step: int = 0) -> None:
        self.kind, self.parameter, self.learning_rate = kind, parameter, learning_rate
        self.role, self.step = role, step
        problem = "is not finite" if kind != "weight" else "is not finite or too large to compute with"
        of = f"loss (and the gradient of {parameter})" if kind == "loss" else f"{kind} {parameter}"
        where = f"train step {step}, {role}: " if step else ""
        last = (
            f"; the last finite train step is {step - 1}" if step > 1 else "; no train step was finite" if step else ""
        )
        super().__init__(
            f"{where}the {of} {problem}, at learning rate {learning_rate:g}{last}; nothing of this step was published "
            "or saved; use a lower learning rate, and check the model and the data"
        )

    def at(self, role: str, step: int) -> TrainingDiverged:
        """The same error with the role of the model and the train step."""
        return TrainingDiverged(self.kind, self.parameter, self.learning_rate, role=role, step=step)


class LaunchError(ArealError, RuntimeError):
    """A process of the run could not be started, or died; the message names it and quotes the cause."""
