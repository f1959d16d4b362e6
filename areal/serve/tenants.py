"""What the service knows: sessions, adapters with their requests in order, samplers, saved weights. No I/O.

The state is made from the events of the journal alone: `apply` is called for every event once it is on disk.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from areal.api.errors import RequestError
from areal.serve.journal import PLACES, Event, Place

Kind = Literal["create", "load", "loss", "step", "save", "export", "invalid"]
"""What a request of a client does: an adapter begins with create or load, and has the request number 0."""
READ_ONLY = ("save", "export", "invalid")
"""Kinds that leave the adapter as it was."""
MAX_REPLAYED = 64
"""Requests after which the next optimiser step is followed by a snapshot. After twice as many any request is, with the
gradients: that is what a restarted trainer repeats at most."""
MAX_KEPT, MAX_UNREAD = 256, 8192
"""A cut of the journal keeps the results of as many newest requests of a model, and more where no client has asked."""
MAX_TURN = 16
"""Passes of a model that others wait for at most."""
MAX_AHEAD, MAX_WAITING_BYTES = 1024, 2**30
"""Requests of a model, and their bytes, that may wait. The one that is to be computed next is accepted even so."""
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
"""Kinds of saved weights: with the state of training, for servers, and for download."""
INFLIGHT = ".inflight"
"""The name of the weights that the in-flight samplers of a model share, which later saves replace."""
ALPHA = 32.0
"""The product of an adapter is multiplied by ALPHA / rank. The API has no field for it."""


class NotFound(RequestError):
    """There is no such object, or it belongs to another key."""

    code = "serve.not_found"


class Forgotten(RequestError):
    """The request was computed once, and its result is not kept any more."""

    code = "request.forgotten"


@dataclass(slots=True, kw_only=True)
class Operation:
    """One request to an adapter."""

    model: str
    seq: int
    kind: Kind
    arguments: Mapping[str, Any]
    digest: str
    """Checksum of the content: a repeated request has the same one."""
    body: Place | None = None
    result: Place | None = None
    is_ok: bool = True
    is_read: bool = False
    """A client has asked for its result."""
    deliveries: int = 0
    """How often it was sent to the trainer."""

    @property
    def request_id(self) -> str:
        return f"{self.model}:{self.seq}"

    @property
    def is_done(self) -> bool:
        return self.result is not None

    @property
    def is_step(self) -> bool:
        """Whether it has changed the weights by a step."""
        return self.kind == "step" and self.is_done and self.is_ok

    @property
    def counts(self) -> dict[str, int]:
        """What the audit counts of it."""
        state = "waiting" if not self.is_done else "computed" if self.is_ok else "failed"
        return {"requests": 1, state: 1, "optimiser_steps": int(self.is_step)}


@dataclass(slots=True, kw_only=True)
class Model:
    """An adapter with its requests."""

    id: str
    session: str
    settings: Mapping[str, Any]
    created_at: float
    user_metadata: Mapping[str, Any] | None = None
    operations: dict[int, Operation] = field(default_factory=dict[int, Operation])
    next_seq: int = 0
    """The request that is to be computed next."""
    num_done: int = 0
    """All requests below this number have a result."""
    snapshot: int | None = None
    """The newest request whose effect is in a snapshot."""
    failed_loss: int | None = None
    """A request since the last optimiser step whose gradients failed."""
    num_steps: int = 0
    """Optimiser steps in its state, up to the newest request that was computed."""
    forgotten: Counter[str] = field(default_factory=Counter[str])
    """Requests before `num_done` that a cut has dropped: how many were computed, failed, and were optimiser steps."""
    is_resident: bool = False
    """The trainer has it."""
    is_stuck: bool = False
    """A snapshot of it failed: it stays in the trainer."""
    problem: str = ""
    """Why its state is lost until the service starts again; empty = it is not."""
    last_used: float = 0.0

    def rewind(self) -> None:
        """The trainer lost it: its requests since the snapshot are computed again."""
        self.next_seq = 0 if self.snapshot is None else self.snapshot + 1
        self.is_resident = False

    @property
    def is_runnable(self) -> bool:
        return self.next_seq in self.operations

    @property
    def begins_to_export(self) -> bool:
        """The next request is an export, and the one before is none."""
        before = self.operations.get(self.next_seq - 1)
        return self.operations[self.next_seq].kind == "export" and before is not None and before.kind != "export"

    def check_known(self, seq: int) -> None:
        """Forgotten for a request that a cut has dropped."""
        if seq < self.num_done and seq not in self.operations:
            text = f"request {seq} of {self.id} was computed once, long before request {self.num_done}: its result is"
            raise Forgotten(f"{text} not kept any more, use the next seq_id")

    def check_room(self, seq: int) -> None:
        """RequestError unless a new request may wait: a client may leave out a number for ever."""
        numbers = range(self.num_done, self.num_done + MAX_AHEAD)
        ahead = (self.operations.get(number) for number in numbers)
        num_bytes = sum(
            operation.body.size for operation in ahead if operation is not None and operation.body is not None
        )
        if seq > self.num_done and (seq >= self.num_done + MAX_AHEAD or num_bytes > MAX_WAITING_BYTES):
            text = f"request {seq} of {self.id} has no room: its request {self.num_done} has no result"
            text += f", and {num_bytes} bytes of requests wait for that: send it again later"
            raise RequestError(text, code="request.too_many")

    def shorten(self, num_kept: int) -> None:
        """Forget requests whose effect is in the snapshot, except those without a reader and the newest ones."""
        through = -1 if self.snapshot is None else self.snapshot
        for seq, operation in [(seq, operation) for seq, operation in self.operations.items() if seq <= through]:
            operation.body = None
            if seq < self.num_done - (num_kept if operation.is_read else MAX_UNREAD):
                self.forgotten.update(operation.counts)
                del self.operations[seq]

    def counts(self) -> Counter[str]:
        """What the audit counts of its requests."""
        counter = self.forgotten.copy()
        for operation in self.operations.values():
            counter.update(operation.counts)
        return counter

    def events(self) -> Iterator[Event]:
        """Events that make it."""
        facts: Event = {"event": "model", "id": self.id, "session": self.session, "settings": self.settings}
        facts |= {"created_at": self.created_at, "user_metadata": self.user_metadata, "snapshot": self.snapshot}
        facts |= {"num_done": self.num_done, "failed_loss": self.failed_loss, "num_steps": self.num_steps}
        yield facts | {"forgotten": dict(self.forgotten)}
        for seq, operation in sorted(self.operations.items()):
            facts = {"event": "request", "model": self.id, "seq": seq, "kind": operation.kind}
            facts |= {"digest": operation.digest, "arguments": operation.arguments}
            facts |= {"is_ok": operation.is_ok, "is_read": operation.is_read}
            yield facts | {"body": operation.body, "result": operation.result}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeights:
    """Weights under a tinker:// path."""

    model: str
    kind: str
    name: str
    at: float
    settings: Mapping[str, Any]
    seq: int
    """Number of the request that saved them."""
    num_steps: int
    """Optimiser steps in their state."""
    expires_at: float | None = None
    is_public: bool = False
    user_metadata: Mapping[str, str] | None = None

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A sampling session: the base model, or weights that do not change."""

    id: str
    session: str
    path: str
    """Path of the weights; empty = the base model."""
    seq: int | None = None
    """Number of the request that saved them: those of the path may be newer; None = always the newest."""


class UsedNumbers(NamedTuple):
    """Numbers that a client may have used for samples whose results it does not have."""

    first: int
    limit: int


class Tenants:
    """The state of the service."""

    def __init__(self) -> None:
        self.sessions: dict[str, str] = {}
        """Session -> the name of its key."""
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.saved: dict[str, SavedWeights] = {}
        """Keys are paths."""
        self.ended = set[str]()
        """Sessions that have ended."""
        self.numbers: dict[str, UsedNumbers] = {}
        """Keys are the queues of a client's samples."""

    def apply(self, event: Event) -> None:
        """Change the state by an event of the journal."""
        facts: Event = {name: value for name, value in event.items() if name != "event"}
        match event["event"]:
            case "session":
                self.sessions[event["id"]] = event["key"]
            case "model":
                facts["forgotten"] = Counter(event.get("forgotten", {}))
                self.models[event["id"]] = Model(**facts)
            case "request":
                facts.update(_places(event))
                operation = Operation(**facts)
                self.models[operation.model].operations[operation.seq] = operation
            case "result":
                self._finish(self.models[event["model"]], event)
            case "snapshot":
                self.models[event["model"]].snapshot = event["seq"]
            case "sampler":
                self.samplers[event["id"]] = Sampler(**facts)
            case "saved":
                saved = SavedWeights(**facts)
                self.saved[saved.path] = saved
            case "samples":
                self.numbers[event["queue"]] = UsedNumbers(event["first"], event["limit"])
            case "ended":
                self.ended.add(event["id"])
                gone = {name for name, sampler in self.samplers.items() if sampler.session == event["id"]}
                self.samplers = {name: sampler for name, sampler in self.samplers.items() if name not in gone}
                self.numbers = {
                    name: used for name, used in self.numbers.items() if name.rpartition(":")[0] not in gone
                }
            case "deleted":
                self.saved.pop(event["path"], None)
            case kind:
                raise ValueError(f"the journal has an event of unknown kind {kind}")

    def _finish(self, model: Model, event: Event) -> None:
        operation = model.operations[event["seq"]]
        operation.is_ok, operation.result = event["ok"], Place(*event["body"])
        while (first := model.operations.get(model.num_done)) is not None and first.is_done:
            model.num_done += 1
        if operation.kind == "loss" and not operation.is_ok and not is_forward(operation):
            model.failed_loss = operation.seq
        elif operation.kind == "step":
            model.failed_loss = None
        elif operation.kind in ("create", "load"):
            model.failed_loss = None if operation.is_ok else operation.seq
        if operation.is_step:
            model.num_steps += 1
        if operation.kind == "load" and operation.is_ok:  # with its snapshot: the path may be deleted from now on
            model.snapshot, model.settings = operation.seq, operation.arguments["settings"]
            model.num_steps = operation.arguments["num_steps"]

    def shortened(self) -> list[Event]:
        """Forget what nobody needs any more, and return events that make the rest from nothing."""
        events: list[Event] = [{"event": "session", "id": name, "key": key} for name, key in self.sessions.items()]
        events += [{"event": "ended", "id": name} for name in self.ended]
        for model in self.models.values():
            model.shorten(0 if model.session in self.ended else MAX_KEPT)
            events += model.events()
        events += [{"event": "sampler", **asdict(sampler)} for sampler in self.samplers.values()]
        events += [{"event": "saved", **asdict(saved)} for saved in self.saved.values()]
        for queue, numbers in self.numbers.items():
            events.append({"event": "samples", "queue": queue, **numbers._asdict()})
        return events

    def relocate(self, events: Sequence[Event]) -> None:
        """The bodies of these events of `shortened` have new places."""
        for event in (request for request in events if request["event"] == "request"):
            operation, places = self.models[event["model"]].operations[event["seq"]], _places(event)
            operation.body, operation.result = places["body"], places["result"]

    def key_of(self, session: str) -> str:
        return self.sessions.get(session, "")

    def session(self, session: str, key: str) -> str:
        """`session`, if it belongs to `key`. NotFound otherwise; so do the methods below."""
        if self.sessions.get(session) != key or session in self.ended:
            raise NotFound(f"session {session} is not known, or has ended")
        return session

    def model(self, model: str, key: str) -> Model:
        known = self.models.get(model)
        if known is None or self.key_of(known.session) != key:
            raise NotFound(f"model {model} is not known")
        return known

    def sampler(self, sampler: str, key: str) -> Sampler:
        known = self.samplers.get(sampler)
        if known is None or self.key_of(known.session) != key:
            raise NotFound(f"sampling session {sampler} is not known")
        return known

    def is_saved(self, path: str, now: float) -> bool:
        """Whether there are weights under a path that have not expired."""
        saved = self.saved.get(path)
        return saved is not None and not (saved.expires_at is not None and saved.expires_at <= now)

    def weights(self, path: str, key: str, now: float) -> SavedWeights:
        """Saved weights that `key` may read: its own, and public ones."""
        saved = self.saved.get(path)
        owner = "" if saved is None else self.owner(saved)
        if saved is None or not self.is_saved(path, now) or not (owner == key or saved.is_public):
            raise NotFound(f"{path} is not known")
        return saved

    def owner(self, saved: SavedWeights) -> str:
        """The name of the key of saved weights."""
        return self.key_of(self.models[saved.model].session)

    def models_of(self, key: str) -> Iterator[Model]:
        return (model for model in self.models.values() if self.key_of(model.session) == key)

    def operation(self, request_id: str, key: str) -> Operation:
        name, _, seq = request_id.rpartition(":")
        model = self.model(name, key)
        operation = model.operations.get(int(seq)) if seq.isdigit() else None
        if operation is None:
            if seq.isdigit():
                model.check_known(int(seq))
            raise NotFound(f"request {request_id} is not known")
        return operation


