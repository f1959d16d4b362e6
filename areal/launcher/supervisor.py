"""The supervisor of a run: starts all processes, restarts those that die, ends the run, stops all processes.

Its loop looks 20 times a second at the ready signs, heartbeats and exit codes of the processes, at the requests of
other commands, and at interruptions by the user. `restart_rules` decides which death leads to which restart.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from areal.api.config import ElasticConfig, LauncherConfig, RecoverConfig
from areal.api.errors import LaunchError, ServerUnavailable
from areal.launcher.attach import Answer, Request, RequestBox
from areal.launcher.backend import ProcessBackend
from areal.launcher.job import LaunchPlan, another_server
from areal.launcher.preflight import checkpoint_text, disk_problem, newest_checkpoint
from areal.launcher.restart_rules import Death, RestartCounts, backoff_s, decide
from areal.launcher.result import HeldOutLines, RunAlarmLines, episodes_of
from areal.launcher.status import Interruptions, LivenessWatch, RunStatus, Source, StatusLine, has_saved, trained_steps
from areal.launcher.units import Child, Unit, units_of
from areal.observe.alarms import Alarm
from areal.observe.step_files import append_step_line
from areal.system.discovery import NameRegistry
from areal.system.durable import finish_interrupted_writes
from areal.system.network import Host
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# The rule by which a run changes its number of inference servers. Pure: it has no clock and starts nothing.

Change = Literal["add", "remove", ""]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    num_servers: int
    """Servers that run or start, without those that are being removed."""
    num_requests: int
    """Requests of the run that these servers compute or hold in their queues."""


def server_load(num_servers: int, status: dict[str, Any] | None) -> ServerLoad | None:
    """The load in a status of the controller; None without one, or while weights are updated and requests pause."""
    if status is None or status.get("updating_to") is not None:
        return None
    replicas: list[dict[str, Any]] = (status.get("replicas") or {}).get("replicas") or []
    return ServerLoad(num_servers, sum(replica["running"] for replica in replicas))


class ElasticRule:
    """Compares the requests per server with two bounds; a change needs a bound to be exceeded for some time.

    The time starts again after each change and each reading between the bounds. This and the distance of the bounds (a
    factor of two, which the configuration checks) prevent that a change causes the opposite one.
    """

    def __init__(self, config: ElasticConfig) -> None:
        self._config = config
        self._leaning: Change = ""
        self._since_s = 0.0

    def decide(self, load: ServerLoad | None, now_s: float) -> Change:
        """The change to begin now. `load` None = unknown: the times continue, and nothing changes."""
        config = self._config
        if config.max is None or load is None:
            return ""
        leaning, hold_s = self._lean(load)
        if leaning != self._leaning:
            self._leaning, self._since_s = leaning, now_s
        if not leaning or now_s - self._since_s < hold_s:
            return ""
        self._leaning = ""
        return leaning

    def _lean(self, load: ServerLoad) -> tuple[Change, float]:
        """The wanted change, and for how long it must be wanted."""
        config, per_server = self._config, load.num_requests / max(load.num_servers, 1)
        if config.max is not None and load.num_servers > config.max:
            return "remove", config.idle_s
        if load.num_servers < config.min:
            return "add", config.busy_s
        if per_server > config.add_above and load.num_servers != config.max:
            return "add", config.busy_s
        if per_server < config.remove_below and load.num_servers > config.min:
            return "remove", config.idle_s
        return "", 0.0


# ----------------------------------------------------------------------------------------------------------------------
# Adding and removing inference servers of a running run, at the request of other commands or by the load.
#
# An added server is an ordinary member from its first ready sign on. A server to be removed is first taken from the
# registry, so that the fleet sends it nothing more, and stopped a few seconds later; what it still generates continues
# on other servers. Nothing here waits: the supervisor's loop calls `step` repeatedly.

_UNREGISTERED_S = 3.0
"""Seconds between the removal of the registry entry and SIGTERM: the fleet reads the registry once a second."""
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
        """GPUs of each machine of the plan, in use or not."""
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
        self._since: dict[str, float] = {}  # When a server began to join or to leave.
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
        """The GPUs of each machine of the plan that no process uses now, also none that moved there."""
        used = [self._backend.place_of(child.planned) for unit in self._units for child in unit.children]
        taken = {(host, gpu) for host, gpus in used for gpu in gpus}
        return {host: sorted(gpu for gpu in gpus if (host, gpu) not in taken) for host, gpus in self._gpus.items()}

    def _free_places(self, num_gpus: int, num_parts: int) -> list[tuple[Host, tuple[str, ...]]]:
        """The first machines with enough free GPUs, one for each part; none when there are too few.

        For a server on the CPU it is the machine with the fewest servers.
        """
        if num_gpus:
            places = [
                (host, tuple(gpus[:num_gpus])) for host, gpus in self._free_gpus().items() if len(gpus) >= num_gpus
            ]
            return places[:num_parts] if len(places) >= num_parts else []
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
            others = ", ".join(server.name for server in self._servers)
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


_POLL_S = 0.05
_SETTLE_S = 0.5
"""After a first death: how long other processes may take to die of the same cause before the cause is determined."""
_CONTROLLER_ALONE_S = 60.0
"""The controller ends because the trainers end. When they still run after this time, its end was unexpected."""
_STUCK_S = 10.0
_RSS_INTERVAL_S = 1.0

Status = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    status: Status
    cause: str
    """Empty unless it failed."""
    server_error: list[str]
    """What foreign servers of a failed run printed as their errors."""
    was_ready: bool
    """All processes were ready once."""
    exit_codes: dict[str, int | None]
    """Exit code of every process after its last start, also of removed servers."""
    restarts: dict[str, list[str]]
    """Unit (a server, the controller, the trainers) -> the reason of each restart."""
    peak_rss_bytes: int
    """Highest resident memory of all processes together, seen once a second."""
    episodes: dict[str, Any] | None
    """Numbers of episodes by state and by reason; None without a controller."""
    alarms: list[Alarm]
    steps_done: int
    """Train steps that are complete, also those whose evaluation is not."""


class Supervisor:
    """Runs the processes of one plan until the run ends."""

    def __init__(
        self,
        plan: LaunchPlan,
        config: LauncherConfig,
        recover: RecoverConfig,
        paths: RunPaths,
        backend: ProcessBackend,
        *,
        registry: NameRegistry,
        source: Source,
        line: StatusLine,
        interruptions: Interruptions,
        elastic: ElasticConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._recover = recover
        self._paths = paths
        self._backend = backend
        self._registry = registry
        self._line = line
        self._interruptions = interruptions
        self._clock = clock
        self._recovered = plan.recover
        self._units = units_of(plan.processes, backend, clock)
        self._counts = RestartCounts()
        self._liveness = LivenessWatch(paths, backend, config.hang_s)
        newest = newest_checkpoint(paths) if plan.recover else None
        self._alarms = RunAlarmLines(paths, steps_done=int(newest.name.removeprefix("step-")) if newest else 0)
        self._status = RunStatus(
            config, backend, source, line, self._liveness, paths.stacks, self._alarms, HeldOutLines(paths.metrics)
        )
        self._replicas = ReplicaChanges(
            RequestBox(paths),
            self._units,
            backend,
            spare_gpus=plan.spare_gpus,
            num_attached=len(plan.attached),
            config=config,
            elastic=elastic or ElasticConfig(),
            registry=registry,
            start=self._start,
            removed=self._removed,
            say=line.say,
            clock=clock,
        )
        self._was_ready = False
        self._server_error: list[str] = []
        self._disk_problem = ""
        self._removed_codes: dict[str, int | None] = {}
        self._removed_restarts: dict[str, list[str]] = {}
        self._ranks_ending_since_s: float | None = None
        self._trainers_ended_s: float | None = None
        self._reported_stuck: set[int | None] = set()
        self._peak_rss_bytes = 0
        self._rss_due_s = 0.0

    def run(self) -> Outcome:
        """Start all processes and return when none is left."""
        cause: str | None = "the launcher failed"
        try:
            for unit in list(self._units):
                self._start(unit)
            cause = self._watch()
            self._save_before_stop()
        except (LaunchError, ServerUnavailable) as error:  # a process could not be started, or the registry is lost
            cause = f"{error} [{error.code}]"
        finally:
            self._stop()
        if self._interruptions.count:
            status: Status = "interrupted"
        else:
            status = "completed" if cause is None else "failed"
        problem = self._disk_problem or (disk_problem(self._paths) if status == "failed" else "")
        if problem and cause:
            cause = f"{problem}; {cause}"
        return Outcome(
            status=status,
            cause=(cause or "") if status == "failed" else "",
            server_error=self._server_error if status == "failed" else [],
            was_ready=self._was_ready,
            exit_codes=self._removed_codes | {child.name: child.exit_code for child in self._children},
            restarts=self._removed_restarts | {unit.name: unit.restarts for unit in self._units if unit.restarts},
            peak_rss_bytes=self._peak_rss_bytes,
            episodes=episodes_of(self._paths, self._status.last_known),
            alarms=self._alarms.all(),
            steps_done=trained_steps(self._paths, self._status.last_known),
        )

    @property
    def _children(self) -> list[Child]:
        return [child for unit in self._units for child in unit.children]

    @property
    def _leaders(self) -> list[Unit]:
        """The units that decide when the run ends: the controller and the trainers."""
        return [unit for unit in self._units if unit.role != "server"]

    @property
    def _deciding(self) -> Unit:
        """The unit whose success ends the run: the trainers; in an evaluation, which has none, the controller."""
        return next(unit for role in ("trainer", "controller") for unit in self._units if unit.role == role)

    def _watch(self) -> str | None:
        """Loop until the run succeeds (None), fails (the cause) or is interrupted (None)."""
        while not self._interruptions.count:
            self._read_ready_signs()
            cause = self._ended_without_taking_part()
            if cause is None and self._deciding.has_succeeded:
                if self._is_over():
                    return None
            else:
                cause = cause or self._kill_hung() or self._handle_deaths() or self._late()
                self._replicas.step(self._clock(), run_was_ready=self._was_ready, status=self._status.last)
            if cause is not None:
                return cause
            if time.monotonic() >= self._rss_due_s:
                self._rss_due_s = time.monotonic() + _RSS_INTERVAL_S
                self._peak_rss_bytes = max(self._peak_rss_bytes, self._backend.resident_bytes())
            self._status.show(self._children, was_ready=self._was_ready)
            time.sleep(_POLL_S)
        return None

    def _read_ready_signs(self) -> None:
        waiting = [child for child in self._children if not child.is_ready]
        signs = self._registry.list("ready") if waiting else {}
        for child in waiting:
            if f"ready/{child.name}" in signs:
                child.is_ready = child.was_ready = True
        self._was_ready = self._was_ready or all(unit.is_ready for unit in self._units)

    def _is_over(self) -> bool:
        """After all trainers succeeded nothing is restarted, and the controller gets time to end by itself."""
        now = self._clock()
        self._trainers_ended_s = now if self._trainers_ended_s is None else self._trainers_ended_s
        has_waited = now - self._trainers_ended_s >= self._config.stop_grace_s
        return has_waited or not any(unit.is_running for unit in self._leaders)

    def _kill_hung(self) -> str | None:
        """Kill hung processes, which are then handled as crashes. Returns why the run ends."""
        for child, text in self._liveness.look(self._children, self._clock(), self._status.last):
            self._disk_problem = disk_problem(self._paths)
            if self._disk_problem:  # it may wait for room
                return f"{child.name} {text}"
            child.kill(text)
        if self._liveness.step is not None:
            self._counts.saw_step(self._liveness.step)
        return None

    def _handle_deaths(self) -> str | None:
        """Restart the units that died. Returns why the run ends."""
        for unit in list(self._units):
            if unit.phase == "leaving":
                continue
            if unit.restart_at_s is not None:
                is_due = self._clock() >= unit.restart_at_s and not unit.is_running
                if is_due and all(self._backend.is_prepared(child.planned) for child in unit.children):
                    self._restart(unit)
            elif cause := self._handle_death(unit):
                return cause
        return None

    def _handle_death(self, unit: Unit) -> str | None:
        """Look whether a unit died, and decide what follows. Returns why the run ends."""
        now = self._clock()
        if unit.role == "controller" and unit.has_succeeded and not unit.must_run:
            unit.dead_since_s = now if unit.dead_since_s is None else unit.dead_since_s
            unit.must_run = now - unit.dead_since_s >= _CONTROLLER_ALONE_S
        dead = unit.dead()
        if not dead:
            return None
        unit.dead_since_s = now if unit.dead_since_s is None else unit.dead_since_s
        was_killed = any((child.exit_code or 0) < 0 for child in dead)
        if unit.is_running and not was_killed and now - unit.dead_since_s < _SETTLE_S:
            return None  # the others may die of the same cause, or may be the cause
        self._read_ready_signs()  # a sign may be newer than the last look
        unit.kill()
        count = self._counts.of(unit.name)
        self._disk_problem = disk_problem(self._paths)
        deaths = [Death(name=child.name, exit_code=child.exit_code or 0, was_ready=child.was_ready) for child in dead]
        decision = decide(
            unit.role,
            deaths,
            num_restarts=count,
            recover=self._recover,
            disk_problem=self._disk_problem,
            others_serve=any(other.role == "server" and other is not unit and other.is_ready for other in self._units),
        )
        first = next(child for child in dead if child.name == decision.cause.name)
        if unit.phase == "joining":
            text = f"{unit.name} could not join the run, which continues without it: {self._failure_text(first)}"
            self._replicas.failed(unit, text)
            return None
        if decision.gives_up:
            text = f"the run continues without {unit.name} ({decision.reason}): {self._failure_text(first)}"
            self._replicas.give_up(unit, text)
            return None
        if decision.ends_run:
            return self._cause(first, decision.reason)
        delay_s = backoff_s(count)
        self._counts.add(unit.name)
        unit.restarts.append(f"{first.name} {first.exit_text()}")
        self._keep_restart(unit)
        unit.restart_at_s = now + delay_s
        self._unregister(unit)
        who = f"{first.name} restarts"
        if len(unit.children) > 1:
            who = "all trainer ranks restart" if unit.role == "trainer" else f"all parts of {unit.name} restart"
        self._line.say(
            f"{self._failure_text(first)}\n  {who} in {delay_s:g} s "
            f"(restart {count + 1} of at most {self._recover.retries} without progress)"
        )
        return None

    def _keep_restart(self, unit: Unit) -> None:
        """Write the restart where readers find it while the run lasts, and after it was killed."""
        facts = {"unit": unit.name, "cause": unit.restarts[-1]}
        try:
            append_step_line(self._paths.restarts, trained_steps(self._paths), facts)
        except OSError as error:
            self._line.say(f"areal: warning: {self._paths.restarts} is not written: {error.strerror or error}")

    def _start(self, unit: Unit) -> None:
        unit.start(num_servers=self._replicas.num_servers, recover=None)

    def _restart(self, unit: Unit) -> None:
        unit.kill_descendants()
        self._unregister(unit)  # also what it wrote after its death was seen
        recover = None
        if unit.role == "trainer":
            finish_interrupted_writes(self._paths.recover)
            newest = newest_checkpoint(self._paths)
            self._recovered = recover = newest is not None
            self._line.say(f"areal: trainers continue from {checkpoint_text(newest)}")
            for other in self._leaders:  # a controller that ended because training was over
                other.must_run = other.must_run or (other is not unit and other.has_succeeded)
        unit.start(num_servers=self._replicas.num_servers, recover=recover)

    def _unregister(self, unit: Unit) -> None:
        """Remove the entries by which others find the processes of a unit."""
        for child in unit.children:
            child.is_ready = False
            for name in child.registered_names:
                self._registry.remove(name)

    def _removed(self, unit: Unit) -> None:
        self._unregister(unit)
        self._removed_codes |= {child.name: child.exit_code for child in unit.children}
        if unit.restarts:
            self._removed_restarts[unit.name] = unit.restarts

    def _cause(self, first: Child, reason: str) -> str:
        """The likely cause of the failure, then the other deaths."""
        if self._disk_problem:  # `run` reports it as the cause
            return f"{first.name} {first.exit_text()}"
        deadline = self._clock() + _SETTLE_S
        while self._clock() < deadline and any(unit.is_running for unit in self._leaders):
            time.sleep(_POLL_S)
        others = [child for unit in self._leaders if unit.restart_at_s is None for child in unit.dead()]
        dead = sorted({*others, first}, key=Child.last_output_ns)
        first = first if reason else dead[0]
        remark = f" ({reason})" if reason else ""
        then = [child for child in dead if child is not first and not first.has_same_error(child)]
        return self._failure_text(first) + remark + "".join(f"\n  then {self._failure_text(child)}" for child in then)

    def _failure_text(self, child: Child) -> str:
        """How a process failed. What a foreign server printed as its error is shown first, above this text."""
        lines = child.server_error()
        for line in lines:
            self._line.say(line)
        self._server_error += lines
        return child.failure_text()

    def _ended_without_taking_part(self) -> str | None:
        """A process that ended with 0 and was never ready: its script does not train."""
        if self._recovered:  # a run that was complete before has nothing to do
            return None
        for child in (child for unit in self._leaders for child in unit.children):
            if child.exit_code == 0 and not child.was_ready and self._registry.get(f"ready/{child.name}") is None:
                return (
                    f"{child.name} ended before it joined the run: a script must call train(...) of its PPOTrainer or "
                    f"SFTTrainer in every process ({self._failure_text(child)})"
                )
        return None

    def _late(self) -> str | None:
        """A process that exceeds its time to get ready, or to end after the other ranks. Returns why the run ends."""
        now, limit_s = self._clock(), self._config.ready_timeout_s
        for unit in self._units:
            for child in (child for child in unit.children if child.is_running):
                if child.killed_s is not None:
                    self._report_stuck(child, now)
                elif not child.is_ready and unit.phase != "leaving" and now - child.started_s > limit_s:
                    text = f"was not ready after {limit_s:g} s (launcher.ready_timeout_s)"
                    if not child.was_ready and unit.phase == "member":
                        return f"{child.name} {text}: {self._failure_text(child)}"
                    child.kill(text)
        ranks = self._deciding.children
        if not any(child.exit_code == 0 for child in ranks):
            self._ranks_ending_since_s = None
            return None
        self._ranks_ending_since_s = now if self._ranks_ending_since_s is None else self._ranks_ending_since_s
        if now - self._ranks_ending_since_s > limit_s:
            names = ", ".join(child.name for child in ranks if child.is_running)
            return f"{names} did not end within {limit_s:g} s after the other ranks had ended"
        return None

    def _report_stuck(self, child: Child, now: float) -> None:
        """Report, once, that the kernel does not end a killed process."""
        if child.killed_s is not None and now - child.killed_s > _STUCK_S and child.pid not in self._reported_stuck:
            self._reported_stuck.add(child.pid)
            process = f"{child.name} (pid {child.pid})"
            self._line.say(f"areal: {process} still runs {_STUCK_S:g} s after SIGKILL: waiting for its end")

    def _save_before_stop(self) -> None:
        """After the first Ctrl-C, wait until the trainers have saved the current step, or the second Ctrl-C."""
        self._read_ready_signs()
        wanted, limit_s = trained_steps(self._paths), self._config.save_grace_s
        may_wait = self._interruptions.may_wait and self._deciding.is_ready and limit_s > 0
        if not may_wait or has_saved(self._paths, wanted) or self._recover.mode == "disabled":
            return
        self._paths.checkpoint_request.parent.mkdir(parents=True, exist_ok=True)
        self._paths.checkpoint_request.touch()
        limit = f"at most {limit_s:g} s (launcher.save_grace_s)"
        self._line.say(f"areal: interrupted: saves after this step, {limit}, and ends; Ctrl-C again ends it at once")
        deadline = self._clock() + limit_s
        while self._interruptions.count == 1 and not has_saved(self._paths, wanted) and self._clock() < deadline:
            if self._kill_hung() or not all(child.is_running for child in self._deciding.children):
                return
            self._status.show(self._children, was_ready=self._was_ready)
            time.sleep(_POLL_S)

    def _stop(self) -> None:
        """End all processes. A second interruption ends the grace period."""
        names = [child.name for child in self._children if child.pid is not None]
        num_running = sum(child.is_running for child in self._children)
        if self._interruptions.count and num_running:
            grace = f"{self._config.stop_grace_s:g} s to end (launcher.stop_grace_s)"
            self._line.say(f"areal: interrupted: {num_running} processes have {grace}; Ctrl-C again kills them at once")
        self._backend.stop(names, self._config.stop_grace_s, hurry=lambda: self._interruptions.count > 1)
        if self._was_ready and not self._interruptions.count:
            self._status.end()
