"""What follows a train step: metrics, alarms, exports, recovery checkpoints, evaluation, the decision to end early.

Every rank calls it. Decisions are agreed by one reduction over all ranks, so that no rank enters a collective alone.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Protocol, Self

import torch

from areal.api.config import BaseExperimentConfig, Cadence, ChosenAlarm, HubUploadConfig, PPOConfig, SaverConfig
from areal.api.data import StepInfo
from areal.api.engine import Ranks, TrainEngine
from areal.api.metrics import Metrics, metric_values, result_text
from areal.observe.alarms import Alarm, AlarmRules, Row, alarm_stop, alarms_text, by_meaning
from areal.observe.log import get_logger
from areal.observe.phase import phase
from areal.observe.step_files import SampleRow, StepLines, read_step_lines
from areal.observe.trackers import Tracker, build_trackers
from areal.system.durable import COMPLETE, finish_interrupted_writes, remove_folder, write_atomic
from areal.system.heartbeat import read_beats
from areal.system.run_paths import RunPaths
from areal.trainer.minibatch import reduce_metrics
from areal.trainer.recover import ActorState, RecoverPoint, RecoverStore

# ----------------------------------------------------------------------------------------------------------------------
# The sanity alarms of a run, on trainer rank 0: reads the metrics of every step, writes alarms.jsonl and the log.


def chosen_alarms(config: BaseExperimentConfig) -> list[ChosenAlarm]:
    """The rules on metrics of train steps that apply to this kind of run."""
    compares_groups = isinstance(config, PPOConfig) and config.gconfig.n_samples > 1 and config.critic is None
    chosen = [alarm for alarm in config.alarms.chosen() if alarm.rule.per == "step"]
    return [alarm for alarm in chosen if compares_groups or alarm.rule.name != "uniform_groups"]


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
        result = self._rules.step(step, _row(values))
        for alarm in result:
            self._lines.append(step, asdict(alarm))
        for group in by_meaning(result):
            get_logger("trainer").warning("%s", alarms_text(group))
        return result

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()


def _row(values: dict[str, float]) -> Row:
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


# ----------------------------------------------------------------------------------------------------------------------
# Uploads of exports to the Hugging Face hub by a thread, while training continues.

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


class HubUploads:
    """One upload at a time, in order, each repeated after a failure. Training never waits for one, its end does."""

    def __init__(self, config: HubUploadConfig) -> None:
        """The token is that of the environment (HF_TOKEN) or of `hf auth login`."""
        self._config = config
        self._queue: SimpleQueue[tuple[int, Path, Future[None]] | None] = SimpleQueue()
        self._unfinished: dict[Path, Future[None]] = {}
        # A daemon: a connection that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="hub-upload", daemon=True)
        self._thread.start()
        self._ends = threading.Event()
        self.num_failed = 0
        """Uploads that were given up."""

    def add(self, step: int, folder: Path) -> None:
        """Upload a complete export after those before it."""
        self._unfinished[folder] = Future()
        self._queue.put((step, folder, self._unfinished[folder]))

    def waiting(self) -> set[Path]:
        """Exports whose upload has not ended. They must not be removed."""
        self._unfinished = {folder: future for folder, future in self._unfinished.items() if not future.done()}
        return set(self._unfinished)

    def close(self) -> None:
        """Wait for the uploads, at most `timeout_s` together; the rest is given up."""
        self._queue.put(None)
        if waiting := sorted(self.waiting()):
            text = "waits for the upload of %s to %s, at most %g s (saver.hub_upload.timeout_s)"
            names = ", ".join(folder.name for folder in waiting)
            get_logger("trainer").info(text, names, self._config.repo_id, self._config.timeout_s)
            wait(self._unfinished.values(), self._config.timeout_s)
        self._ends.set()
        for folder in sorted(self.waiting()):
            self._report(folder)

    def _run(self) -> None:
        while (order := self._queue.get()) is not None:
            step, folder, done = order
            self._upload(step, folder)
            done.set_result(None)

    def _report(self, folder: Path) -> None:
        self.num_failed += 1
        text = "%s was not uploaded to %s; to upload it: hf upload %s %s"
        get_logger("trainer").error(text, folder, self._config.repo_id, self._config.repo_id, folder)

    def _upload(self, step: int, folder: Path) -> None:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(self._config.retries + 1):
            if self._ends.is_set():
                break
            try:
                self._once(step, folder)
            except Exception as error:  # noqa: BLE001 - a request to a foreign server, through a foreign library
                text = "the upload of %s to %s failed (attempt %d of %d): %s"
                facts = (folder, self._config.repo_id, attempt + 1, self._config.retries + 1)
                get_logger("trainer").warning(text, *facts, " ".join(str(error).split())[:500])
                if is_final(error):
                    break
                self._ends.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                get_logger("trainer").info("uploaded %s to %s", folder.name, self._config.repo_id)
                return
        if not self._ends.is_set():
            self._report(folder)

    def _once(self, step: int, folder: Path) -> None:
        from huggingface_hub import HfApi

        hub, repo = HfApi(), self._config.repo_id
        hub.create_repo(repo, private=self._config.private, exist_ok=True)
        hub.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=f"After {step} train steps", ignore_patterns=[COMPLETE]
        )


def is_final(error: Exception) -> bool:
    """Whether a repeated upload would fail again: the hub refused it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is not None and 400 <= status < 500 and status not in (408, 409, 412, 429)


