"""The command `areal run`, also `python -m areal.launcher`: runs a configuration with the launcher that it needs."""

import sys
from collections.abc import Callable, Iterator, Sequence

from areal.api.config.load import load_experiment
from areal.api.errors import ConfigError
from areal.api.registry import entries, registered
from areal.system.process import run_main

USAGE = """usage: areal run [SCRIPT.py] --config FILE.yaml [key.sub=value ...] [--dry-run]
                 [--launcher local|ray|slurm|ssh] [flags of the launcher]
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
  --attach RUN     changes a running run; `areal run --attach --help`

`areal config SECTION` explains the options of the configuration.
"""
_CHOOSE = ("--launcher", "--hosts", "--attach")


def run_command(words: Sequence[str]) -> int:
    """Run the launcher on the words of a command line; returns its exit status."""
    if not words or ({"--help", "-h"} & {*words} and not any(word.startswith(_CHOOSE) for word in words)):
        (sys.stdout if words else sys.stderr).write(USAGE)
        return 0 if words else 2
    name, rest = launcher_of(words)
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
        if word in ("--sweep", "--at-once"):
            next(remaining, "")
        elif word not in ("--dry-run", "--detach", "--overwrite", "--json") and not word.startswith("--step-s="):
            yield word


if __name__ == "__main__":
    run_main(lambda: sys.exit(run_command(sys.argv[1:])))
