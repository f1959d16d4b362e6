"""The files of one run below cluster.fileroot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from areal.api.config import BaseExperimentConfig, ClusterSpecConfig
from areal.api.errors import LaunchError


class _Below:
    """A path below the run folder, as an attribute of RunPaths."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunPaths, owner: type[RunPaths]) -> Path:
        return run.root / self._name


DEFAULT_FILEROOT = Path(ClusterSpecConfig().fileroot)


def run_folder(text: str) -> Path:
    """The folder that a command line names: a path, or else experiment_name/trial_name below the default fileroot, or
    below `runs`, the fileroot of the examples."""
    path = Path(text).expanduser()
    named = [root / text for root in (DEFAULT_FILEROOT, Path("runs"))]
    return path if path.exists() else next(filter(Path.is_dir, named), path)


def existing_run(text: str) -> Path:
    """`run_folder`, which must exist. Raises LaunchError: argparse would replace the message of a ValueError."""
    result = run_folder(text)
    if not result.exists():
        text = f"there is no folder {text}, and no run of this name below {DEFAULT_FILEROOT} or runs"
        raise LaunchError(text, code="launch.no_run_folder")
    return result


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Folder of one run. Only names paths: the process that writes below a folder makes it."""

    root: Path

    config = _Below("config.yaml")
    """The resolved configuration that every process of the run reads."""
    plan = _Below("plan.json")
    predicted = _Below("predicted.json")
    """What `areal plan --json` printed for this run, where the user put it."""
    summary = _Below("summary.json")
    """How the run ended; written once by the launcher."""
    lock = _Below("launcher.lock")
    """Held by the one launcher that runs on this folder."""
    token = _Below("token")
    """The token of the running launch; readable by the user of the run only."""
    logs = _Below("logs")
    names = _Below("names")
    """Records of the name registry."""
    initial_weights = _Below("initial_weights.json")
    """Checksums of the models at the start of the run."""
    ledger = _Below("ledger")
    images = _Below("images")
    """The images of the prompts, by their content."""
    turns = _Below("turns")
    """Stages of the turns of agents, one file for each controller process."""
    sessions = _Below("sessions.json")
    """Address of the session server."""
    weights = _Below("weights")
    """Published policy versions, one folder each."""
    checkpoints = _Below("checkpoints")
    """Hugging Face exports of the saver."""
    recover = _Below("recover")
    """Recovery checkpoints."""
    metrics = _Below("metrics.jsonl")
    samples = _Below("samples")
    """Tables of samples, one file for each of some train steps."""
    alarms = _Below("alarms.jsonl")
    """The alarms that were raised, one per line."""
    restarts = _Below("restarts.jsonl")
    """The restarts of processes with their causes, one per line."""
    option_changes = _Below("option_changes.jsonl")
    """Options that a later launch changed, one line for each launch with the train steps done before it."""
    episodes = _Below("episodes.json")
    """Numbers of episodes by outcome, written by the controller when it ends."""
    trace = _Below("trace")
    profile = _Below("profile")
    alive = _Below("alive.json")
    """The last heartbeat of each running process, written by the launcher."""
    stacks = _Below("stacks")
    """Stack dumps, one file for each process."""
    requests = _Below("requests")
    """Requests of other commands to the running launcher, and its answers."""
    checkpoint_request = _Below("requests/checkpoint")
    """Trainers write a recovery checkpoint after each step while this file exists."""
    slurm = _Below("slurm")
    """Script, log and number of the Slurm job."""
    answers = _Below("answers.jsonl")
    """One line for each answer of an evaluation without training."""
    results = _Below("results.json")
    """Metrics of a complete evaluation without training."""
    replays = _Below("replays")
    """Results of replays of the recorded batches, one folder each."""

    @classmethod
    def of(cls, config: BaseExperimentConfig) -> Self:
        """The absolute run folder of a configuration."""
        fileroot = Path(config.cluster.fileroot).expanduser().absolute()
        return cls(fileroot / config.experiment_name / config.trial_name)

    def stacks_of(self, process_name: str) -> Path:
        return self.stacks / f"{process_name}.txt"

    def log_of(self, process_name: str) -> Path:
        """Standard output and error of one process."""
        return self.logs / f"{process_name}.log"
