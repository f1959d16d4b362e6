"""Options of saving, evaluating, recovering, tracking and tracing."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from areal.api.alarm_rules import ALARM_NAMES, ALARM_RULES, AlarmAction, AlarmRule
from areal.api.config.schema import (
    Problem,
    Problems,
    below,
    choice,
    given,
    number,
    option,
    satisfies,
    section,
    unless,
    when,
)
from areal.api.config.validate import converted
from areal.api.registry import entries, registered


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How often something happens: whichever limit is reached first; all null = never."""

    freq_epochs: int | None = number(None, low=1)
    """Interval in epochs; null = no interval in epochs."""
    freq_steps: int | None = number(None, low=1)
    """Interval in train steps; null = no interval in steps."""
    freq_secs: int | None = number(None, low=1)
    """Interval in seconds; null = no interval in seconds."""

    @property
    def is_set(self) -> bool:
        """Whether any interval is set."""
        return any(freq is not None for freq in (self.freq_epochs, self.freq_steps, self.freq_secs))


_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SERVER = re.compile(r"https?://[^\s/]")
_UPLOADS = given("repo_id")


@dataclass(frozen=True, kw_only=True)
class HubUploadConfig:
    """Uploads of exports of the first model to the Hugging Face hub, while training continues."""

    repo_id: str = option("", also="cosmos-rl: ckpt.hf_repo_name")
    """Repository NAME or OWNER/NAME, which is created if it is missing; empty = no uploads."""
    private: bool = option(True, relevant=_UPLOADS)
    """Whether a created repository is private."""
    every: int = number(1, low=1, relevant=_UPLOADS)
    """Upload every n-th export of a process, and the last of the run."""
    retries: int = number(5, low=0, relevant=_UPLOADS)
    """Repetitions of a failed upload."""
    timeout_s: float = number(1800.0, low=0, relevant=_UPLOADS)
    """Seconds that the end of the run waits for uploads."""

    def problems(self) -> Problems:
        if self.repo_id and not _HUB_NAME.fullmatch(self.repo_id):
            yield "repo_id", f"{self.repo_id!r} is not a name on the hub: use NAME or OWNER/NAME"


@dataclass(frozen=True, kw_only=True)
class SaverConfig(Cadence):
    """Exports in Hugging Face format to checkpoints/; the last step of a run is always exported."""

    keep_last: int | None = number(None, low=1, also="cosmos-rl: ckpt.max_keep")
    """Number of newest exports to keep; null = all."""
    keep_every: int | None = number(None, low=1, relevant=given("keep_last"))
    """Keep exports of these steps too: multiples of this number; null = none."""
    keep_best: str = option("", relevant=given("keep_last"))
    """Keep the export with the best value of this metric too, for example eval/greedy/reward; empty = none."""
    best_is: str = choice("highest", "highest", "lowest", relevant=given("keep_best"))
    """Which value of keep_best is the best."""
    hub_upload: HubUploadConfig = section(HubUploadConfig)
    """Uploads to the Hugging Face hub."""