# ----------------------------------------------------------------------------------------------------------------------
# Exports of the trained models during a run: when one is written, which ones stay, and their upload.

_SCORES = "scores.json"  # Next to the exports: {step: value of saver.keep_best}.


class Saver:
    """Writes checkpoints/<role>/step-000123 (123 steps done) and removes those that the configuration does not keep."""

    def __init__(self, folder: Path, engines: dict[str, TrainEngine], ranks: Ranks, config: SaverConfig) -> None:
        self._folder = folder
        self._engines = engines
        self._config = config
        self._ranks = ranks
        self._num_saved = 0
        upload = config.hub_upload if ranks.rank == 0 else None
        self._uploads = HubUploads(upload) if upload and upload.repo_id else None
        if ranks.rank == 0:
            for role in engines:
                finish_interrupted_writes(folder / role)

    @property
    def failed_uploads(self) -> int:
        """Uploads given up by this process."""
        return self._uploads.num_failed if self._uploads else 0

    def save(
        self, steps_done: int, metrics: Mapping[str, float], *, is_last: bool = False, evaluating: int | None = None
    ) -> None:
        """Export every trained model; a collective. `metrics`: of this step, on rank 0. `evaluating`: the export whose
        score `scored` will bring, which stays until then."""
        name = f"step-{steps_done:06d}"
        for role, engine in self._engines.items():
            engine.save(self._folder / role / name, with_optimizer=False)
        self._num_saved += 1
        if self._ranks.rank == 0:
            if metrics.get("eval/version", steps_done) != steps_done:
                metrics = {name: value for name, value in metrics.items() if not name.startswith("eval/")}
            scores = self._keep_score(steps_done, metrics, is_coming=evaluating == steps_done)
            if self._uploads and (is_last or self._num_saved % self._config.hub_upload.every == 0):
                self._uploads.add(steps_done, self._folder / next(iter(self._engines)) / name)
            self._remove_old(steps_done, scores, evaluating)
        get_logger("trainer").info("exported %s to %s", name, self._folder)

    def scored(self, step: int, metrics: Mapping[str, float]) -> None:
        """The evaluation after `step`, which ran in the background, has these metrics. The next save uses them."""
        folder = self._folder / next(iter(self._engines)) / f"step-{step:06d}"
        if self._ranks.rank == 0 and self._config.keep_best in metrics and folder.exists():
            scores = self._scores() | {step: metrics[self._config.keep_best]}
            write_atomic(self._folder / _SCORES, json.dumps(scores).encode())

    def close(self) -> None:
        """Wait for uploads."""
        if self._uploads:
            self._uploads.close()

    def _scores(self) -> dict[int, float]:
        path = self._folder / _SCORES
        known = json.loads(path.read_bytes()) if path.exists() else {}
        return {int(step): float(value) for step, value in known.items()}

    def _keep_score(self, step: int, metrics: Mapping[str, float], *, is_coming: bool) -> dict[int, float]:
        """The scores of the exports by step; those of later steps were written before a recovery."""
        if not self._config.keep_best:
            return {}
        scores = {scored: value for scored, value in self._scores().items() if scored < step}
        if self._config.keep_best in metrics:
            scores[step] = metrics[self._config.keep_best]
        elif not is_coming:
            text = "%s: step %d has no such metric (saver.keep_best)%s: its export cannot be the best"
            name = self._config.keep_best.rpartition("/")[0]
            why = f": {result_text(metrics, name)}" if f"{name}/answers" in metrics else ""
            get_logger("trainer").warning(text, self._folder, step, why)
        write_atomic(self._folder / _SCORES, json.dumps(scores).encode())
        return scores

    def _remove_old(self, step: int, scores: Mapping[int, float], evaluating: int | None) -> None:
        uploading = self._uploads.waiting() if self._uploads else set[Path]()
        for role in self._engines:
            # Exports of later steps were written before a recovery; they do not count.
            made = {int(path.name[5:]): path for path in (self._folder / role).glob("step-*")}
            for old in removable([exported for exported in made if exported <= step], scores, self._config):
                if made[old] not in uploading and old != evaluating:  # the next save removes it
                    remove_folder(made[old])


