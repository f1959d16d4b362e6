"""`areal watch`: the live view of a run in the terminal, and the same facts once as text or JSON."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

import orjson
from rich.console import Console
from rich.live import Live

from areal.cli.watch_facts import Watched
from areal.cli.watch_view import view
from areal.system.run_paths import existing_run


def watch(words: Sequence[str]) -> int:
    """Show the run until it ends or Ctrl-C; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="areal watch",
        description="Show reward, held-out results, waits, phases, failures, samples and processes of a run. A running "
        "run is shown until it ends or Ctrl-C, which does not affect it; another one, or without a terminal, once.",
    )
    parser.add_argument("run", metavar="RUN", type=existing_run, help="folder of the run, or experiment/trial")
    parser.add_argument("--once", action="store_true", help="print the view once")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between updates (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print the facts once as JSON")
    given = parser.parse_args(words)
    watched = Watched(given.run)
    found = watched.look()
    if given.json:
        sys.stdout.write(orjson.dumps(dataclasses.asdict(found)).decode() + "\n")
        return 0
    console = Console()
    if given.once or not console.is_terminal or found.state != "running":
        console.print(view(found, console.width))
        return 0
    try:
        with Live(view(found, console.width), console=console, auto_refresh=False, screen=True) as live:
            while found.state == "running":
                time.sleep(given.interval)
                found = watched.look()
                live.update(view(found, console.width), refresh=True)
    except KeyboardInterrupt:
        pass
    console.print(view(found, console.width))
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 3600")
    return seconds