_GENERATES = satisfies("/", lambda config: hasattr(config, "gconfig"), "the training generates answers")


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig(Cadence):
    """Evaluation on valid_dataset with the training workflow; the last step of a run is always evaluated."""

    eval_before_train: bool = option(False, also="verl: trainer.val_before_train")
    """Evaluate once before the first train step."""
    mode: str = choice("auto", "auto", "background", "blocking", relevant=_GENERATES)
    """blocking: training waits; background: one server keeps the version; auto: that with 2 servers, no stop_at."""
    modes: list[str] = section(lambda: ["sampled"], relevant=_GENERATES)
    """Evaluation modes: sampled = with eval_gconfig, greedy = the same with greedy decoding."""
    sets: dict[str, str] = section(dict[str, str], relevant=_GENERATES)
    """Further held-out sets, name -> path, read with the options of valid_dataset; metrics eval/MODE/NAME/..."""
    n_samples: int = number(1, low=1, relevant=_GENERATES, also="verl: rollout.val_kwargs.n")
    """Answers to each row in the mode sampled; above 1 the metrics include mean@n, pass@k and majority@n."""
    correct_reward: float = option(1.0, relevant=_GENERATES)
    """An answer is correct with at least this reward (pass@k, majority vote)."""
    answer_fn: str = option("", relevant=_GENERATES)
    """Final answer of a completion for the majority vote: number, choice, text or a function; empty = by reward_fn."""
    missing_reward: str = choice("zero", "zero", "leave_out", "refuse", relevant=_GENERATES)
    """Answers without a reward: zero = 0 if the agent is the cause, else no result; leave_out; refuse = no result."""
    stop_at: dict[str, float] = section(dict[str, float], relevant=_GENERATES)
    """End training at these mean rewards by mode ({greedy: 0.95}); {} = never. Few answers are noisy: use 1000."""

    def goals_reached(self, rewards: Mapping[str, float]) -> bool:
        """Whether there are goals in stop_at, and `rewards` by mode reach all of them."""
        return bool(self.stop_at) and all(rewards.get(mode, -math.inf) >= goal for mode, goal in self.stop_at.items())

    def problems(self) -> Problems:
        for mode in self.modes:
            if mode not in ("sampled", "greedy"):
                yield Problem("modes", f"{mode!r} is not a mode: use sampled or greedy", "config.not_a_choice")
        if not self.modes or len(set(self.modes)) < len(self.modes):
            text = f"{self.modes} must contain sampled, greedy or both, each once"
            yield Problem("modes", text, "config.not_a_choice")
        for name in self.sets:
            if not name.strip() or "/" in name or name in ("episode", ""):
                text = f"{name!r} begins the names of metrics: use a short name without /, not `episode`"
                yield "sets", text
        if not math.isfinite(self.correct_reward):
            yield Problem("correct_reward", f"{self.correct_reward} is not a finite number", "config.out_of_range")
        for mode, goal in self.stop_at.items():
            if mode not in self.modes:
                yield "stop_at", f"{mode!r} is not one of modes={self.modes}: add it there"
            if not math.isfinite(goal):
                yield Problem("stop_at", f"{goal} for {mode!r} is not a finite number", "config.out_of_range")


_RECOVERS = unless("mode", "disabled")


@dataclass(frozen=True, kw_only=True)
class RecoverConfig(Cadence):
    """Recovery checkpoints: all state that a restarted run needs. The newest two are kept.

    One is also written at the end of a run and after the first Ctrl-C; without an interval, only then.
    """

    freq_epochs: int | None = number(None, low=1, relevant=_RECOVERS)
    """Interval in epochs; null = no interval in epochs."""
    freq_steps: int | None = number(None, low=1, relevant=_RECOVERS)
    """Interval in train steps; null = no interval in steps."""
    freq_secs: int | None = number(600, low=1, relevant=_RECOVERS | when("freq_secs", None))
    """Interval in seconds, which bounds the share of time for checkpoints; null = no interval in seconds."""
    mode: str = choice("auto", "auto", "disabled", "fault", "resume", also="verl: trainer.resume_mode")
    """disabled = off; auto = recover if possible; fault = after a failure in the run; resume = needs a checkpoint."""
    async_save: bool = option(True, relevant=_RECOVERS, also="verl: actor.checkpoint.async_save")
    """Training waits only for the copy of a checkpoint to host memory, while a thread writes it; false = for all."""
    retries: int = number(3, low=0)
    """Maximum restarts of one process (all trainer ranks count as one) without a new train step in between."""

    def problems(self) -> Problems:
        if self.mode == "fault" and not self.is_set:
            text = f"{self.mode} needs recovery checkpoints, but no interval is set: set freq_steps"
            yield Problem("mode", text, "config.missing_requirement")


_TRACKS = unless("mode", "disabled", None)


@dataclass(frozen=True, kw_only=True)
class WandBConfig:
    """Weights & Biases."""

    mode: str = choice("disabled", "disabled", "online", "offline", "shared")
    """Mode of the wandb client; disabled = off, offline = write to the run folder."""
    wandb_base_url: str = option("", relevant=_TRACKS)
    """URL of the wandb server; empty = the public server."""
    wandb_api_key: str = option("", relevant=_TRACKS)
    """API key; empty = the key from the environment."""
    entity: str | None = option(None, relevant=_TRACKS)
    """Team or user name; null = the default of the API key."""
    project: str | None = option(None, relevant=_TRACKS, also="verl: trainer.project_name")
    """Project name; null = experiment_name."""
    name: str | None = option(None, relevant=_TRACKS, also="verl: trainer.experiment_name")
    """Run name; null = trial_name."""
    job_type: str | None = option(None, relevant=_TRACKS)
    """Job type; null = none."""
    group: str | None = option(None, relevant=_TRACKS)
    """Group name; null = experiment_name_trial_name."""
    notes: str | None = option(None, relevant=_TRACKS)
    """Notes; null = none."""
    tags: list[str] | None = option(None, relevant=_TRACKS)
    """Tags; null = none."""
    config: dict[str, Any] | None = option(None, relevant=_TRACKS)
    """More entries of the run's configuration there; null = none."""
    id_suffix: str | None = option("train", relevant=_TRACKS)
    """Part of the run id before its random end; timestamp = the time of the start, which a recovery keeps."""

    def problems(self) -> Problems:
        if self.wandb_base_url and not _SERVER.match(self.wandb_base_url):
            shown = "this text with @" if "@" in self.wandb_base_url else repr(self.wandb_base_url)
            yield "wandb_base_url", f"{shown} is not the URL of a server: use https://HOST"


