"""Adding and removing inference servers of a running run, at the request of other commands or by the load.

An added server is an ordinary member from its first ready sign on. A server to be removed is first taken from the
registry, so that the fleet sends it nothing more, and stopped a few seconds later; what it still generates continues on
other servers. Nothing here waits: the supervisor's loop calls `step` repeatedly.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from areal.api.config import ElasticConfig, LauncherConfig
from areal.api.errors import LaunchError
from areal.launcher.attach import Answer, Request, RequestBox
from areal.launcher.backend import ProcessBackend
from areal.launcher.elastic_rules import ElasticRule, server_load
from areal.launcher.job import another_server
from areal.launcher.units import Unit
from areal.system.discovery import NameRegistry
from areal.system.network import Host

_UNREGISTERED_S = 3.0
"""From the removal of the registry entry to SIGTERM: the fleet reads the registry about once a second."""
_MARGIN_S = 5.0


class ReplicaChanges:
    """Adds servers to the units of a run, and removes them."""

    def __init__(
        self,
        box: RequestBox,
        units: list[Unit],
        backend: ProcessBackend,
        *,
        spare_gpus: Iterable[tuple[Host, tuple[str, ...]]],
        num_attached: int,
        config: LauncherConfig,
        elastic: ElasticConfig,
        registry: NameRegistry,
        start: Callable[[Unit], None],
        removed: Callable[[Unit], None],
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._box = box
        self._units = units
        self._backend = backend
        self._gpus: dict[Host, set[str]] = {host: set(gpus) for host, gpus in spare_gpus}
        """Of each machine of the plan, in use or not."""
        for child in (child for unit in units for child in unit.children):
            self._gpus.setdefault(child.planned.host, set()).update(child.planned.gpus)
        self._num_attached = num_attached
        self._config = config
        self._elastic = ElasticRule(elastic)
        self._registry = registry
        self._start = start
        self._removed = removed
        self._say = say
        self._clock = clock
        self._requests: dict[str, Request] = {}  # by the name of the server that joins or leaves
        self._since: dict[str, float] = {}
        """When a server began to join or to leave."""
        self._refusal = ""

    @property
    def _servers(self) -> list[Unit]:
        """The servers that are not being removed."""
        return [unit for unit in self._units if unit.role == "server" and unit.phase != "leaving"]

    @property
    def num_servers(self) -> int:
        """The number of servers that the run uses, including servers that it did not start."""
        return self._num_attached or len(self._servers)

    def step(self, now_s: float, *, run_was_ready: bool, status: dict[str, Any] | None = None) -> None:
        """Take new requests, change the number of servers by their load, and continue the changes in progress.

        `status`: the last answer of the controller.
        """
        for request in self._box.take():
            if refusal := self._begin(request, now_s, run_was_ready=run_was_ready):
                self._box.answer(request, Answer(state="refused", text=refusal))
        if run_was_ready and not self._requests:  # one change at a time
            self._scale(now_s, status)
        for unit in list(self._units):
            if unit.phase == "joining" and not unit.num_starts:
                self._start_joining(unit, now_s)
            elif unit.phase == "joining" and unit.is_ready:
                unit.phase = "member"
                self._finish(unit, f"{unit.name} is ready: it serves once it holds the current weights")
            elif unit.phase == "leaving":
                self._continue_removal(unit, now_s)

    def failed(self, unit: Unit, cause: str) -> None:
        """An added server could not start: the run continues without it."""
        self._drop(unit)
        self._finish(unit, cause, refused=True)

    def give_up(self, unit: Unit, cause: str) -> None:
        """A server that cannot be restarted: the run continues on the others."""
        self._drop(unit)
        self._say(f"areal: {cause}")

    def _scale(self, now_s: float, status: dict[str, Any] | None) -> None:
        """Begin the change that the load asks for. Why it is impossible is printed once."""
        change = self._elastic.decide(server_load(self.num_servers, status), now_s)
        if not change:
            return
        members = [unit.children[0].planned for unit in self._servers if unit.phase == "member"]
        replica = max(members, key=lambda planned: planned.index).name if change == "remove" and members else ""
        request = Request(action="add-replica" if change == "add" else "remove-replica", replica=replica)
        refusal = self._begin(request, now_s, run_was_ready=True)
        if refusal and refusal != self._refusal:
            self._say(f"areal: the load asks for another number of servers: {refusal}")
        self._refusal = refusal

    def _begin(self, request: Request, now_s: float, *, run_was_ready: bool) -> str:
        """Start the requested change. Returns why it is refused, or ''."""
        if self._num_attached:
            return "the servers of this run were not started by it (rollout.server_addrs), so their number is fixed"
        if not self._servers:
            return "this run has no inference servers: only a run with rollouts can add or remove one"
        if not run_was_ready:
            return "the run is still starting: repeat the request once it trains"
        return self._add(request, now_s) if request.action == "add-replica" else self._remove(request, now_s)

    def _add(self, request: Request, now_s: float) -> str:
        likes = [child.planned for child in self._servers[0].children]
        taken = {unit.children[0].planned.index for unit in self._units if unit.role == "server"}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        # With separate Slurm jobs each server has a job of one node, so one of several parts finds no free machines.
        host = self._backend.new_host(f"server-{index}") if len(likes) == 1 else None
        places = [(host, likes[0].gpus)] if host is not None else self._free_places(len(likes[0].gpus), len(likes))
        if not places:
            spare = sorted(map(len, self._free_gpus().values()), reverse=True)[: len(likes)] or [0]
            where = "one machine" if len(likes) == 1 else f"each of {len(likes)} machines"
            fix = "remove a replica first, or give the run more GPUs (cluster.n_gpus_per_node)"
            free = ", ".join(map(str, spare))
            return f"another replica needs {len(likes[0].gpus)} GPUs of {where}, and {free} are free: {fix}"
        parts = [
            another_server(like, index, host=host, gpus=gpus) for like, (host, gpus) in zip(likes, places, strict=True)
        ]
        unit = Unit(parts, self._backend, self._clock)
        unit.phase = "joining"
        self._units.append(unit)
        self._since[unit.name] = now_s
        self._accept(request, unit, f"{unit.name} starts", self._config.ready_timeout_s)
        self._start_joining(unit, now_s)
        return ""

    def _start_joining(self, unit: Unit, now_s: float) -> None:
        """Start an added server once its machine is there."""
        limit_s = self._config.ready_timeout_s
        if not self._backend.is_prepared(unit.children[0].planned):
            if now_s - self._since[unit.name] > limit_s:
                self.failed(unit, f"{unit.name} got no machine within {limit_s:g} s (launcher.ready_timeout_s)")
            return
        try:
            self._start(unit)
        except LaunchError as error:
            self.failed(unit, str(error))

    def _free_gpus(self) -> dict[Host, list[str]]:
        """Of each machine of the plan, the GPUs that no process uses now, also none that moved there."""
        used = [self._backend.place_of(child.planned) for unit in self._units for child in unit.children]
        taken = {(host, gpu) for host, gpus in used for gpu in gpus}
        return {host: sorted(gpu for gpu in gpus if (host, gpu) not in taken) for host, gpus in self._gpus.items()}

    def _free_places(self, num_gpus: int, num_parts: int) -> list[tuple[Host, tuple[str, ...]]]:
        """The first machines with enough free GPUs, one for each part; none when there are too few.

        For a server on the CPU it is the machine with the fewest servers.
        """
        if num_gpus:
            found = [
                (host, tuple(gpus[:num_gpus])) for host, gpus in self._free_gpus().items() if len(gpus) >= num_gpus
            ]
            return found[:num_parts] if len(found) >= num_parts else []
        hosts = dict.fromkeys(
            self._backend.place_of(child.planned)[0] for unit in self._units for child in unit.children
        )
        servers = Counter(self._backend.place_of(unit.children[0].planned)[0] for unit in self._servers)
        return [(min(hosts, key=lambda host: servers[host]), ())]

    def _remove(self, request: Request, now_s: float) -> str:
        members = {unit.name: unit for unit in self._servers if unit.phase == "member"}
        unit = members.get(request.replica)
        if unit is None:
            return f"this run has no replica {request.replica!r}: it has {', '.join(sorted(members))}"
        if len(members) == 1:
            return f"{unit.name} is the last replica of this run: add another one first"
        unit.phase, unit.restart_at_s = "leaving", None
        self._since[unit.name] = now_s
        self._registry.remove(f"servers/{unit.children[0].planned.index}")
        self._accept(request, unit, f"{unit.name} is stopped", _UNREGISTERED_S + self._config.stop_grace_s)
        return ""

    def _accept(self, request: Request, unit: Unit, text: str, limit_s: float) -> None:
        self._requests[unit.name] = request
        self._box.answer(request, Answer(state="working", text=text, limit_s=limit_s + _MARGIN_S))

    def _continue_removal(self, unit: Unit, now_s: float) -> None:
        """SIGTERM after some seconds, SIGKILL after the grace period."""
        leaving_s = now_s - self._since[unit.name]
        if not unit.is_running:
            self._drop(unit)
            others = ", ".join(one.name for one in self._servers)
            self._finish(unit, f"{unit.name} is removed; its requests continue on {others}")
        elif leaving_s >= _UNREGISTERED_S + self._config.stop_grace_s:
            unit.kill()
        elif leaving_s >= _UNREGISTERED_S:
            for child in unit.children:
                child.terminate()

    def _drop(self, unit: Unit) -> None:
        self._units.remove(unit)
        unit.kill_descendants()
        self._removed(unit)
        for child in unit.children:
            self._backend.forget(child.name)

    def _finish(self, unit: Unit, text: str, *, refused: bool = False) -> None:
        self._say(f"areal: {text}")
        self._box.answer(self._requests.pop(unit.name), Answer(state="refused" if refused else "done", text=text))