def _places(event: Event) -> dict[str, Place | None]:
    return {name: None if (place := event.get(name)) is None else Place(*place) for name in PLACES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What the trainer is to do next: a request of a client, or what the gateway needs besides."""

    kind: str
    """A `Kind`, or restore, snapshot, drop, clear."""
    model: str
    seq: int
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    operation: Operation | None = None
    """The request whose result is wanted; None = none is."""
    body: Place | None = None


class Schedule:
    """Chooses what the trainer does next: the adapters take turns, each in the order of its request numbers.

    While an adapter has requests, its turn lasts until an optimiser step: other tenants sample meanwhile. Otherwise an
    export behind another request goes first, which takes little time: its tenant samples while others train.
    """

    def __init__(self, tenants: Tenants, *, max_resident: int) -> None:
        self._tenants, self._max_resident = tenants, max_resident
        self._turn = 0.0
        self._staying: tuple[str, int] = "", 0
        """The adapter whose turn it is, and the number of its requests in this turn."""

    def reset(self) -> None:
        """The trainer has started again, without any adapter."""
        for model in self._tenants.models.values():
            model.rewind()

    def next(self) -> Command | None:
        """The next command; None = nothing is to be done. The caller calls `done` before it asks again."""
        models = [model for model in self._tenants.models.values() if model.is_runnable]
        if not models:
            return None
        name, count = self._staying

        def order(model: Model) -> tuple[int, float]:
            if model.id == name and count < MAX_TURN:
                return 0, model.last_used
            return (1 if model.is_resident and model.begins_to_export else 2), model.last_used

        model = min(models, key=order)
        command = self._of_operation(model, model.operations[model.next_seq])
        if model.is_resident or command.kind in ("skip", "clear") or model.problem:
            return command
        if model.snapshot is not None:
            settings = {"settings": model.settings}
            command = Command(kind="restore", model=model.id, seq=model.snapshot, arguments=settings)
        if command.kind in ("restore", "create", "load") and (other := self._to_evict()) is not None:
            return other
        return command

    def _of_operation(self, model: Model, operation: Operation) -> Command:
        is_over = operation.kind in READ_ONLY or is_forward(operation) or model.problem
        if operation.is_done and is_over:
            kind = "skip"
        elif operation.is_done and not operation.is_ok:
            kind = "clear"
        else:
            kind = operation.kind
        wanted = None if operation.is_done else operation
        return Command(
            kind=kind, model=model.id, seq=operation.seq, arguments=operation.arguments, operation=wanted,
            body=operation.body if kind == "loss" else None,
        )  # fmt: skip

    def _to_evict(self) -> Command | None:
        """Makes room for another adapter: the one that waited longest leaves, once its state is in a snapshot."""
        resident = [model for model in self._tenants.models.values() if model.is_resident]
        idle = [model for model in resident if not model.is_stuck]
        if len(resident) < self._max_resident or not idle:
            return None
        model = min(idle, key=lambda model: model.last_used)
        newest = model.next_seq - 1
        kind = "drop" if model.snapshot == newest else "snapshot"
        return Command(kind=kind, model=model.id, seq=newest)

    def done(self, command: Command, *, error: str = "") -> None:
        """The trainer has executed it. `error`: it failed; after one the trainer has only what `rewind` leaves."""
        model, kind = self._tenants.models[command.model], command.kind
        self._turn += 1
        if kind == "snapshot":
            model.is_stuck = bool(error)
            return
        if error and (kind == "restore" or (command.operation is None and kind != "clear")):
            model.problem = f"{kind} of request {command.seq} failed after a restart: {error}"
        if kind == "drop" or (error and kind in ("create", "load", "step", "restore")):
            model.rewind()
        elif kind == "restore":
            model.is_resident = True
        else:
            model.last_used = self._turn
            self._staying = (
                (model.id if kind == "loss" else ""),
                self._staying[1] + 1 if self._staying[0] == model.id else 1,
            )
            model.next_seq = command.seq + 1
            if kind in ("create", "load"):
                model.is_resident = True

    def snapshot_after(self, command: Command) -> Command | None:
        """The snapshot that is due after this command."""
        model = self._tenants.models[command.model]
        since = command.seq - (-1 if model.snapshot is None else model.snapshot)
        limit = {"step": MAX_REPLAYED, "loss": 2 * MAX_REPLAYED, "save": 2 * MAX_REPLAYED, "export": 2 * MAX_REPLAYED}
        if since < limit.get(command.kind, since + 1) or model.is_stuck:
            return None
        return Command(kind="snapshot", model=model.id, seq=command.seq)


def is_forward(operation: Operation) -> bool:
    """Whether it computes no gradients."""
    return operation.kind == "loss" and bool(operation.arguments.get("forward_only"))
