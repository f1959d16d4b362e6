"""The name registry through which the processes of a run find each other."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Protocol

from areal.api.config import BaseExperimentConfig
from areal.api.errors import LaunchError, RequestError, ServerUnavailable
from areal.system.run_paths import RunPaths

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_POLL_S = 0.05


class NameRegistry(Protocol):
    """Maps names like `servers/0` to short JSON values, for all processes of a run."""

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        """Register a value. LaunchError when the name is taken and `replace` is false."""
        ...

    def get(self, name: str) -> str | None: ...
    def list(self, prefix: str) -> dict[str, str]:
        """All names below `prefix` (a whole path such as `servers`), in order."""
        ...

    def remove(self, name: str) -> None:
        """Remove a name, if it is there."""
        ...

    def wait(self, name: str, timeout_s: float) -> str:
        """Block until the name is registered. ServerUnavailable after `timeout_s`."""
        ...

    def clear(self) -> None: ...


class FileNameRegistry:
    """A registry with one file per name below a shared folder; it needs no server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, name: str) -> Path:
        segments = name.split("/")
        if not all(_SEGMENT.fullmatch(segment) for segment in segments):
            raise RequestError(
                f"registry name {name!r}: only letters, digits, '_', '-', '.' and '/' are allowed",
                code="process.bad_name",
            )
        return self._folder.joinpath(*segments[:-1], segments[-1] + ".json")

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        temporary.write_text(value)
        try:
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # fails when the name exists, unlike a rename
        except FileExistsError:
            taken = self.get(name)
            raise LaunchError(
                f"name {name} is already registered in {self._folder} (value {taken})", code="process.name_taken"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)

    def get(self, name: str) -> str | None:
        try:
            return self._path(name).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, prefix: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in sorted(self._folder.rglob("*.json")):
            name = path.relative_to(self._folder).as_posix().removesuffix(".json")
            if not prefix or name == prefix or name.startswith(prefix.rstrip("/") + "/"):
                value = self.get(name)
                if value is not None:
                    found[name] = value
        return found

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def wait(self, name: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while (value := self.get(name)) is None:
            if time.monotonic() >= deadline:
                raise ServerUnavailable(
                    f"{name} did not register in {self._folder} within {timeout_s:g} s", code="process.not_registered"
                )
            time.sleep(_POLL_S)
        return value

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def registry_of(config: BaseExperimentConfig) -> NameRegistry:
    """The registry of the configured run."""
    root = config.cluster.name_resolve.nfs_record_root
    if root:
        return FileNameRegistry(Path(root).expanduser().absolute() / config.experiment_name / config.trial_name)
    return FileNameRegistry(RunPaths.of(config).names)


def announce_server(registry: NameRegistry, index: int, process_name: str, address: str) -> None:
    """Register a server at `address`, and this process, which serves there or hosts the server, as ready."""
    pid = os.getpid()
    registry.add(f"servers/{index}", json.dumps({"address": address, "pid": pid}), replace=True)
    registry.add(f"ready/{process_name}", json.dumps({"pid": pid}), replace=True)