def removable(steps: Collection[int], scores: Mapping[int, float], config: SaverConfig) -> list[int]:
    """Which exports the configuration does not keep. `scores`: of those with a metric."""
    if config.keep_last is None:
        return []
    kept = set(sorted(steps)[-config.keep_last :])
    if config.keep_every is not None:
        kept |= {step for step in steps if step % config.keep_every == 0}
    if config.keep_best and (known := [step for step in sorted(steps, reverse=True) if step in scores]):
        choose = max if config.best_is == "highest" else min
        kept.add(choose(known, key=scores.__getitem__))
    return sorted(set(steps) - kept)


class BackgroundEvaluator(Protocol):
    """Evaluates a version during the training of later ones."""

    def begin(self, steps_done: int) -> bool:
        """Begin the evaluation after `steps_done` train steps; False: it cannot. Called on rank 0."""
        ...

    def is_running(self, steps_done: int) -> bool:
        """Called on rank 0."""
        ...

    def result(self, steps_done: int) -> dict[str, float] | None:
        """Its metrics, or None when it has none; blocks until it has ended. Called on every rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """What differs between kinds of training."""

    evaluate: Callable[[int], dict[str, float]] | None
    """Steps done -> metrics. Called on every rank and takes equally long on each; rank 0's result is used."""
    background: BackgroundEvaluator | None = None
    """None: training waits for each evaluation."""
    goal_reached: Callable[[dict[str, float]], bool] = lambda values: False
    """Evaluation metrics of rank 0 -> whether training ends."""
    committed: Callable[[int, Path], None] = lambda step, path: None
    """Called on rank 0 when the recovery checkpoint after this number of steps is complete."""
    actor_state: Callable[[], ActorState] = ActorState
    """State of the actor role for a recovery checkpoint, besides its engine."""


@dataclass(slots=True)
class CadenceState:
    """Decides after each step whether a periodic action is due. Pure; the clock is an argument."""

    cadence: Cadence
    last_fired_s: float = 0.0
    """Seconds of training when the action last ran."""

    def due(self, info: StepInfo, *, now_s: float) -> bool:
        """Whether to act after step `info`. `now_s`: seconds of training so far."""
        cadence = self.cadence
        by_epoch = cadence.freq_epochs is not None and info.is_epoch_end and (info.epoch + 1) % cadence.freq_epochs == 0
        by_step = cadence.freq_steps is not None and (info.step + 1) % cadence.freq_steps == 0
        by_time = cadence.freq_secs is not None and now_s - self.last_fired_s >= cadence.freq_secs
        return by_epoch or by_step or by_time