@dataclass(frozen=True, kw_only=True)
class SwanlabConfig:
    """SwanLab."""

    project: str | None = option(None, relevant=_TRACKS)
    """Project name; null = experiment_name."""
    name: str | None = option(None, relevant=_TRACKS)
    """Run name; null = trial_name followed by _train."""
    mode: str | None = choice("disabled", "disabled", "online", "cloud", "local", "offline")
    """Mode of the SwanLab client; disabled and null = off, cloud = online, offline and local = to the run folder."""
    api_key: str | None = option(None, relevant=when("mode", "online", "cloud"))
    """API key; null = the key from the environment."""
    config: dict[str, Any] | None = option(None, relevant=_TRACKS)
    """More entries of the run's configuration there; null = none."""
    logdir: str | None = option(None, relevant=_TRACKS)
    """Folder of SwanLab's files; null = swanlog in the run folder."""


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """TensorBoard."""

    path: str | None = None
    """Folder of the event files; null = off."""


@dataclass(frozen=True, kw_only=True)
class MlflowConfig:
    """MLflow."""

    mode: str = choice("disabled", "disabled", "online", "local", also="verl: trainer.logger")
    """disabled = off; online = to tracking_uri; local = to mlflow.db in the run folder."""
    tracking_uri: str = option("", relevant=when("mode", "online"))
    """URI of the MLflow server or database; empty = MLFLOW_TRACKING_URI of the environment, which must be set then."""
    experiment: str | None = option(None, relevant=_TRACKS, also="verl: trainer.project_name")
    """Name of the MLflow experiment; null = experiment_name."""
    name: str | None = option(None, relevant=_TRACKS, also="verl: trainer.experiment_name")
    """Run name; null = trial_name."""

    def problems(self) -> Problems:
        if self.tracking_uri.startswith("http") and not _SERVER.match(self.tracking_uri):
            yield "tracking_uri", f"{self.tracking_uri!r} is not the URL of a server: use https://HOST"


@dataclass(frozen=True, kw_only=True)
class TrackioConfig:
    """Trackio."""

    mode: str = choice("disabled", "disabled", "online", "local")
    """disabled = off; online = to the Space space_id of Hugging Face; local = to the folder TRACKIO_DIR."""
    project: str | None = option(None, relevant=_TRACKS)
    """Project name; null = experiment_name."""
    name: str | None = option(None, relevant=_TRACKS)
    """Run name; null = trial_name."""
    space_id: str | None = option(None, relevant=when("mode", "online"))
    """Space that receives the metrics, such as user/name."""

    def problems(self) -> Problems:
        if self.mode == "online" and not self.space_id:
            yield Problem("space_id", "is not set: name the Space, or use mode=local", "config.missing_requirement")
        if self.space_id and not _HUB_NAME.fullmatch(self.space_id):
            yield "space_id", f"{self.space_id!r} is not a name on the hub: use NAME or OWNER/NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerFacts:
    """A tracker that has a section of its own in `stats_logger`."""

    switch: str
    """The option of its section that turns it on."""
    module: str
    """The Python module that it needs."""
    package: str
    """The package with this module; the extra of areal has the name of the tracker."""


