"""The alarms about episodes: raised by the controller as soon as an episode has ended, whether or not a step is done.

The other alarms are about the metrics of train steps, and trainer rank 0 raises them. Both append to alarms.jsonl.
"""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from areal.api.config import ChosenAlarm
from areal.observe.alarms import Alarm, AlarmStop, alarm_of, alarm_stop, alarms_text, by_meaning
from areal.observe.log import get_logger
from areal.observe.step_files import append_step_line

WINDOW_BATCHES, MIN_EPISODES = 20, 3
LOOK_S = 1.0
"""Seconds between two looks at the counters of the servers."""
SHARES = ("agent_errors", "failed_episodes", "missing_rewards")
"""Alarms on the share of the episodes of the window; the others are on their number."""

_log = get_logger(__name__)


class EpisodeAlarms:
    """Counts what ended episodes show, by the name of the alarm, over the newest WINDOW_BATCHES batches of them."""

    def __init__(
        self,
        chosen: Sequence[ChosenAlarm],
        path: Path | None,
        *,
        batch_size: int,
        steps_done: Callable[[], int],
        invalid_answers: Callable[[], Mapping[str, int]],
        on_stop: Callable[[AlarmStop], None],
    ) -> None:
        """`path`: of alarms.jsonl, None = only the log. `invalid_answers`: their number so far, by server.

        `on_stop` gets the error of an alarm with action=stop.
        """
        self._chosen = {one.rule.name: one for one in chosen if one.rule.per == "episode"}
        self._num_ended = 0
        self._beyond: dict[str, int] = {}
        """The number of ended episodes when an alarm was last beyond its limit."""
        self._path = path
        self._steps_done, self._invalid_answers, self._on_stop = steps_done, invalid_answers, on_stop
        self._window: deque[Sequence[str]] = deque(maxlen=WINDOW_BATCHES * batch_size)
        self._counts: Counter[str] = Counter()
        self._details: dict[str, str] = {}
        """The newest cause of each alarm."""
        self._looked_s = float("-inf")
        self._num_invalid = 0
        self._has_stopped = False

    def ended(self, signs: Sequence[str], detail: str, now_s: float) -> None:
        """An episode ended. `signs`: the alarms that count it; `detail`: its cause."""
        if len(self._window) == self._window.maxlen:
            self._counts.subtract(self._window[0])
        self._window.append(signs)
        self._num_ended += 1
        self._counts.update(signs)
        self._details.update(dict.fromkeys(signs, detail))
        has_news = bool(signs)
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            has_news |= self._look_at_servers()
        if has_news and not self._has_stopped:  # without news no value rises
            self._look()

    def _look_at_servers(self) -> bool:
        counts = {name: count for name, count in self._invalid_answers().items() if count}
        has_news, self._num_invalid = sum(counts.values()) != self._num_invalid, sum(counts.values())
        if has_news:
            self._details["invalid_numbers"] = ", ".join(f"{name} sent {count}" for name, count in counts.items())
        return has_news

    def _look(self) -> None:
        steps, found = self._steps_done(), list[Alarm]()
        for name, chosen in self._chosen.items():
            value, before = self._value(name), self._beyond.get(name)
            if not chosen.rule.is_beyond(value, chosen.limit):
                continue
            self._beyond[name] = self._num_ended
            if before is None or self._num_ended - before > (self._window.maxlen or 0):  # else it is the same cause
                alarm = alarm_of(steps, chosen, value)
                found.append(dataclasses.replace(alarm, causes=f"{self._details.get(name)}; {alarm.causes}"))
        for alarm in found:
            if self._path is not None:
                append_step_line(self._path, steps, dataclasses.asdict(alarm))
        for group in by_meaning(found):
            _log.warning("%s", alarms_text(group))
        for alarm in found:
            if alarm.action == "stop" and not self._has_stopped:
                self._has_stopped = True
                self._on_stop(alarm_stop(self._chosen[alarm.name], steps))

    def _value(self, name: str) -> float:
        count = self._counts[name]
        if name in SHARES:
            return count / len(self._window) if count >= MIN_EPISODES else 0.0
        return float(count + (self._num_invalid if name == "invalid_numbers" else 0))
