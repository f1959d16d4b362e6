"""What a run of an agent leaves behind, and the last error in its code: for rehearsals."""

import asyncio
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

_OWN_FOLDER = str(Path(__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_SETTLE_S = 0.2
"""What tasks and processes have to end after the agent has returned."""
_FRAME = re.compile(r'^  File "([^"\n]+)", line ([0-9]+)', re.MULTILINE)
_CONTROL = (StopIteration, StopAsyncIteration, GeneratorExit)


def place_of(found: TracebackType | None) -> str:
    """FILE:LINE of the last code of a traceback outside of the standard library and of packages; empty = none."""
    return last_place(traceback.extract_tb(found))


def last_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The same for a stack."""
    others = (_OWN_FOLDER, _STDLIB, "<")
    own = [one for one in frames if "site-packages" not in one.filename and not one.filename.startswith(others)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def printed_place(text: str) -> str:
    """The same for the output of a program in Python with a traceback; empty = none."""
    frames = [traceback.FrameSummary(file, int(line), "", lookup_line=False) for file, line in _FRAME.findall(text)]
    return last_place(frames)


class AgentWatch:
    """Follows the tasks, child processes and errors of one agent. At most one at a time in a process."""

    def __init__(self, files: Collection[str]) -> None:
        """`files`: the source of the agent, in which errors are followed."""
        self._files = files
        self._tasks: dict[asyncio.Task[Any], str] = {}
        """With the line that created it."""
        self._children: set[psutil.Process] = set()
        self.last_error = ""
        """Error and line of the last exception in the agent's files."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the current task, and the tasks that it creates."""
        loop, owner = asyncio.get_running_loop(), asyncio.current_task()
        before, trace = loop.get_task_factory(), sys.gettrace()

        def create(
            loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
        ) -> asyncio.Task[Any]:
            task = asyncio.Task(coro, loop=loop, **options)
            current = asyncio.current_task()
            if current is owner or current in self._tasks:
                self._tasks[task] = last_place(traceback.extract_stack())
            return task

        self._children = set(psutil.Process().children(recursive=True))
        loop.set_task_factory(create)  # pyright: ignore[reportArgumentType]
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(trace)
            loop.set_task_factory(before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        return self._local if frame.f_code.co_filename in self._files else None

    def _local(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "exception" and not issubclass(arg[0], _CONTROL):
            self.last_error = f"{arg[0].__name__} ({frame.f_code.co_filename}:{frame.f_lineno})"
        return self._local

    async def leaks(self) -> list[str]:
        """The tasks and processes that remain, each with what is known of its origin. They are ended."""
        if left := {task for task in self._tasks if not task.done()}:
            await asyncio.wait(left, timeout=_SETTLE_S)
        tasks = [task for task in self._tasks if not task.done()]
        found = [f"task {task.get_name()} ({self._tasks[task]})" for task in tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_SETTLE_S)
        children = [one for one in psutil.Process().children(recursive=True) if one not in self._children]
        _, alive = psutil.wait_procs(children, timeout=_SETTLE_S if children else 0)
        for child in alive:
            try:
                found.append(f"process {child.pid} ({' '.join(child.cmdline())[:80]})")
                child.kill()
            except psutil.NoSuchProcess:
                continue
        return found
