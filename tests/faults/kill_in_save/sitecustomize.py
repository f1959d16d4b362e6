"""Ends a trainer rank by SIGKILL in an update and at stages of a save; Python imports this file at the start of a
process.

`KILLED_IN_SAVE` is a folder with the stages so far. Each stage comes once, and two steps after the one before.
"""

import json
import os
import re
import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

STAGES = ("updates", "copied", "writes", "wrote", "sealed", "renamed")


def stage_of(event: str, arguments: tuple) -> str:
    """Which stage of a save an operation on files begins; empty for all others."""
    paths = [str(argument) for argument in arguments[:2] if isinstance(argument, str | Path)]
    if not paths or "/recover/" not in paths[0]:
        return ""
    first, last = paths[0], paths[-1]
    if event == "os.mkdir" and re.search("/next/[^/]+/rng$", first):
        return "copied"
    if event == "open" and "/next/" in first:
        return "writes" if first.endswith(".safetensors") else "wrote" if re.search("/next/[^/]+/rng/", first) else ""
    if event == "os.rename" and re.search("/next/[^/]+$", first):
        return "sealed"
    return "renamed" if event == "os.rename" and last.endswith(".removed") else ""


def install_in_update(folder: Path, recover: Path) -> None:
    """Between two optimiser steps of an update, when a checkpoint exists and no other is being written."""
    from areal.trainer.actor import PPOActor

    update = PPOActor.update

    def updates(actor, batch, **options):
        saved = max((int(path.name[5:]) for path in recover.glob("step-*")), default=0)
        if saved and not any(folder.iterdir()) and not (recover / "next").exists():
            step = actor._engine.optimizer_step

            def dies_after_it():
                step()
                (folder / f"0-{STAGES[0]}").write_text(str(saved))
                os.kill(os.getpid(), signal.SIGKILL)

            actor._engine.optimizer_step = dies_after_it
        return update(actor, batch, **options)

    PPOActor.update = updates


def install(folder: Path) -> None:
    def look(event: str, arguments: tuple) -> None:
        if event not in ("os.mkdir", "open", "os.rename") or not (stage := stage_of(event, arguments)):
            return
        done = sorted(folder.iterdir())
        if len(done) == len(STAGES) or stage != STAGES[len(done)]:
            return
        recover = Path(str(arguments[0]).partition("/recover/")[0]) / "recover"
        saved = max((int(path.name[5:]) for path in recover.glob("step-*")), default=0)
        before = int(done[-1].read_text()) if done else 0
        if saved > before:
            (folder / f"{len(done)}-{stage}").write_text(str(saved))
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


if "KILLED_IN_SAVE" in os.environ and "AREAL_PROCESS" in os.environ:
    # Python imports one sitecustomize, here this one; that of `make test-megatron` comes later on the path.
    other = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != str(Path(__file__).parent)])
    if other is not None and other.loader is not None:
        other.loader.exec_module(module_from_spec(other))
    context, killed = json.loads(os.environ["AREAL_PROCESS"]), Path(os.environ["KILLED_IN_SAVE"])
    if (context["role"], context["index"]) == ("trainer", 0):
        install(killed)
    if (context["role"], context["index"]) == ("trainer", 1):
        install_in_update(killed, Path(context["run_dir"]) / "recover")