class AfterStep:
    """Called once per train step on every rank; returns True when training should end."""

    def __init__(
        self,
        config: BaseExperimentConfig,
        engines: dict[str, TrainEngine],
        ranks: Ranks,
        *,
        paths: RunPaths,
        recover: RecoverStore,
        trackers: list[Tracker],
        hooks: StepHooks,
        first_step: int = 1,
    ) -> None:
        """`engines`: the trained models by role. `first_step`: the first train step that follows, counted from 1.

        While the file `paths.checkpoint_request` exists, each step is followed by a recovery checkpoint.
        """
        self._config = config
        self._lead = next(iter(engines.values()))
        self._ranks = ranks
        self._saver = Saver(paths.checkpoints, engines, ranks, config.saver)
        self._paths = paths
        self._recover = recover
        self._trackers = trackers
        self._hooks = hooks
        self._chosen_alarms = chosen_alarms(config)
        self._alarms = RunAlarms(self._chosen_alarms, paths, first_step=first_step) if ranks.rank == 0 else None
        self._cadences = {
            "save": CadenceState(config.saver),
            "recover": CadenceState(config.recover),
            "evaluate": CadenceState(config.evaluator),
        }
        self._began_s = time.monotonic()
        self._evaluating: int | None = None  # Train steps done at the evaluation that runs in the background.
        self._saved_step = first_step - 1  # Train steps done at the newest recovery checkpoint of this process.

    @classmethod
    def of_run(
        cls,
        config: BaseExperimentConfig,
        engines: dict[str, TrainEngine],
        ranks: Ranks,
        *,
        hooks: StepHooks,
        recovered: dict[str, TrainEngine],
        after_failure: bool,
        newest_step: Callable[[], int | None] = lambda: None,
    ) -> tuple[Self, RecoverPoint | None]:
        """Return what follows the steps of a run, and the checkpoint that it continues from; a collective.

        `recovered`: the engines in a recovery checkpoint, which is already loaded. `after_failure`: this is a restart.
        `newest_step`: as in RecoverStore.start_from.
        """
        paths = RunPaths.of(config)
        recover = RecoverStore(paths.recover, config.recover, recovered, ranks, committed=hooks.committed)
        source = recover.start_from(after_failure=after_failure, newest_step=newest_step)
        point = recover.load(source) if source else None
        first_step = point.step + 1 if point else 1
        trackers: list[Tracker] = []
        if ranks.rank == 0:
            trackers = build_trackers(config, paths, first_step=first_step, after_failure=after_failure)
        after_step = cls(
            config, engines, ranks, paths=paths, recover=recover, trackers=trackers, hooks=hooks, first_step=first_step
        )
        if point is not None:
            after_step.continue_from(point)
        return after_step, point

    def continue_from(self, point: RecoverPoint) -> None:
        """Continue the clocks of a recovered run."""
        self._began_s = time.monotonic() - point.elapsed_s
        for name, fired_s in point.cadence_s.items():
            self._cadences[name].last_fired_s = fired_s
        self._evaluating = point.evaluating

    def continue_evaluation(self) -> None:
        """Begin the evaluation of the recovered version again, if it had not ended."""
        if self._evaluating == self._saved_step and self._hooks.background is not None:
            self._evaluating = self._saved_step if self._begin(self._saved_step) else None

    def before_first(self) -> None:
        """Evaluate before any training."""
        if self._hooks.evaluate is not None:
            self._track(0, values := self._hooks.evaluate(0))
            if (stopped_by := self._stopped_by(0, values)) is not None:
                raise alarm_stop(stopped_by, 0)

    def __call__(self, info: StepInfo, metrics: Metrics, seconds: dict[str, float]) -> bool:
        """Raises AlarmStop on every rank when an alarm ends the run."""
        elapsed_s = time.monotonic() - self._began_s
        due = self._actions_due(info, elapsed_s)
        values = metric_values(reduce_metrics(metrics, self._lead))
        values |= {f"seconds/{name}": spent for name, spent in seconds.items()}
        values |= {"epoch": float(info.epoch), "seconds/elapsed": elapsed_s}
        if self._ranks.rank == 0:
            beats = read_beats(self._paths.alive).items()
            values |= {f"memory/{name}": beat.resident_bytes / 2**30 for name, beat in beats if beat.resident_bytes}
            values |= {f"cpu/{name}": beat.cpu_s for name, beat in beats if beat.cpu_s is not None}
            values |= (
                {"failed_uploads": float(self._saver.failed_uploads)} if self._config.saver.hub_upload.repo_id else {}
            )
        ends = False
        for evaluated in self._evaluations(info, due):
            values |= evaluated
            (is_reached,) = self._any([self._ranks.rank == 0 and self._hooks.goal_reached(evaluated)])
            ends = ends or is_reached
        self._track(info.step + 1, values)
        stopped_by = self._stopped_by(info.step + 1, values)
        for name in due & self._cadences.keys():
            self._cadences[name].last_fired_s = elapsed_s  # before the checkpoint that contains it
        if "save" in due or info.is_last or ends:
            with phase("wait_export"):
                self._saver.save(info.step + 1, values, is_last=info.is_last or ends, evaluating=self._evaluating)
        is_end = info.is_last or ends or stopped_by is not None
        if "recover" in due or (self._config.recover.mode != "disabled" and is_end):
            goal = self._config.evaluator.stop_at if ends else {}
            self.save_recovery(info.step + 1, goal_reached=goal, waits=is_end or "requested" in due)
        if stopped_by is not None:
            raise alarm_stop(stopped_by, info.step + 1)
        return ends

    def _evaluations(self, info: StepInfo, due: set[str]) -> list[dict[str, float]]:
        """The results of evaluations that are known after a step. One that is due begins in the background, or ends.

        At most one runs in the background: the next one, and the end of the run, wait for it.
        """
        steps_done, evaluate, background = info.step + 1, self._hooks.evaluate, self._hooks.background
        if evaluate is None:
            return []
        is_due, results = "evaluate" in due, list[dict[str, float]]()
        if self._evaluating is not None and background is not None and due & {"evaluate", "evaluated"}:
            before, self._evaluating = self._evaluating, None
            with phase("wait_evaluation"):
                evaluation = background.result(before)
            if evaluation is not None:
                self._saver.scored(before, evaluation)
                results.append(evaluation)
            else:
                is_due, background = True, None
        if is_due and not info.is_last and background is not None and self._begin(steps_done):
            self._evaluating = steps_done
        elif is_due:
            with phase("wait_evaluation"):
                results.append(evaluate(steps_done))
        return results

    def _begin(self, steps_done: int) -> bool:
        """Begin an evaluation in the background, by rank 0 for all."""
        background = self._hooks.background
        (begun,) = self._any([self._ranks.rank == 0 and background is not None and background.begin(steps_done)])
        return begun

    def _stopped_by(self, step: int, values: dict[str, float]) -> ChosenAlarm | None:
        """Look for alarms on rank 0; the one that ends the run, on every rank."""
        raised = self._alarms.look(step, values) if self._alarms is not None else []
        stopping = {alarm.name for alarm in raised if alarm.action == "stop"}
        may_stop = [chosen for chosen in self._chosen_alarms if chosen.action == "stop"]
        if not may_stop:
            return None
        flags = self._any([chosen.rule.name in stopping for chosen in may_stop])
        return next((chosen for chosen, flag in zip(may_stop, flags, strict=True) if flag), None)

    def close(self) -> None:
        self._recover.close()
        self._saver.close()
        if self._alarms is not None:
            self._alarms.close()
        for tracker in self._trackers:
            tracker.close()

    def _actions_due(self, info: StepInfo, elapsed_s: float) -> set[str]:
        """The periodic actions, "requested" when a checkpoint is; finishes a checkpoint that all ranks have written."""
        due_here = {name for name, state in self._cadences.items() if state.due(info, now_s=elapsed_s)}
        due_here |= {"requested"} if self._paths.checkpoint_request.exists() else set()
        due_here |= {"writing"} if self._recover.is_writing else set()
        background = self._hooks.background if self._ranks.rank == 0 else None
        if background is not None and self._evaluating is not None and not background.is_running(self._evaluating):
            due_here |= {"evaluated"}
        names = [*self._cadences, "requested", "writing", "evaluated"]
        flags = self._any([name in due_here for name in names])
        due = {name for name, flag in zip(names, flags, strict=True) if flag}
        if "writing" not in due:
            self._recover.finish()
        due |= {"recover"} if "requested" in due else set()
        if self._config.recover.mode == "disabled":
            due -= {"recover", "requested"}
        return due | {"evaluate"} if info.is_last else due

    def save_recovery(
        self, steps_done: int, *, goal_reached: Mapping[str, float] = MappingProxyType({}), waits: bool = True
    ) -> None:
        """Save the recovery checkpoint after `steps_done` train steps, unless it was saved; a collective.

        `waits`: until it is complete, also with recover.async_save.
        """
        if steps_done != self._saved_step:
            self._saved_step = steps_done
            point = RecoverPoint(
                step=steps_done,
                cadence_s={name: state.last_fired_s for name, state in self._cadences.items()},
                elapsed_s=time.monotonic() - self._began_s,
                goal_reached=dict(goal_reached),
                actor=self._hooks.actor_state(),
                evaluating=self._evaluating,
            )
            for tracker in self._trackers:
                tracker.flush()
            if self._alarms is not None:
                self._alarms.flush()
            with phase("wait_checkpoint"):
                self._recover.save(point, waits=waits or not self._config.recover.async_save)
        elif waits:
            self._recover.finish()

    def log_samples(self, steps_done: int, rows: Sequence[SampleRow]) -> None:
        """Give a table of samples to the trackers."""
        for tracker in self._trackers:
            tracker.log_samples(steps_done, rows)

    def _track(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def _any(self, flags: list[bool]) -> list[bool]:
        """The flags that are set on any rank."""
        largest: list[float] = self._ranks.all_reduce(torch.tensor(flags, dtype=torch.float64), "max").tolist()
        return [bool(value) for value in largest]
