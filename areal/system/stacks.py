"""Stack dumps: on SIGUSR1 a process appends the stacks of its threads and the state of its asyncio tasks to a file.

The signal handler writes the threads in C, also while the main thread is inside a tensor operation or a collective, or
keeps the interpreter. The tasks follow once the loop's thread runs Python again.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import areal
from areal.api.config.redaction import public_command

_LIBRARY = sysconfig.get_paths()["stdlib"]
_PACKAGE = str(Path(areal.__file__).parent)
_SHOWN_NAMES = 4


def register_stack_dumps(path: Path, *, with_tasks: bool) -> None:
    """Let SIGUSR1 append this process's stacks to `path`, or to standard error when that cannot be opened.

    `with_tasks`: also the tasks of the event loop in the main thread. Not for trainer ranks: without it an interrupted
    system call continues, also in libraries that do not repeat it themselves.
    """
    descriptor = _open(path)
    if descriptor is None:
        descriptor = sys.stderr.fileno()
    else:
        _write_head(descriptor, os.getpid(), f" starts: {' '.join(public_command(sys.argv))}")
    if with_tasks:
        signal.signal(signal.SIGUSR1, _task_dumper(descriptor))
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True, chain=with_tasks)


def request_stacks(path: Path, pid: int, reason: str) -> None:
    """Make a registered process write its stacks to `path`, below a line with time and reason.

    A process that has not registered would be ended by the signal.
    """
    if (descriptor := _open(path)) is not None:  # else only this line is missing: the process has its own descriptor
        _write_head(descriptor, pid, f": {reason}")
        os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, signal.SIGUSR1)


def _open(path: Path) -> int | None:
    """A descriptor that appends to `path`; None when it cannot be opened."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return None


def _write_head(descriptor: int, pid: int, text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not harm the process
        os.write(descriptor, f"=== {time.strftime('%Y-%m-%d %H:%M:%S%z')} pid {pid}{text}\n".encode())


def _task_dumper(descriptor: int) -> Callable[[int, FrameType | None], None]:
    def dump(number: int, frame: FrameType | None) -> None:
        try:
            text = describe_tasks(asyncio.all_tasks(asyncio.get_running_loop()))
        except RuntimeError:
            text = "no event loop runs in the main thread"
        except Exception as error:  # noqa: BLE001 - it would be raised in the code of the main thread
            text = f"no tasks: {type(error).__name__}: {error}"
        _write_head(descriptor, os.getpid(), f": asyncio\n{text}")

    return dump


def describe_tasks(tasks: set[asyncio.Task[Any]]) -> str:
    """One line for each place where tasks wait: their names, the deepest frame outside libraries, the deepest frame."""
    names: dict[str, list[str]] = {}
    for task in tasks:
        names.setdefault(_place(task), []).append(task.get_name())
    lines = [f"{len(tasks)} tasks\n"]
    for place, here in sorted(names.items(), key=lambda entry: -len(entry[1])):
        more = f" and {len(here) - _SHOWN_NAMES} more" if len(here) > _SHOWN_NAMES else ""
        lines.append(f"  {', '.join(sorted(here)[:_SHOWN_NAMES])}{more}: {place}\n")
    return "".join(lines)


def waiting_stack(task: asyncio.Task[Any]) -> list[str]:
    """Where a task waits: file, line and function of each frame, the outermost first. Follows tasks that it gathers."""
    frames: list[str] = []
    current: asyncio.Task[Any] | None = task
    while current is not None:
        frames += [text for _, text in _frames(current.get_coro())]
        waits_for: Any = getattr(current, "_fut_waiter", None)  # no public function has it before Python 3.14
        children = getattr(waits_for, "_children", [waits_for])
        current = next((child for child in children if isinstance(child, asyncio.Task) and not child.done()), None)
    return frames


def _place(task: asyncio.Task[Any]) -> str:
    frames = _frames(task.get_coro())
    if not frames:
        return "has ended" if task.done() else "has not started, or is not written in Python"
    deepest = frames[-1][1]
    own_frame = next((text for code, text in reversed(frames) if _is_own(code)), deepest)
    return own_frame if own_frame == deepest else f"{own_frame}, in {deepest}"


def _frames(awaited: Any) -> list[tuple[CodeType, str]]:
    """(code, place) from the outermost frame of a task to the innermost visible one."""
    frames: list[tuple[CodeType, str]] = []
    while awaited is not None:
        for prefix in ("cr", "gi", "ag"):  # coroutine, generator, asynchronous generator
            frame = getattr(awaited, f"{prefix}_frame", None)
            if frame is not None:
                frames.append((frame.f_code, f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"))
                awaited = getattr(awaited, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await", None)
                break
        else:
            break
    return frames


def place_of_thread(thread_id: int) -> str:
    """The deepest line outside libraries that a thread is in: file, line and function; empty when there is none."""
    frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage] - as documented
    while frame is not None and not _is_own(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_own(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(_PACKAGE) or not (
        name.startswith(_LIBRARY) or "site-packages" in name or name.startswith("<frozen")
    )
