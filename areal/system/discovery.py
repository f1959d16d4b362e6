"""The name registry through which the processes of a run find each other."""

import json
import os
import re
import shutil
import time
import uuid
from pathlib import Path

from areal.api.config import BaseExperimentConfig
from areal.api.errors import LaunchError, RequestError, ServerUnavailable
from areal.system.run_paths import RunPaths

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_POLL_S = 0.05


class NameRegistry:
    """Maps names like `servers/0` to short JSON values, for all processes of a run: one file per name, no server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, name: str) -> Path:
        segments = name.split("/")
        if not all(_SEGMENT.fullmatch(segment) for segment in segments):
            message = f"registry name {name!r}: only letters, digits, '_', '-', '.' and '/' are allowed"
            raise RequestError(message, code="process.bad_name")
        return self._folder.joinpath(*segments[:-1], segments[-1] + ".json")

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        """Register a value. LaunchError when the name is taken and `replace` is false."""
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
            message = f"{name} is already registered in {self._folder}, as {self.get(name)}"
            raise LaunchError(message, code="process.name_taken") from None
        finally:
            temporary.unlink(missing_ok=True)

    def get(self, name: str) -> str | None:
        try:
            return self._path(name).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, prefix: str) -> dict[str, str]:
        """All names below `prefix` (a whole path such as `servers`), in order."""
        paths = sorted(self._folder.joinpath(prefix).rglob("*.json"))
        names = [path.relative_to(self._folder).as_posix().removesuffix(".json") for path in paths]
        return {name: value for name in names if (value := self.get(name)) is not None}

    def remove(self, name: str) -> None:
        """Remove a name, if it is there."""
        self._path(name).unlink(missing_ok=True)

    def wait(self, name: str, timeout_s: float) -> str:
        """Block until the name is registered. ServerUnavailable after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (value := self.get(name)) is None:
            if time.monotonic() >= deadline:
                message = f"{name} was not registered in {self._folder} within {timeout_s:g} s"
                raise ServerUnavailable(message, code="process.not_registered")
            time.sleep(_POLL_S)
        return value

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def registry_of(config: BaseExperimentConfig) -> NameRegistry:
    """The registry of the configured run."""
    if root := config.cluster.name_resolve.nfs_record_root:
        return NameRegistry(Path(root).expanduser().absolute() / config.experiment_name / config.trial_name)
    return NameRegistry(RunPaths.of(config).names)


def announce_server(registry: NameRegistry, index: int, process_name: str, address: str) -> None:
    """Register a server at `address`, and this process, which serves there or hosts the server, as ready."""
    pid = os.getpid()
    registry.add(f"servers/{index}", json.dumps({"address": address, "pid": pid}), replace=True)
    registry.add(f"ready/{process_name}", json.dumps({"pid": pid}), replace=True)
