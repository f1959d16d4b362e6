"""Checks before a start: options that the servers of a run cannot honour, and the versions in their environment.

Waits for one short subprocess of the servers' interpreter, at most `_LIMIT_S`; its answer is cached until the
interpreter or its packages change.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal.api.config import PPOConfig
from areal.api.errors import InputError
from areal.fleet.backends import backend_named
from areal.fleet.server_backend import ServerBackend
from areal.fleet.server_command import server_python
from areal.fleet.server_flags import ignored_flags
from areal.launcher.gpu_rules import NcclVersions
from areal.launcher.job import LaunchPlan
from areal.system.durable import write_atomic
from areal.system.process import AREAL_PROCESS
from areal.system.vision_layout import read_vision_layout

_LIMIT_S = 30.0
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_PROBE = """
import importlib.metadata, json, sys, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
found = {name: version(name) for name in sys.argv[1:]}
print(json.dumps({"versions": found, "packages": sysconfig.get_path("purelib")}))
"""
Versions = dict[str, str]
"""Package -> version, empty where it is not installed."""


class _NoVersions(Exception):
    pass


def fetch_vision_layout(config: PPOConfig) -> None:
    """Put the files that say how the served model takes images into the local cache: the command of a foreign server
    depends on them. A hub that does not answer is reported by the trial of row 0, or by the servers."""
    backend = backend_named(config.server_backend)
    if backend.flags is not None:
        with contextlib.suppress(InputError):
            read_vision_layout(backend.model(config), downloads=True)


def server_problems(
    config: PPOConfig, plan: LaunchPlan, say: Callable[[str], None], *, limit_s: float = _LIMIT_S
) -> list[str]:
    """One sentence for every option that the servers cannot honour and for an environment that cannot run them."""
    backend = backend_named(config.server_backend)
    problems = [f"{path}: {text}" for path, text in backend.problems(config)]
    planned = next((process for process in plan.processes if process.role == "server"), None)
    if backend.flags is None or planned is None:
        return problems
    python = server_python(config)
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        text = f"{python} is not a program: set it to the Python interpreter of {backend.title}'s environment"
        return [*problems, f"server_python: {text}"]
    try:
        versions = environment_versions(python, (backend.name, "torch", *_NCCL_PACKAGES), limit_s=limit_s)
    except _NoVersions as error:
        return [*problems, f"server_python: {python} does not report the versions of its packages: {error}"]
    if problem := _version_problem(backend, versions, on_gpu=bool(planned.gpus)):
        advice = "" if config.server_python else "; this is the interpreter of areal itself, set server_python"
        return [*problems, f"server_python: {python}: {problem}{advice}"]
    nccl = next((f", NCCL {versions[name]}" for name in _NCCL_PACKAGES if versions[name]), "")
    say(f"areal: {backend.title} {versions[backend.name]}, torch {versions['torch']}{nccl} in {python}")
    return problems


def nccl_versions(config: PPOConfig) -> NcclVersions:
    """NCCL of the trainers' and of the servers' environment, from their metadata; empty where it is not known."""
    python = "" if backend_named(config.server_backend).flags is None else server_python(config)
    try:
        own = environment_versions(sys.executable, ("torch", *_NCCL_PACKAGES))
        packages = (config.server_backend, "torch", *_NCCL_PACKAGES)
        servers = environment_versions(python, packages) if python else own
    except _NoVersions:  # `server_problems` reports it
        return NcclVersions()
    ours, theirs = (next(filter(None, map(found.get, _NCCL_PACKAGES)), "") for found in (own, servers))
    return NcclVersions(trainers=ours or "", servers=theirs or "")


def notices(config: PPOConfig) -> list[str]:
    """The flags that have no effect on the servers of this run, one line for each reason."""
    backend = backend_named(config.server_backend)
    if backend.flags is None:
        return []
    found: list[str] = []
    if ignored := [f"{backend.name}.{key}" for key in ignored_flags(backend.flags, config.server_flags)]:
        reason = f"areal sets its own value or {backend.title} has no such flag"
        found.append(f"areal: ignored, because {reason}: {', '.join(ignored)}")
    if config.rollout.server_addrs and config.server_flags:
        found.append(f"areal: {backend.name}: this section has no effect on servers that already run")
    return found


def _version_problem(backend: ServerBackend, versions: Versions, *, on_gpu: bool) -> str:
    """Why the installed versions cannot run, or ''. A version that cannot be parsed is accepted as a new one."""
    version, torch = versions[backend.name], versions["torch"]
    if not version:
        return f"{backend.title} is not installed there: install it, or set server_python to another interpreter"
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    oldest = tuple(map(int, backend.minimum_version.split(".")))
    if numbers is not None and tuple(map(int, numbers.groups())) < oldest:
        needed = f"areal needs {backend.minimum_version} or newer (tested with {backend.tested_version})"
        return f"{backend.title} {version} is too old, {needed}: upgrade it"
    if on_gpu and (version.endswith("+cpu") or torch.endswith("+cpu")):
        advice = "install a GPU build, or set cluster.n_gpus_per_node=0"
        return f"{backend.title} {version} with torch {torch} is a CPU build, but the servers get GPUs: {advice}"
    return ""


def environment_versions(python: str, packages: tuple[str, ...], *, limit_s: float = _LIMIT_S) -> Versions:
    """Versions of packages in the environment of an interpreter, from its metadata: nothing is imported.

    The answer is cached as JSON by the interpreter's path, and is used as long as the interpreter and the folder of its
    packages keep their modification times.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    cache = folder / "areal" / "server_environments.json"
    known = _read_cache(cache)
    entry = known.get(python)
    if entry is not None and entry["times"] == _times(entry["times"]) and set(packages) <= set(entry["versions"]):
        return {name: entry["versions"][name] for name in packages}
    versions, library = _ask(python, packages, limit_s)
    entry = {"times": _times([python, library]), "versions": versions}
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cache, json.dumps({**known, python: entry}).encode())
    except OSError:
        pass  # without a cache each start costs a subprocess
    return versions


def _read_cache(path: Path) -> dict[str, Any]:
    """Interpreter -> {"times": {path: nanoseconds}, "versions": {package: version}}."""
    try:
        found = json.loads(path.read_text())
        return {python: entry for python, entry in found.items() if entry["times"] and entry["versions"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _times(paths: Any) -> dict[str, int]:
    """Path -> modification time in nanoseconds; 0 for a path that does not exist."""
    return {str(path): Path(path).stat().st_mtime_ns if Path(path).exists() else 0 for path in paths}


def _ask(python: str, packages: tuple[str, ...], limit_s: float) -> tuple[Versions, str]:
    """Versions, and the folder that holds the packages. _NoVersions when the interpreter gives no such answer."""
    env = {name: value for name, value in os.environ.items() if name != AREAL_PROCESS}
    try:
        argv = [python, "-c", _PROBE, *packages]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", env=env, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise _NoVersions(f"no answer in {limit_s:g} s") from None
    except OSError as error:
        raise _NoVersions(str(error.strerror or error)) from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])  # a script around the interpreter may print more before
        return {name: str(answer["versions"][name]) for name in packages}, str(answer["packages"])
    except (ValueError, TypeError, KeyError, IndexError):
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise _NoVersions(lines[-1] if lines else f"it ended with exit code {done.returncode}") from None
