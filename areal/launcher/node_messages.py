"""Messages between a launcher and the agents of its nodes: one JSON object per line, with its kind in `do`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from areal.launcher.job import PlannedProcess
from areal.system.heartbeat import Beat

HELLO_ID = -1
"""Id of the reply to Hello."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of the launcher. The agent answers with its Facts, or with a Reply that has an error and ends."""

    do: Literal["hello"] = "hello"
    folder: str
    """Working directory of the processes."""
    silence_s: float
    """Silence of the launcher, in seconds, after which the agent ends its processes. Both write ten times as often."""
    peers: tuple[str, ...] = ()
    """Names or addresses of the other machines: the node's own address is the one that reaches them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """The run whose processes the agent will start."""

    do: Literal["open"] = "open"
    id: int
    run_dir: str
    secrets: dict[str, str] = field(repr=False)
    """Environment variables of every process that are in no plan, such as the run's token."""
    probe: str
    """A file in the run folder that the launcher has just written."""
    probe_text: str
    limit_s: float
    """How long the agent waits for this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Accept connections at a free port of this address, which the Reply has. An empty address ends this."""

    do: Literal["listen"] = "listen"
    id: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Connect to each of these nodes: name, address and port. The Reply has an error when one does not accept."""

    do: Literal["reach"] = "reach"
    id: int
    targets: tuple[tuple[str, str, int], ...]
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    do: Literal["start"] = "start"
    id: int
    planned: PlannedProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    do: Literal["signal"] = "signal"
    name: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Request for the stacks of a process."""

    do: Literal["stacks"] = "stacks"
    id: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Request for the last log lines of a process."""

    do: Literal["lines"] = "lines"
    id: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End processes; a Reply follows when all have ended. `grace_s` 0 also ends the grace period of an earlier Stop."""

    do: Literal["stop"] = "stop"
    id: int
    names: tuple[str, ...]
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    do: Literal["ping"] = "ping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Answer to Hello: what a plan needs to know about the node."""

    do: Literal["facts"] = "facts"
    hostname: str
    address: str
    """Address under which the other machines reach the node."""
    cores: int
    gpus: tuple[str, ...]
    memory_bytes: int
    python: str
    areal: str
    clock_s: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a message with an id. `error` is empty on success."""

    do: Literal["reply"] = "reply"
    id: int = HELLO_ID
    pid: int = 0
    port: int = 0
    lines: tuple[str, ...] = ()
    written_ns: int = 0
    done: bool = True
    seconds: float = 0.0
    """In the answer to Open: how long one synced write and rename in the run folder took there."""
    error: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A process has ended. Negative `code` = by this signal."""

    do: Literal["exit"] = "exit"
    name: str
    pid: int
    code: int
    lines: tuple[str, ...]
    written_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The agent works."""

    do: Literal["alive"] = "alive"
    resident_bytes: int
    beats: dict[str, Beat] = field(default_factory=dict[str, Beat])
    """The last heartbeat of each process there, by its name."""


ToAgent = Annotated[
    Hello | Open | Listen | Reach | Start | Signal | Stacks | Lines | Stop | Ping, Field(discriminator="do")
]
FromAgent = Annotated[Facts | Reply | Exit | Alive, Field(discriminator="do")]
TO_AGENT: TypeAdapter[ToAgent] = TypeAdapter(ToAgent)
FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(FromAgent)
