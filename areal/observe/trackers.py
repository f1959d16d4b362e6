"""Trackers of metrics: metrics.jsonl always, dashboards when configured.

Dashboards are TensorBoard, Weights & Biases, SwanLab, MLflow and Trackio; `areal.observe.trackers` makes them.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

from areal.api.config import (
    BaseExperimentConfig,
    MlflowConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandBConfig,
)
from areal.api.config.redaction import public, public_text
from areal.api.errors import ConfigError
from areal.api.registry import Entry, entries, registered
from areal.data.image_files import ImageFiles, colours_of
from areal.observe.step_files import SAMPLE_COLUMNS, JsonlTracker, SampleRow, read_step_lines
from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives the metrics of every train step, and a table of samples at some."""

    def log(self, step: int, values: dict[str, float]) -> None: ...
    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None: ...
    def flush(self) -> None:
        """Return when everything logged survives this process. A recovery continues after it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerRun:
    """What a tracker gets of its run, beside its settings."""

    config: BaseExperimentConfig
    paths: RunPaths
    images: ImageFiles
    first_step: int
    """The first step that will be logged."""
    last_step: int = -1
    """The last step that was logged before a recovery; -1 = none."""

    def id_of(self, record: str, make: Callable[[], str]) -> str:
        """The id of the run at a dashboard, which the file `record` keeps: a start from the first step is a new run."""
        path = self.paths.root / record
        if self.first_step <= 1 or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, make().encode())
        return path.read_text()


@runtime_checkable
class KnowsSteps(Protocol):
    """A tracker that replaces repeated steps, or knows which ones it has."""

    last_step: int
    """Steps up to this one are not sent to it again."""


class TensorBoardTracker:
    """Event files, written at once: the queue of tensorboardX's SummaryWriter is lost when the process is killed."""

    def __init__(self, settings: TensorBoardConfig, run: TrackerRun) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        folder = Path(settings.path or "")
        folder.mkdir(parents=True, exist_ok=True)
        self._events = EventsWriter(str(folder / "events"), f".{uuid4().hex[:8]}")
        self._event, self._summary, self._images = vars(event_pb2)["Event"], summary, run.images
        first_step = max(run.first_step, 0) if run.first_step > 1 else 0
        self.last_step = first_step - 1
        session = vars(event_pb2)["SessionLog"]  # protobuf makes these classes at import
        for start in ({"file_version": "brain.Event:2"}, {"session_log": session(status=session.START)}):
            self._write(first_step, **start)  # TensorBoard forgets what earlier files have from this step on
        self.flush()

    def _write(self, step: int, **content: Any) -> None:
        self._events.write_event(self._event(wall_time=time.time(), step=step, **content))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in _finite(values).items():
            self._write(step, summary=self._summary.scalar(name, value))
        self.flush()

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Write a Markdown table, which TensorBoard shows under Text, and its images under Images."""
        self._write(step, summary=self._summary.text("samples", _markdown_table(rows)))
        for name, path in _pictures(rows, self._images):
            picture = self._summary.image(name, colours_of(path.read_bytes()), dataformats="HWC")
            self._write(step, summary=picture)
        self.flush()

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


def wandb_id(config: BaseExperimentConfig, settings: WandBConfig) -> str:
    """The id of a new run. It ends with random letters: W&B would mix a new run with an earlier one of the same id."""
    is_time = settings.id_suffix == "timestamp"
    suffix = time.strftime("%Y_%m_%d_%H_%M_%S") if is_time else settings.id_suffix
    return "_".join(filter(None, [config.experiment_name, config.trial_name, suffix, uuid4().hex[:8]]))


class WandBTracker:
    """A Weights & Biases run. The x axis is a metric, `train_step`: W&B's own step cannot go back."""

    def __init__(self, settings: WandBConfig, run: TrackerRun) -> None:
        import wandb

        config, folder, images = run.config, run.paths.root, run.images
        folder.mkdir(parents=True, exist_ok=True)
        options = {"base_url": settings.wandb_base_url, "api_key": settings.wandb_api_key}
        connection: dict[str, Any] = {name: value for name, value in options.items() if value}
        group = "_".join([config.experiment_name, config.trial_name])
        try:
            self._run = wandb.init(
                mode=settings.mode,  # pyright: ignore[reportArgumentType] - the choices are checked with the config
                dir=str(folder),
                id=run.id_of("wandb_run", partial(wandb_id, config, settings)),
                resume="allow",
                entity=settings.entity,
                project=settings.project or config.experiment_name,
                name=settings.name or config.trial_name,
                job_type=settings.job_type,
                group=settings.group or group,
                notes=settings.notes,
                tags=settings.tags,
                config=public(dataclasses.asdict(config) | (settings.config or {})),
                settings=wandb.Settings(console="off", silent=True, **connection),
            )
        except (wandb.Error, ValueError) as error:
            # A ValueError quotes the setting that it refuses, which may contain a password.
            reason = public_text(str(error)) if isinstance(error, wandb.Error) else "check wandb_base_url and its key"
            message = f"stats_logger.wandb.mode={settings.mode}: wandb did not start: {reason}"
            raise ConfigError(message, code="launch.tracker_failed") from None
        self._table, self._image, self._images = wandb.Table, wandb.Image, images
        self._run.define_metric("train_step", hidden=True)
        self._run.define_metric("*", step_metric="train_step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(_finite(values) | {"train_step": step})

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """The table has a column for each place of an image."""
        pictures = [[self._image(path) for _, path in _pictures([row], self._images)] for row in rows]
        places = range(max(map(len, pictures), default=0))
        columns: list[str | int] = [*SAMPLE_COLUMNS, *(f"image {place + 1}" for place in places)]
        cells_of_pictures = [[row[place] if place < len(row) else None for place in places] for row in pictures]
        data = [[*row.cells(), *cells] for row, cells in zip(rows, cells_of_pictures, strict=True)]
        self._run.log({"samples": self._table(columns=columns, data=data), "train_step": step})

    def flush(self) -> None:
        """wandb sends and keeps everything in a separate process."""

    def close(self) -> None:
        self._run.finish()


class SwanLabTracker:
    """A SwanLab run. The first start creates it; a recovery continues it, without the steps that repeat."""

    def __init__(self, settings: SwanlabConfig, run: TrackerRun) -> None:
        import swanlab

        config, folder, images = run.config, run.paths.root, run.images
        logs = Path(settings.logdir or folder / "swanlog")
        logs.mkdir(parents=True, exist_ok=True)
        mode = "online" if settings.mode == "cloud" else settings.mode
        if settings.api_key and mode == "online":  # a login asks the server
            swanlab.login(api_key=settings.api_key)
        quiet = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})  # pyright: ignore[reportArgumentType] - pydantic takes the mapping
        self._run = swanlab.init(
            mode=mode,  # pyright: ignore[reportArgumentType]
            log_dir=str(logs),
            id=run.id_of("swanlab_run", lambda: uuid4().hex),
            resume="allow",
            project=settings.project or config.experiment_name,
            name=settings.name or f"{config.trial_name}_train",
            config=public(dataclasses.asdict(config) | (settings.config or {})),
            settings=quiet,
        )
        self._text, self._image, self._images = swanlab.Text, swanlab.Image, images

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(_finite(values), step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """One text per row: SwanLab shows texts at each step, and images."""
        texts = [self._text(f"{row.prompt}\n-- answer\n{row.answer}", caption=f"reward {row.reward:g}") for row in rows]
        pictures = [self._image(str(path), caption=name) for name, path in _pictures(rows, self._images)]
        self._run.log({"samples": texts} | ({"sample images": pictures} if pictures else {}), step=step)

    def flush(self) -> None:
        """SwanLab writes everything at once."""

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """An MLflow run. The first start creates it, with the configuration as parameters; a recovery continues it.

    A thread sends everything in order, because the client repeats a request for minutes when the server does not
    answer.
    """

    def __init__(self, settings: MlflowConfig, run: TrackerRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        config, folder, images, first_step = run.config, run.paths.root, run.images, run.first_step
        self._metric, self._images = Metric, images
        is_local = settings.mode == "local"
        uri = f"sqlite:///{folder.absolute()}/mlflow.db" if is_local else mlflow_uri(settings, os.environ)
        if not uri:
            message = "stats_logger.mlflow.tracking_uri is not set, nor is MLFLOW_TRACKING_URI: set one"
            raise ConfigError(message, code="launch.tracker_failed")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._client = MlflowClient(tracking_uri=uri)
            name = settings.experiment or config.experiment_name
            with _limited_request():
                experiment = self._client.get_experiment_by_name(name)
            place = (folder / "mlflow").absolute().as_uri() if is_local else None
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name, place)
            continued = self._continued_run(experiment_id, config) if first_step > 1 else None
            self._run = continued or self._new_run(experiment_id, config, settings.name or config.trial_name)
            self.last_step = self._newest_step() if continued else -1
        except MlflowException as error:
            message = f"stats_logger.mlflow.mode={settings.mode}: MLflow did not start: {public_text(str(error))}"
            raise ConfigError(message, code="launch.tracker_failed") from None
        self._calls: SimpleQueue[tuple[str, Callable[[], object]] | None] = SimpleQueue()
        # A daemon: a server that does not answer must not keep the process from ending.
        threading.Thread(target=self._send_all, name="mlflow", daemon=True).start()

    def _new_run(self, experiment_id: str, config: BaseExperimentConfig, name: str) -> str:
        from mlflow.entities import Param

        tags = {"areal.run": _run_name(config)}
        run = self._client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
        leaves = _leaves(public(dataclasses.asdict(config)))
        params = [Param(key, value[:_PARAMETER_LENGTH]) for key, value in leaves]
        for start in range(0, len(params), _PARAMETERS):
            self._client.log_batch(run, params=params[start : start + _PARAMETERS])
        return run

    def _continued_run(self, experiment_id: str, config: BaseExperimentConfig) -> str | None:
        runs = self._client.search_runs([experiment_id], f"tags.`areal.run` = '{_run_name(config)}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def _newest_step(self) -> int:
        """The newest step that MLflow has. It would keep both values of a step that is sent again."""
        names = sorted(self._client.get_run(self._run).data.metrics, key=lambda name: name != "epoch")  # of each step
        points = [point.step for name in names[:1] for point in self._client.get_metric_history(self._run, name)]
        return max(points, default=-1)

    def log(self, step: int, values: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._metric(_MLFLOW_NAME.sub("_", name), value, now_ms, step) for name, value in _finite(values).items()
        ]
        call = partial(self._client.log_batch, self._run, metrics, synchronous=True)
        self._send(f"the metrics of step {step}", call)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Write a Markdown file among the artifacts, with its images."""
        call = partial(self._client.log_text, self._run, _markdown_table(rows), f"samples/step-{step:06d}.md")
        self._send(f"the samples of step {step}", call)
        for name, path in _pictures(rows, self._images):
            self._send(f"the images of step {step}", partial(self._send_image, step, name, path))

    def _send_image(self, step: int, name: str, path: Path) -> None:
        """MLflow shows the images of one name with a slider over the steps."""
        self._client.log_image(self._run, colours_of(path.read_bytes()), key=name, step=step, synchronous=True)

    def flush(self) -> None:
        """Wait until the server has everything, at most _WAIT_S; what it does not have is in the run folder."""
        done = threading.Event()
        self._calls.put(("", done.set))
        if not done.wait(_WAIT_S):
            logger.warning("MLflow has not received everything after %g s; training continues", _WAIT_S)

    def close(self) -> None:
        self._send("the end of the run", partial(self._client.set_terminated, self._run))
        self.flush()
        self._calls.put(None)

    def _send(self, what: str, call: Callable[[], object]) -> None:
        if self._calls.qsize() < _MAX_CALLS:
            self._calls.put((what, call))
        else:
            logger.warning("MLflow does not receive %s: %d requests wait", what, _MAX_CALLS)

    def _send_all(self) -> None:
        while (order := self._calls.get()) is not None:
            what, call = order
            try:
                call()
            except Exception as error:  # noqa: BLE001 - a request to a foreign server, through a foreign library
                logger.warning("MLflow did not receive %s: %s", what, public_text(str(error)))


def mlflow_uri(settings: MlflowConfig, environ: Mapping[str, str]) -> str:
    """The address that is given for MLflow; empty when there is none, or none is needed."""
    uri = settings.tracking_uri or environ.get("MLFLOW_TRACKING_URI", "")
    return uri if settings.mode == "online" else ""


@contextmanager
def _limited_request() -> Iterator[None]:
    """Let MLflow's client, which reads these variables at each request, give up after seconds, not minutes."""
    variables = {name: value for name, value in FIRST_REQUEST.items() if name not in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


FIRST_REQUEST = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""Limits of the first request to an MLflow server: two tries of 10 s. Its variables in the environment come first."""
_WAIT_S = 30.0  # Longest wait for an MLflow server at a recovery checkpoint and at the end of a run.
_MAX_CALLS = 1000  # Most requests that wait for an MLflow server.
_PARAMETERS = 100  # MLflow's limit of parameters in a request.
_PARAMETER_LENGTH = 6000  # MLflow's limit of a parameter's length, in characters.
_MLFLOW_NAME = re.compile(r"[^\w\-./: ]")  # What MLflow refuses in the name of a metric.


def _run_name(config: BaseExperimentConfig) -> str:
    """The name without the quotation mark that ends a text in a filter of MLflow."""
    return f"{config.experiment_name}/{config.trial_name}".replace("'", '"')


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path and text of every value of a configuration."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, str(tree)


class TrackioTracker:
    """A Trackio run in its local database (TRACKIO_DIR), or in a Space of Hugging Face."""

    def __init__(self, settings: TrackioConfig, run: TrackerRun) -> None:
        import trackio

        config, images = run.config, run.images
        self._run = trackio.init(
            project=settings.project or config.experiment_name,
            name=settings.name or config.trial_name,
            space_id=settings.space_id if settings.mode == "online" else None,
            config=public(dataclasses.asdict(config)),
            resume="allow" if run.first_step > 1 else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._table, self._image, self._images = trackio.Table, trackio.Image, images

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(_finite(values), step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        pictures = [[self._image(path) for _, path in _pictures([row], self._images)] for row in rows]
        data = [[*row.cells()[:-1], picture or ""] for row, picture in zip(rows, pictures, strict=True)]
        self._run.log({"samples": self._table(columns=list(SAMPLE_COLUMNS), data=data)}, step=step)

    def flush(self) -> None:
        """Trackio writes in a thread and has no way to wait for it before the end of the run."""

    def close(self) -> None:
        self._run.finish()


def _markdown_table(rows: Sequence[SampleRow]) -> str:
    lines = [SAMPLE_COLUMNS, ["---"] * len(SAMPLE_COLUMNS), *(map(_markdown_cell, row.cells()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(text: str) -> str:
    """Text of a model inside a Markdown table: no markup, no new rows."""
    return re.sub(r"([\\`*_<>|#\[\]])", r"\\\1", text).replace("\n", "<br>")


def _pictures(rows: Sequence[SampleRow], images: ImageFiles) -> list[tuple[str, Path]]:
    """The image files of rows that are still there, each with a name for its row and place."""
    pictures = [
        (f"samples/row_{number}_image_{place}", images.path(digest))
        for number, row in enumerate(rows, start=1)
        for place, digest in enumerate(row.images, start=1)
    ]
    return [(name, path) for name, path in pictures if path.is_file()]


def _finite(values: dict[str, float]) -> dict[str, float]:
    """Dashboards show finite numbers only; the others are in metrics.jsonl."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


# ----------------------------------------------------------------------------------------------------------------------
# The trackers that a configuration turns on.
#
# A run does not start when a dashboard cannot start. Later errors of a dashboard, also at a restart, do not end
# training.


class GuardedTracker:
    """A dashboard whose errors do not end the training: metrics.jsonl has everything that it lacks.

    Steps that it has from before a recovery are not sent again: dashboards keep both values, and draw a zigzag.
    """

    def __init__(self, tracker: Tracker, last_step: int = -1) -> None:
        """`last_step`: the last one that was logged before, unless the tracker knows better."""
        self._tracker = tracker
        self._last_step = tracker.last_step if isinstance(tracker, KnowsSteps) else last_step
        self._is_failing = False

    def log(self, step: int, values: dict[str, float]) -> None:
        if step > self._last_step:
            self._call("the metrics", partial(self._tracker.log, step, values))

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        if step > self._last_step:
            self._call("the samples", partial(self._tracker.log_samples, step, rows))

    def flush(self) -> None:
        self._call("a flush", self._tracker.flush)

    def close(self) -> None:
        self._call("the end of the run", self._tracker.close)

    def _call(self, what: str, call: Callable[[], object]) -> None:
        """Log the first error, and again after a call that succeeded."""
        try:
            call()
            self._is_failing = False
        except Exception as error:  # noqa: BLE001 - of one request to a dashboard
            if not self._is_failing:
                name, reason = type(self._tracker).__name__, public_text(str(error))
                logger.warning("%s did not take %s: %s; training continues", name, what, reason)
            self._is_failing = True


def build_trackers(
    config: BaseExperimentConfig, paths: RunPaths, *, first_step: int = 0, after_failure: bool = False
) -> list[Tracker]:
    """All configured trackers, for rank 0. `first_step` is the first step that will be logged.

    `after_failure`: the trainer restarts within a run. A dashboard that does not start is then left out with a warning.
    ConfigError when a package is missing, or without `after_failure` when a dashboard does not start.
    """
    if missing := missing_packages(config):
        raise ConfigError("; ".join(missing), code="launch.package_missing")
    logged = [line["step"] for line in read_step_lines(paths.metrics)] if first_step > 1 and keys_on(config) else []
    last_step = max(logged, default=-1)
    run = TrackerRun(
        config=config, paths=paths, images=ImageFiles(paths.images), first_step=first_step, last_step=last_step
    )
    makers = {
        key: partial(entry_of_key(key).load(), config.stats_logger.settings(entry_of_key(key).name), run)
        for key in keys_on(config)
    }
    started = [_started(key, make, last_step, after_failure=after_failure) for key, make in makers.items()]
    dashboards = [tracker for tracker in started if tracker is not None]
    return [JsonlTracker(paths.metrics, first_step=first_step), *dashboards]


def missing_packages(config: BaseExperimentConfig) -> list[str]:
    """For each dashboard that is on and has no package here: its option and how to install the package."""
    missing: list[str] = []
    for key in keys_on(config):
        entry = entry_of_key(key)
        if entry.facts is not None and find_spec(entry.facts.module) is None:
            how = f"pip install -e '.[{entry.name}]' in the repository of areal"
            missing.append(f"stats_logger.{key} needs the package {entry.facts.package}: {how}")
    return missing


def keys_on(config: BaseExperimentConfig) -> list[str]:
    """The options that turn a dashboard on in this configuration."""
    chosen, keys = config.stats_logger, list[str]()
    for name, entry in entries("trackers").items():
        if entry.facts is None:
            keys += [f"trackers.{name}"] if name in chosen.trackers else []
        elif vars(vars(chosen)[name])[entry.facts.switch] not in (None, "disabled"):
            keys.append(f"{name}.{entry.facts.switch}")
    return keys


def entry_of_key(key: str) -> Entry:
    """The tracker that an option of `keys_on` turns on."""
    return registered("trackers", key.removeprefix("trackers.").partition(".")[0])


def _started(key: str, make: Callable[[], Tracker], last_step: int, *, after_failure: bool) -> GuardedTracker | None:
    try:
        return GuardedTracker(make(), last_step)
    except ConfigError as raised:
        error = raised
    except Exception as raised:  # noqa: BLE001 - of one dashboard
        reason = public_text(f"{type(raised).__name__}: {raised}")
        error = ConfigError(f"stats_logger.{key}: did not start: {reason}", code="launch.tracker_failed")
    if not after_failure:
        raise error from None
    logger.warning("%s; training continues without it", error)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Whether the packages of dashboards can be imported and take their settings, in a process of its own:
#
# `python -m areal.observe.trackers` reads a JSON object from stdin, option -> settings of its dashboard, and prints a
# list of problems. It starts no run; `asks` of a dashboard allows the search for its key and a request to its server.

_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
_MAX_CHARACTERS = 300


def _wandb(package: Any, options: Mapping[str, Any]) -> None:
    package.Settings(**options["settings"])
    if options["asks"]:
        package.login(verify=False)  # reads variables, settings files and netrc, and sends nothing


def _swanlab(package: Any, options: Mapping[str, Any]) -> None:
    if options["asks"] and package.Settings(interactive=False).api_key is None:
        raise LookupError("not set, and there is no SWANLAB_API_KEY and no swanlab login")


def _mlflow(package: Any, options: Mapping[str, Any]) -> None:
    """A database is not opened: MLflow would create its tables. A missing address is reported elsewhere."""
    if options["uri"] and not options["uri"].startswith(_DATABASES):
        client = package.MlflowClient(tracking_uri=options["uri"])
        if options["asks"]:
            client.get_experiment_by_name(options["experiment"])


def _trackio(package: Any, options: Mapping[str, Any]) -> None:
    if options["asks"] and import_module("huggingface_hub").get_token() is None:
        raise LookupError("online needs a token of Hugging Face: set HF_TOKEN, or run hf auth login")


_CHECKS: dict[str, tuple[str, Callable[[Any, Mapping[str, Any]], None]]] = {
    "wandb.mode": ("wandb", _wandb),
    "swanlab.mode": ("swanlab.api_key", _swanlab),
    "mlflow.mode": ("mlflow.tracking_uri", _mlflow),
    "trackio.mode": ("trackio.mode", _trackio),
}
"""Option -> the option that a failed check is about, and the check of the package."""


def _problems_of(dashboards: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence for each dashboard that cannot start."""
    problems: list[str] = []
    for key, dashboard in dashboards.items():
        place, what = key, f"the package {dashboard['module']} cannot be imported: "
        try:
            package = import_module(dashboard["module"])
            if key in _CHECKS:
                (place, check), what = _CHECKS[key], ""
                check(package, dashboard)
        except Exception as error:  # noqa: BLE001 - of one foreign package
            kind = "" if isinstance(error, LookupError) else f"{type(error).__name__}: "
            reason = " ".join(public_text(str(error)).split())[:_MAX_CHARACTERS]
            problems.append(f"stats_logger.{place}: {what}{kind}{reason}")
    return problems


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        problems = _problems_of(json.load(sys.stdin))
    sys.stdout.write(json.dumps(problems))
