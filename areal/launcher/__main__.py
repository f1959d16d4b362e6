"""The command `areal run`, also `python -m areal.launcher`: runs a configuration with the launcher that it needs."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from areal.api.config.experiment import BaseExperimentConfig, Sweep, read_sweep
from areal.api.config.load import load_experiment
from areal.api.errors import ConfigError
from areal.api.registry import entries, registered
from areal.system.process import run_main
from areal.system.run_paths import RunPaths

USAGE = """usage: areal run [SCRIPT.py] --config FILE.yaml [key.sub=value ...] [--dry-run]
                 [--launcher local|ray|slurm|ssh] [flags of the launcher]
       areal run ... --sweep key.sub=A,B [--sweep ...] [--parallel N]
       areal run --attach RUN --add-replica | --remove-replica NAME [--json]

Runs a configuration and waits for the end of the run. SCRIPT.py runs in the
controller and in every trainer rank; without one the configuration names all
parts. Exit status: 0 the run completed, 1 it failed, 2 it could not start as
configured, 130 it was interrupted.

  --config FILE    configuration; several files are merged in order
  key.sub=value    replaces an option; `areal config KEY` explains it
  --dry-run        checks everything, prints the plan, starts nothing
  --json           prints the plan, or the summary after the run, as JSON
  --step-s=SECONDS duration of a train step, for the GPU hours of --dry-run
  --overwrite      deletes an earlier run of this name
  --launcher NAME  default: ssh with --hosts, else launcher.type, else local.
                   `areal run --launcher NAME --help` lists its own flags
  --hosts A,B      machines for ssh
  --sweep KEY=A,B  one run trial_name_i for each combination, then a comparison
  --parallel N     that many runs of a sweep at the same time
  --attach RUN     changes a running run; `areal run --attach --help`

`areal config SECTION` explains the options of the configuration.
"""
_POLL_S = 0.2
_CHOOSE = ("--launcher", "--hosts", "--attach")


def run_command(words: Sequence[str]) -> int:
    """Run the launcher on the words of a command line; returns its exit status."""
    if not words or ({"--help", "-h"} & {*words} and not any(word.startswith(_CHOOSE) for word in words)):
        (sys.stdout if words else sys.stderr).write(USAGE)
        return 0 if words else 2
    name, rest = launcher_of(words)
    if name != "slurm" and (sweep := read_sweep(rest)).overrides:
        return run_sweep(sweep, name)
    command: Callable[[Sequence[str]], int] = registered("launchers", name, key="--launcher").load()
    return command(rest)


def launcher_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The name of the launcher, and the words without --launcher. ConfigError when none can be chosen."""
    chosen, rest = _named(words)
    if not chosen:
        if any(word == "--hosts" or word.startswith("--hosts=") for word in rest):
            chosen = "ssh"
        elif {"--attach", "--help", "-h"} & {*rest}:
            chosen = "local"
        else:
            chosen = _configured(rest)
    registered("launchers", chosen, key="--launcher")
    return chosen, rest


def _named(words: Sequence[str]) -> tuple[str, list[str]]:
    """The value of --launcher, empty without one, and the other words."""
    chosen, rest, remaining = "", list[str](), iter(words)
    for word in remaining:
        if word == "--launcher" or word.startswith("--launcher="):
            chosen = word.partition("=")[2] or next(remaining, "")
            if not chosen:
                raise ConfigError(
                    f"--launcher needs a name: {', '.join(entries('launchers'))}", code="config.bad_override"
                )
        else:
            rest.append(word)
    return chosen, rest


def _configured(words: Sequence[str]) -> str:
    """The launcher of the configuration."""
    options = list(_configuring(words))
    has_script = bool(options) and options[0].endswith(".py")
    config = load_experiment(options, allow_unknown_top_level=has_script, is_quiet=True)
    if config.launcher.type != "auto":
        return config.launcher.type
    if config.cluster.n_nodes > 1:
        message = (
            f"cluster.n_nodes={config.cluster.n_nodes}: choose the launcher with --launcher ray, --launcher slurm or "
            "--hosts HOST,HOST, or set launcher.type"
        )
        raise ConfigError(message, code="launch.several_nodes")
    return "local"


def _configuring(words: Sequence[str]) -> Iterator[str]:
    """The script and the words that choose options, without those that the launchers read."""
    remaining = iter(words)
    for word in remaining:
        if word in ("--sweep", "--parallel"):
            next(remaining, "")
        elif word not in ("--dry-run", "--detach", "--overwrite", "--json") and not word.startswith("--step-s="):
            yield word


# ----------------------------------------------------------------------------------------------------------------------
# A sweep: each run is a launcher of its own.


def run_sweep(sweep: Sweep, launcher: str) -> int:
    """Run every combination, `sweep.parallel` at a time, and compare the runs. Returns the largest exit status.

    All configurations are checked before the first run. With several at a time each writes what it prints into a file.
    """
    has_script = sweep.words[0].endswith(".py")

    def read(words: Sequence[str]) -> BaseExperimentConfig:
        return load_experiment(list(_configuring(words)), allow_unknown_top_level=has_script, is_quiet=True)

    commands = sweep.run_words(read(sweep.words).trial_name)
    folders = [Path(RunPaths.of(read(words)).root) for words in commands]
    statuses: dict[int, int] = {}
    running: dict[int, subprocess.Popen[bytes]] = {}
    waiting = list(range(len(commands)))

    def forward(number: int, frame: object) -> None:
        waiting.clear()
        for process in running.values():
            process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    while waiting or running:
        try:
            while waiting and len(running) < max(sweep.parallel, 1):
                index = waiting.pop(0)
                running[index] = _start(sweep, index, [*commands[index], "--launcher", launcher], folders[index])
            ended = [index for index, process in running.items() if process.poll() is not None]
            for index in ended:
                statuses[index] = running.pop(index).returncode
                _say(f"run {index + 1} of {len(commands)} ended with status {statuses[index]}")
                if statuses[index] == 130:
                    waiting.clear()
            if running and not ended:
                time.sleep(_POLL_S)
        except KeyboardInterrupt:  # the runs have got it too
            waiting.clear()
    if "--dry-run" not in sweep.words:
        _compare([folder for folder in folders if folder.is_dir()], as_json="--json" in sweep.words)
    return max(statuses.values(), key=abs, default=130)  # none was started


def _start(sweep: Sweep, index: int, words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a run of the sweep. Ctrl-C reaches it from the terminal."""
    argv = [sys.executable, "-m", "areal.launcher", *words]
    text = f"run {index + 1} of {len(sweep.overrides)}: {' '.join(sweep.overrides[index])}"
    if sweep.parallel < 2:
        _say(text)
        return subprocess.Popen(argv)
    log = folder.with_name(f"{folder.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    _say(f"{text}, log {log}")
    with open(log, "wb") as file:
        return subprocess.Popen(argv, stdout=file, stderr=file)


def _compare(folders: Sequence[Path], *, as_json: bool) -> None:
    """Print the comparison of the runs that have metrics."""
    trained = [str(folder) for folder in folders if RunPaths(folder).metrics.exists()]
    if len(trained) > 1:
        flags = ["--json"] if as_json else []
        subprocess.run([sys.executable, "-m", "areal", "compare", *trained, *flags], check=True)


def _say(text: str) -> None:
    sys.stderr.write(f"areal: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    run_main(lambda: sys.exit(run_command(sys.argv[1:])))
