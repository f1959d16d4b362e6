"""Ends a trainer rank by SIGKILL at stages of a save; Python imports this file at the start of a process.

`KILLED_IN_SAVE` is a folder with the stages so far. Each stage comes once, and two steps after the one before.
"""

import json
import os
import signal
import sys
from pathlib import Path

STAGES = ("copied", "writes", "wrote", "sealed", "renamed")


def stage_of(event: str, arguments: tuple) -> str:
    """Which stage of a save an operation on files begins; empty for all others."""
    paths = [str(one) for one in arguments[:2] if isinstance(one, str | Path)]
    if not paths or "/recover/" not in paths[0]:
        return ""
    first, last = paths[0], paths[-1]
    if event == "os.mkdir" and first.endswith("/next/rng"):
        return "copied"
    if event == "open" and "/next/" in first:
        return "writes" if first.endswith(".safetensors") else "wrote" if "/next/rng/" in first else ""
    if event == "os.rename" and first.endswith("/next"):
        return "sealed"
    return "renamed" if event == "os.rename" and last.endswith(".removed") else ""


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
    context = json.loads(os.environ["AREAL_PROCESS"])
    if (context["role"], context["index"]) == ("trainer", 0):
        install(Path(os.environ["KILLED_IN_SAVE"]))
