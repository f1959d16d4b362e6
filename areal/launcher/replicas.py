"""Owns the joining and leaving of inference servers while a run goes on, as other commands ask for it.

One that joins is an ordinary server from its first ready sign on. One that leaves is first taken from the registry, so
that the fleet sends it nothing more, and stopped a moment later: what it still generates goes on elsewhere. Nothing
here waits: the supervisor's loop calls `step` again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, assert_never

from areal.api.config import LauncherConfig
from areal.api.errors import LaunchError
from areal.launcher.job import another_server
from areal.launcher.run_requests import Answer, Request, RequestBox
from areal.launcher.units import Unit
from areal.system.discovery import NameRegistry

_LEAVE_S = 3.0
"""From the end of the registration to the end of the process: the fleet looks about once a second."""
_MARGIN_S = 5.0


class ReplicaChanges:
    """Adds servers to the units of a run, and removes them."""

    def __init__(
        self,
        box: RequestBox,
        units: list[Unit],
        *,
        spare_gpus: tuple[str, ...],
        num_attached: int,
        config: LauncherConfig,
        registry: NameRegistry,
        start: Callable[[Unit], None],
        forget: Callable[[Unit], None],
        tell: Callable[[str], None],
    ) -> None:
        self._box = box
        self._units = units
        self._spare_gpus = list(spare_gpus)
        self._num_attached = num_attached
        self._config = config
        self._registry = registry
        self._start = start
        self._forget = forget
        self._tell = tell
        self._requests: dict[str, Request] = {}  # by the name of the server that joins or leaves
        self._leaving_since: dict[str, float] = {}

    @property
    def servers(self) -> list[Unit]:
        """The servers that are to stay."""
        return [unit for unit in self._units if unit.role == "server" and unit.phase != "leaving"]

    @property
    def num_servers(self) -> int:
        """How many the run is to have, also those that it did not start."""
        return self._num_attached or len(self.servers)

    def step(self, now_s: float, *, run_was_ready: bool) -> None:
        """Take up new requests, and bring the others forward."""
        for request in self._box.take():
            refusal = self._begin(request, now_s, run_was_ready=run_was_ready)
            if refusal:
                self._box.answer(request, Answer(state="refused", text=refusal))
        for unit in list(self._units):
            if unit.phase == "joining" and unit.is_ready:
                unit.phase = "member"
                self._finish(unit, "done", f"{unit.name} is ready: it serves once it holds the current weights")
            elif unit.phase == "leaving":
                self._see_off(unit, now_s)

    def failed(self, unit: Unit, cause: str) -> None:
        """A server that joined could not start: the run goes on without it."""
        self._drop(unit)
        self._finish(unit, "refused", cause)

    def _begin(self, request: Request, now_s: float, *, run_was_ready: bool) -> str:
        """Start what is asked. Returns why not."""
        if self._num_attached:
            return (
                "the servers of this run were not started by it (rollout.server_addrs): start or stop them as you did "
                "before; their number stays"
            )
        if not self.servers:
            return "this run has no inference servers: only a run with rollouts can add or remove one"
        if not run_was_ready:
            return "the run is still starting: ask again once it trains"
        match request.action:
            case "add-replica":
                return self._add(request)
            case "remove-replica":
                return self._remove(request, now_s)
            case _:
                assert_never(request.action)

    def _add(self, request: Request) -> str:
        like = self.servers[0].children[0].planned
        size, spare = len(like.gpus), len(self._spare_gpus)
        if size > spare:
            free = "no GPU is free" if size == 1 else f"{size} GPUs are needed and {spare} are free"
            return f"{free} for another replica: remove one first, or give the run more (cluster.n_gpus_per_node)"
        taken = {unit.children[0].planned.index for unit in self._units if unit.role == "server"}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        gpus = tuple(self._spare_gpus.pop(0) for _ in range(size))
        unit = Unit([another_server(like, index, gpus=gpus)])
        unit.phase = "joining"
        self._units.append(unit)
        try:
            self._start(unit)
        except LaunchError as error:
            self._drop(unit)
            return str(error)
        self._requests[unit.name] = request
        limit_s = self._config.ready_timeout_s + _MARGIN_S
        self._box.answer(request, Answer(state="working", text=f"{unit.name} starts", limit_s=limit_s))
        return ""

    def _remove(self, request: Request, now_s: float) -> str:
        members = {unit.name: unit for unit in self.servers if unit.phase == "member"}
        unit = members.get(request.replica)
        if unit is None:
            return f"there is no replica {request.replica!r} in this run: it has {', '.join(sorted(members))}"
        if len(members) == 1:
            return f"{unit.name} is the last replica of this run: add another one first"
        unit.phase = "leaving"
        unit.restart_at_s = None
        self._requests[unit.name] = request
        self._leaving_since[unit.name] = now_s
        self._registry.remove(f"servers/{unit.children[0].planned.index}")
        limit_s = _LEAVE_S + self._config.stop_grace_s + _MARGIN_S
        self._box.answer(request, Answer(state="working", text=f"{unit.name} leaves", limit_s=limit_s))
        return ""

    def _see_off(self, unit: Unit, now_s: float) -> None:
        """Stop a server that leaves: politely, then hard."""
        gone_s = now_s - self._leaving_since[unit.name]
        if not unit.is_running:
            del self._leaving_since[unit.name]
            self._drop(unit)
            left = ", ".join(one.name for one in self.servers)
            self._finish(unit, "done", f"{unit.name} has left; what it was generating goes on elsewhere ({left})")
        elif gone_s >= _LEAVE_S + self._config.stop_grace_s:
            unit.kill()
        elif gone_s >= _LEAVE_S:
            unit.terminate()

    def _drop(self, unit: Unit) -> None:
        self._units.remove(unit)
        unit.clean_up()
        self._forget(unit)
        self._spare_gpus += unit.children[0].planned.gpus

    def _finish(self, unit: Unit, state: Literal["done", "refused"], text: str) -> None:
        self._tell(f"areal: {text}")
        self._box.answer(self._requests.pop(unit.name), Answer(state=state, text=text))