@dataclass(frozen=True, kw_only=True)
class StatsLoggerConfig:
    """Metric trackers; metrics.jsonl in the run folder is always written."""

    samples_freq_steps: int | None = number(10, low=1, relevant=_GENERATES)
    """Interval in train steps of tables of samples, in samples/ and the trackers; step 1 has one too; null = none."""
    samples: int = number(4, low=1, relevant=_GENERATES & given("samples_freq_steps"))
    """Trajectories in a table of samples."""
    causes_freq_steps: int | None = number(10, low=1, relevant=_GENERATES)
    """Interval in train steps of batch/log_ratio/, for which a server scores four trained rows; null = never."""
    wandb: WandBConfig = field(default_factory=WandBConfig)
    """Weights & Biases."""
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    """SwanLab."""
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """TensorBoard."""
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    """MLflow."""
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    """Trackio."""
    trackers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Trackers that other packages register: name -> options; {} = none."""

    def problems(self) -> Problems:
        for name, options in self.trackers.items():
            path, entry = f"trackers.{name}", entries("trackers").get(name)
            if entry is None or entry.facts is not None:
                yield Problem(path, "is no tracker that another package registers: remove it", "config.not_a_choice")
            elif entry.options is None and options:
                yield Problem(path, "has no options: write {}", "config.unknown_key")
            elif entry.options is not None:
                yield from below(path, converted(entry.options, options)[1])

    def settings(self, name: str) -> Any:
        """The section of a tracker, or the options of one that another package registers."""
        entry = registered("trackers", name, key="stats_logger.trackers")
        if entry.facts is not None:
            return vars(self)[name]
        return None if entry.options is None else converted(entry.options, self.trackers[name])[0]


@dataclass(frozen=True, kw_only=True)
class SessionTracerConfig:
    """One record for each episode in trace/sessions.ndjson: when it ran, how it ended, and where its time went."""

    enabled: bool = False
    """Write the records."""
    flush_threshold: int = number(256, relevant=when("enabled", True))
    """Records between two writes to disk; 0 and below = 1."""


@dataclass(frozen=True, kw_only=True)
class PerfTracerConfig:
    """Chrome traces: phases of the trainer ranks; episodes with requests, rewards and tools; requests of servers."""

    enabled: bool = False
    """Write trace/{process}.jsonl in the run folder."""
    save_interval: int = number(1, relevant=when("enabled", True))
    """Train steps between two writes to disk; 0 and below = 1."""
    profile_steps: list[int] | None = None
    """Train steps, counted from 1, that torch.profiler records, with a memory snapshot on CUDA; null = none."""
    profile_ranks: list[int] = section(lambda: [0], relevant=given("profile_steps"))
    """Trainer ranks that record them, in profile/ of the run folder."""
    session_tracer: SessionTracerConfig | None = option(None, relevant=_GENERATES)
    """Records of episodes, also without `enabled`; null = off."""

    def problems(self) -> Problems:
        for name, values, low in (
            ("profile_steps", self.profile_steps or [], 1),
            ("profile_ranks", self.profile_ranks, 0),
        ):
            if any(value < low for value in values):
                why = ": train steps are counted from 1, in AReaL from 0" if low else ""
                yield Problem(name, f"{values} has a number below {low}{why}", "config.out_of_range")


@dataclass(frozen=True, kw_only=True)
class AlarmRuleConfig:
    """Changes of one alarm."""

    name: str = field(metadata={"choices": ALARM_NAMES, "pattern": f"^({'|'.join(ALARM_NAMES)})$"})
    """The alarm."""
    limit: float | None = None
    """Limit of the value; null = that of the alarm."""
    steps: int | None = number(None, low=1)
    """Consecutive train steps beyond the limit that raise the alarm; null = as the alarm has it."""
    action: str | None = choice(None, "warn", "stop", "off")
    """What the alarm does; null = alarms.action."""

    def problems(self) -> Problems:
        if self.limit is not None and not math.isfinite(self.limit):
            yield Problem("limit", f"{self.limit} is not a finite number", "config.out_of_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAlarm:
    """A rule with the limit, steps and action of a run."""

    rule: AlarmRule
    limit: float
    steps: int
    action: AlarmAction


@dataclass(frozen=True, kw_only=True)
class AlarmsConfig:
    """Sanity alarms on the metrics of the train steps."""

    action: str = choice("warn", "warn", "stop", "off")
    """What an alarm does: warn = one line and a record, stop = also end the run, off = nothing."""
    rules: list[AlarmRuleConfig] = section(list[AlarmRuleConfig])
    """Changes of single alarms, e.g. [{name: grad_norm, limit: 500}, {name: logprob_k3, action: stop}]."""

    def problems(self) -> Problems:
        for name, count in Counter(rule.name for rule in self.rules).items():
            if count > 1:
                yield "rules", f"{name} occurs {count} times: write all its changes in one entry"

    def chosen(self) -> list[ChosenAlarm]:
        """The rules that are not off, with their settings."""
        changes = {rule.name: rule for rule in self.rules}
        alarms: list[ChosenAlarm] = []
        for rule in ALARM_RULES:
            change = changes.get(rule.name) or AlarmRuleConfig(name=rule.name)
            action = cast("AlarmAction", change.action or self.action)
            limit = rule.limit if change.limit is None else change.limit
            if action != "off":
                alarms.append(ChosenAlarm(rule=rule, limit=limit, steps=change.steps or rule.steps, action=action))
        return alarms
