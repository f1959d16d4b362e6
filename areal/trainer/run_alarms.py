"""The sanity alarms of a run, on trainer rank 0: reads the metrics of every step, writes alarms.jsonl and the log."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from areal.api.config import BaseExperimentConfig, ChosenAlarm, PPOConfig
from areal.api.errors import ArealError
from areal.observe.alarms import Alarm, AlarmRules, Row, alarms_text, by_meaning
from areal.observe.log import get_logger
from areal.observe.step_files import StepLines, read_step_lines
from areal.system.run_paths import RunPaths


class AlarmStop(ArealError, RuntimeError):
    """An alarm with action=stop ended the run. A restart is useless."""


def alarm_stop(chosen: ChosenAlarm, step: int) -> AlarmStop:
    """The error that ends the run after `step` train steps."""
    rule = chosen.rule
    return AlarmStop(
        f"{rule.meaning}: the alarm {rule.name} ended the run after train step {step} "
        f"({rule.side} {chosen.limit:g} in {chosen.steps} steps, action stop; alarms.jsonl contains the value). "
        f"Likely causes: {rule.causes}. Look at: {rule.look_at}",
        code=rule.code,
    )


def chosen_alarms(config: BaseExperimentConfig) -> list[ChosenAlarm]:
    """The rules that apply to this kind of run."""
    compares_groups = isinstance(config, PPOConfig) and config.gconfig.n_samples > 1 and config.critic is None
    return [one for one in config.alarms.chosen() if compares_groups or one.rule.name != "uniform_groups"]


class RunAlarms:
    """Raises the alarms of a run."""

    def __init__(self, chosen: Sequence[ChosenAlarm], paths: RunPaths, *, first_step: int) -> None:
        """`first_step`: the first step to look at; the state follows from the metrics of the steps before."""
        self._rules = AlarmRules(chosen)
        for line in read_step_lines(paths.metrics):
            if 0 < line["step"] < first_step:
                self._rules.step(line["step"], _row(line))
        self._lines = StepLines(paths.alarms, first_step=first_step)

    def look(self, step: int, values: dict[str, float]) -> list[Alarm]:
        """Record the alarms that the metrics after train step `step` raise, and return them."""
        found = self._rules.step(step, _row(values))
        for alarm in found:
            self._lines.append(step, asdict(alarm))
        for group in by_meaning(found):
            get_logger("trainer").warning("%s", alarms_text(group))
        return found

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()


def _row(values: dict[str, float]) -> Row:
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
