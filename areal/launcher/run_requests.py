"""The files through which other commands request changes from the running launcher of a run."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths

_REQUEST, _ANSWER = ".request.json", ".answer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    action: Literal["add-replica", "remove-replica"]
    replica: str = ""
    """Process name of the server to remove."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    state: Literal["working", "done", "refused"]
    """working = another answer follows."""
    text: str
    limit_s: float = 0.0
    """While it works: seconds after which the launcher has finished or given up."""


class RequestBox:
    """The folder RUN/requests. A request stays until the command that wrote it has read the answer."""

    def __init__(self, paths: RunPaths) -> None:
        self._folder = paths.requests
        self._taken: set[str] = set()

    def clear(self) -> None:
        """Remove the requests to an earlier launcher."""
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
        for path in sorted(self._folder.glob(f"[!.]*{_REQUEST}")):
            if path.name in self._taken:
                continue
            self._taken.add(path.name)
            try:
                found.append(Request(**json.loads(path.read_bytes())))
            except (OSError, ValueError, TypeError):  # withdrawn meanwhile, or not a request
                continue
        return found

    def answer(self, request: Request, answer: Answer) -> None:
        """Answer a request, unless its command has given up and withdrawn it."""
        if self._path(request.id, _REQUEST).exists():
            write_atomic(self._path(request.id, _ANSWER), json.dumps(asdict(answer)).encode())

    def _path(self, request_id: str, kind: str) -> Path:
        return self._folder / f"{request_id}{kind}"
