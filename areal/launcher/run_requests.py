"""Owns the files through which other commands ask the running launcher of a run to change it."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths

_REQUEST, _ANSWER = ".request.json", ".answer.json"

Action = Literal["add-replica", "remove-replica"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked."""

    id: str
    action: Action
    replica: str
    """Process name of the server to remove; empty when one is to be added."""

    @classmethod
    def make(cls, action: Action, replica: str = "") -> Self:
        return cls(id=uuid.uuid4().hex, action=action, replica=replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the launcher says to it."""

    state: Literal["working", "done", "refused"]
    """working = a later answer follows."""
    text: str
    limit_s: float = 0.0
    """While it works: the launcher comes to an end within so many seconds."""


class RequestBox:
    """RUN/requests. A request stays until whoever asked has read the answer."""

    def __init__(self, paths: RunPaths) -> None:
        self._folder = paths.requests
        self._taken: set[str] = set()

    def clear(self) -> None:
        """Forget what was asked of an earlier launcher."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, request: Request) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path(request.id, _REQUEST), json.dumps(asdict(request)).encode())

    def withdraw(self, request: Request) -> None:
        """Remove a request and its answer."""
        for kind in (_REQUEST, _ANSWER):
            self._path(request.id, kind).unlink(missing_ok=True)

    def answer_to(self, request: Request) -> Answer | None:
        try:
            return Answer(**json.loads(self._path(request.id, _ANSWER).read_bytes()))
        except FileNotFoundError:
            return None

    def take(self) -> list[Request]:
        """The requests that were not taken before."""
        found: list[Request] = []
        for path in sorted(self._folder.glob(f"*{_REQUEST}")):
            name = path.name.removesuffix(_REQUEST)
            if name in self._taken or name.startswith("."):
                continue
            self._taken.add(name)
            try:
                found.append(Request(**json.loads(path.read_bytes())))
            except (OSError, ValueError, TypeError):  # withdrawn meanwhile, or nothing of ours
                continue
        return found

    def answer(self, request: Request, answer: Answer) -> None:
        """Tell whoever asked. One who gave up has withdrawn the request: nobody is told then."""
        if self._path(request.id, _REQUEST).exists():
            write_atomic(self._path(request.id, _ANSWER), json.dumps(asdict(answer)).encode())

    def _path(self, request_id: str, kind: str) -> Path:
        return self._folder / f"{request_id}{kind}"
