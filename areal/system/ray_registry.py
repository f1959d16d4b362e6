"""The name registry in a named actor of a Ray cluster, and the connection to Ray. Only this module imports ray."""

import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from areal.api.errors import ConfigError, LaunchError, ServerUnavailable
from areal.system.file_registry import name_segments

_CONNECT_S = 5.0
_CALL_S = 5.0
_PAUSE_S = 0.1
_KEEP_S = 2.0
"""After this time at most a restarted actor knows the names again."""
_NAMESPACE = "areal"
_log = logging.getLogger(__name__)


def connect_ray() -> Any:
    """Connect to the Ray cluster at RAY_ADDRESS. Returns the package. LaunchError when there is none."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        message = "the Ray launcher and name_resolve.type=ray need the package ray: pip install -e '.[ray]'"
        raise ConfigError(message, code="launch.package_missing") from error
    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS") or "auto"
    advice = "start one (ray start --head), set RAY_ADDRESS, or use ray job submit"
    if "://" in address:
        message = f"RAY_ADDRESS={address}: a launcher outside of the cluster is not supported: use ray job submit"
        raise LaunchError(message, code="launch.no_ray")
    try:
        if address != "auto":  # Ray itself tries for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        with _kept_handlers():
            ray.init(address, log_to_driver=False, configure_logging=True, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        cause = " ".join(str(error).split())
        raise LaunchError(
            f"no Ray cluster at RAY_ADDRESS={address}: {cause}: {advice}", code="launch.no_ray"
        ) from error
    return ray


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """Ray sets a handler of SIGTERM when it connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


class NameActor:
    """The names of one run, with the registry that added each. Made an actor by the launcher."""

    def __init__(self) -> None:
        self._names: dict[str, tuple[str, str]] = {}
        self._removed: set[str] = set()

    def add(self, name: str, value: str, owner: str, replace: bool) -> str | None:
        """Register a value. Returns the present value when another registry has the name and `replace` is false."""
        if not replace and name in self._names and self._names[name] != (value, owner):
            return self._names[name][0]
        self._names[name] = (value, owner)
        self._removed.discard(name)
        return None

    def names(self, prefix: str) -> dict[str, str]:
        """The names that begin with `prefix`, in order."""
        return {name: value for name, (value, _) in sorted(self._names.items()) if name.startswith(prefix)}

    def get(self, name: str) -> str | None:
        return self._names.get(name, (None, ""))[0]

    def remove(self, name: str) -> None:
        self._removed.add(name)
        self._names.pop(name, None)

    def clear(self) -> None:
        self._removed |= self._names.keys()
        self._names.clear()

    def keep(self, own: dict[str, str], owner: str) -> list[str]:
        """Register again what a restarted actor has forgotten. Returns the names that others have changed."""
        lost: list[str] = []
        for name, value in own.items():
            if name in self._removed or self._names.setdefault(name, (value, owner)) != (value, owner):
                lost.append(name)
        return lost


class RayRegistry:
    """Implements `NameRegistry` in an actor that ends with the process that made it, the launcher.

    Ray starts the actor again when its process dies. Each registry then repeats its names, from a thread that ends with
    `close` or with the process.
    """

    def __init__(self, run: str, *, makes_actor: bool, timeout_s: float = 60.0) -> None:
        """`run`: the registries of one run share it; `timeout_s`: limit of a request while the actor does not answer.

        ConfigError without the package ray, LaunchError without a Ray cluster.
        """
        self._ray = connect_ray()
        self._actor_name = f"names of {run}"
        self._makes_actor = makes_actor
        self._timeout_s = timeout_s
        self._owner = uuid.uuid4().hex
        self._own: dict[str, str] = {}
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._keeper: threading.Thread | None = None
        self._actor: Any = None

    def add(self, name: str, value: str, *, replace: bool = False) -> None:
        name_segments(name)
        with self._writing:
            present = self._call("add", name, value, self._owner, replace)
            if present is not None:
                message = f"{name} is already registered in Ray, as {present}"
                raise LaunchError(message, code="process.name_taken")
            self._own[name] = value
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="keep the names in Ray", daemon=True)
                self._keeper.start()

    def get(self, name: str) -> str | None:
        name_segments(name)
        return self._call("get", name)

    def list(self, prefix: str) -> dict[str, str]:
        return self._call("names", f"{prefix.rstrip('/')}/" if prefix else "")

    def remove(self, name: str) -> None:
        name_segments(name)
        with self._writing:
            self._own.pop(name, None)
            self._call("remove", name)

    def wait(self, name: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while (result := self.get(name)) is None:
            if time.monotonic() >= deadline:
                message = f"{name} was not registered in Ray within {timeout_s:g} s"
                raise ServerUnavailable(message, code="process.not_registered")
            time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
        return result

    def clear(self) -> None:
        with self._writing:
            self._own.clear()
            self._call("clear")

    def close(self) -> None:
        self._closed.set()

    def _call(self, method: str, *arguments: object) -> Any:
        """The answer of the actor. ServerUnavailable when it gives none in time."""
        exceptions, deadline = self._ray.exceptions, time.monotonic() + self._timeout_s
        while True:
            try:
                if self._actor is None:
                    self._actor = self._found()
                return self._ray.get(getattr(self._actor, method).remote(*arguments), timeout=_CALL_S)
            # ValueError: no actor has this name yet. The others: it died, restarts, or its node does not answer.
            except (ValueError, exceptions.RayActorError, exceptions.GetTimeoutError) as error:
                if not (self._makes_actor and isinstance(error, exceptions.GetTimeoutError)):
                    self._actor = None  # without the handle of the process that made it, Ray would end a slow actor
                if time.monotonic() >= deadline or self._closed.is_set():
                    cause = " ".join(str(error).split())[:300]
                    message = f"the actor {self._actor_name!r} in Ray gave no answer in {self._timeout_s:g} s: {cause}"
                    raise ServerUnavailable(message, code="process.registry_silent") from None
                time.sleep(_PAUSE_S)

    def _found(self) -> Any:
        if not self._makes_actor:
            return self._ray.get_actor(self._actor_name, namespace=_NAMESPACE)
        strategies = self._ray.util.scheduling_strategies
        here = self._ray.get_runtime_context().get_node_id()
        options: dict[str, Any] = {
            "name": self._actor_name,
            "namespace": _NAMESPACE,
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(here, soft=False),
        }
        return self._ray.remote(NameActor).options(**options).remote()

    def _keep(self) -> None:
        while not self._closed.wait(_KEEP_S):
            try:
                with self._writing:
                    for name in self._call("keep", dict(self._own), self._owner):
                        self._own.pop(name, None)
            except ServerUnavailable as error:
                if not self._closed.is_set():
                    _log.warning("names are not kept: %s", error)
