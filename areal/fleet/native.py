"""The native inference server as a backend: its client, its command and its memory."""

import asyncio
import contextlib
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, Literal, TypeVar

import orjson

from areal.api.columns import Runs
from areal.api.config import PPOConfig
from areal.api.data import WeightUpdate
from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.api.routed_experts import ExpertShape
from areal.fleet.continuation import checked_reason, experts_of, versions_of
from areal.fleet.replica import ALL_TOKENS, GenerationPart, OnChunk, PartChunk, PauseMode, ReplicaInfo, ReplicaLoad
from areal.fleet.server_backend import ServerBackend, ServerCommand
from areal.fleet.server_client import HttpReplica, flat_bucket, group_body
from areal.models.model_shape import ModelShape
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# Parts that are requested at the same time leave as one request of the native server.
#
# Streamed parts share a request with those of the same prompt; short ones, which are not streamed, also with those of
# other prompts.

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer")

MAX_MERGED_PARTS = 64
"""Of short answers in one request: its answer is read in one turn of the event loop."""
MAX_MERGED_TOKENS = 4096
"""Prompt tokens of a request for several prompts. A server accepts more."""
_OWN = ("part_id", "seed", "input_ids", "group_id")
_settings_of = attrgetter(*(one.name for one in fields(GenerationPart) if one.name not in _OWN))
"""What all parts of a request have in common."""


@dataclass(slots=True, eq=False)
class _Call:
    """A caller that waits for its members."""

    ended: asyncio.Future[None]
    num_left: int
    """Members that have not ended."""
    error: ArealError | None = None
    """The first of a member; a refusal replaces a failure."""


@dataclass(slots=True, eq=False)
class Member:
    """A part in a group."""

    part: GenerationPart
    on_chunk: OnChunk
    call: _Call
    outcome: Literal["", "finished", "failed"] = ""

    @property
    def is_awaited(self) -> bool:
        return not self.outcome and not self.call.ended.done()

    def add(self, parse: Callable[[_Answer], PartChunk], answer: _Answer) -> None:
        """Give the chunk in an answer to the caller. An error ends this member alone."""
        if not self.is_awaited:
            return
        try:
            chunk = parse(answer)
            self.on_chunk(chunk)
        except ArealError as error:
            self.end(error)
            return
        if chunk.finish_reason is not None:
            self.end()

    def end(self, error: ArealError | None = None) -> None:
        """Wakes the caller after the last of its members."""
        call, self.outcome = self.call, "failed" if error else "finished"
        call.num_left -= 1
        if error is not None and (call.error is None or isinstance(error, RequestError)):
            call.error = error
        if call.num_left:
            return
        if call.error is None:
            call.ended.set_result(None)
        else:
            call.ended.set_exception(call.error)


@dataclass(slots=True, eq=False)
class _Group:
    """The members of one request."""

    members: list[Member] = field(default_factory=list[Member])
    task: asyncio.Task[None] | None = None
    is_sent: bool = False
    num_tokens: int = 0
    """Of the prompts."""

    def takes(self, part: GenerationPart) -> bool:
        """Whether `part` can be requested with the members."""
        if not part.is_streamed and len(self.members) >= MAX_MERGED_PARTS:
            return False
        first = self.members[0].part
        if _settings_of(part) != _settings_of(first):
            return False
        if part.group_id == first.group_id and part.input_ids == first.input_ids:
            return True
        may_merge = not part.is_streamed and not part.images
        return may_merge and self.num_tokens + len(part.input_ids) <= MAX_MERGED_TOKENS

    def add(self, member: Member) -> None:
        is_same = bool(self.members) and self.members[-1].part.input_ids is member.part.input_ids
        self.num_tokens += 0 if is_same else len(member.part.input_ids)
        self.members.append(member)


def by_prompt(members: list[Member]) -> list[list[Member]]:
    """The members, in order, in lists of equal prompts and group ids."""
    found: list[list[Member]] = []
    for member in members:
        part, last = member.part, found[-1][0].part if found else None
        if last is not None and part.group_id == last.group_id and part.input_ids == last.input_ids:
            found[-1].append(member)
        else:
            found.append([member])
    return found


class GroupCalls:
    """Collects the parts that are requested within one turn of the event loop and have the same settings."""

    def __init__(
        self,
        name: str,
        send: Callable[[list[Member]], Awaitable[None]],
        abort: Callable[[str], Awaitable[object]],
    ) -> None:
        """`send` requests the parts of all members; `abort` ends one part, by its id, that the server computes."""
        self._name = name
        self._send = send
        self._abort = abort
        self._streamed: dict[str, list[_Group]] = {}
        """Groups that wait, by group id."""
        self._short: list[_Group] = []
        self._tasks: set[asyncio.Task[object]] = set()

    async def generate(self, parts: Sequence[GenerationPart], on_chunks: Sequence[OnChunk]) -> None:
        """See `generate_group` of `areal.fleet.replica.Replica`. A cancelled call ends its parts on the server."""
        call = _Call(asyncio.get_running_loop().create_future(), len(parts))
        joined: list[tuple[_Group, Member]] = []
        group: _Group | None = None
        for part, on_chunk in zip(parts, on_chunks, strict=True):
            if group is None or not group.takes(part):
                group = self._group_of(part)
            member = Member(part, on_chunk, call)
            group.add(member)
            joined.append((group, member))
        try:
            await call.ended
        except (asyncio.CancelledError, ArealError):
            for group, member in joined:
                if member.outcome != "finished":
                    self._left(group, member.part)
            raise

    def _left(self, group: _Group, part: GenerationPart) -> None:
        """Nobody waits for a part any more."""
        assert group.task is not None
        if not any(one.is_awaited for one in group.members):
            group.task.cancel()  # drops the connection, which ends all parts
        elif group.is_sent and not group.task.done():
            self._start(self._abort_quietly(part.part_id), "abort a part")

    def _group_of(self, part: GenerationPart) -> _Group:
        """The group that waits for parts like this one, or a new one. A streamed part without a group id is alone."""
        groups = self._short
        if part.is_streamed:
            groups = self._streamed.setdefault(part.group_id, []) if part.group_id else []
        for group in groups:
            if group.takes(part):
                return group
        group = _Group()
        groups.append(group)
        # Starts in the next turn of the loop: the other parts of this turn have joined by then.
        group.task = self._start(self._run(part.group_id, groups, group), "generate")
        return group

    async def _run(self, group_id: str, groups: list[_Group], group: _Group) -> None:
        groups.remove(group)
        if groups is self._streamed.get(group_id) and not groups:
            del self._streamed[group_id]
        group.is_sent = True
        await self._request([member for member in group.members if member.is_awaited])

    async def _request(self, members: list[Member]) -> None:
        """Request parts; an error ends those that have not ended."""
        if not members:
            return
        text, code = f"{self._name} ended an answer without a finish reason", "server.unreadable_answer"
        kind: type[ArealError] = ServerUnavailable
        try:
            await self._send(members)
        except ArealError as error:
            prompts = by_prompt(members)
            if isinstance(error, RequestError) and len(prompts) > 1:  # perhaps of one prompt only
                await asyncio.gather(*map(self._request, prompts))
                return
            text, code, kind = str(error), error.code, type(error)
        except Exception as error:  # noqa: BLE001 - of one request: its callers get it
            text = f"{self._name} sent an answer that cannot be read: {error!r}"
        for member in members:
            if member.is_awaited:
                member.end(kind(text, code=code))

    async def _abort_quietly(self, part_id: str) -> None:
        with contextlib.suppress(RequestError, ServerUnavailable):  # the server may have ended
            await self._abort(part_id)

    def _start(self, work: Awaitable[_Result], name: str) -> asyncio.Task[_Result]:
        task: asyncio.Task[_Result] = asyncio.ensure_future(work)  # pyright: ignore[reportAssignmentType]
        task.set_name(f"{self._name}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait for the tasks. Their connections are dropped before."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
_CPU_TOKENS_PER_REQUEST = 512
"""KV cache per running request on the CPU, in tokens, when native.max_total_tokens is null."""


class NativeReplica(HttpReplica):
    """See `areal.fleet.replica.Replica`. No other class knows the server's URLs and its JSON."""

    def __init__(self, name: str, address: str, token: str = "") -> None:
        super().__init__(name, address, token)
        self._received: tuple[WeightUpdate | None, str] = (None, "")
        """The update whose weights the server has received and not installed, and its id on the server."""
        self._groups = GroupCalls(name, self._generate, self._abort)

    async def generate(self, part: GenerationPart, on_chunk: OnChunk) -> None:
        """See the protocol."""
        await self.generate_group([part], [on_chunk])

    async def generate_group(self, parts: Sequence[GenerationPart], on_chunks: Sequence[OnChunk]) -> None:
        """See the protocol."""
        if any(part.adapter for part in parts):
            raise _no_adapters()
        await self._groups.generate(parts, on_chunks)

    async def _generate(self, members: list[Member]) -> None:
        """Request parts with the same settings."""
        first = members[0].part
        parse = partial(parse_chunk, experts=first.experts)
        if len(members) == 1:
            add = partial(members[0].add, partial(self._client.parsed, parse=parse))
            await self._send_part("/generate", first.is_streamed, partial(_generate_body, first), add)
            return

        def on_event(event: bytes) -> None:
            found: list[Any] = self._client.parsed(event, list)
            for number, part in found if first.is_streamed else enumerate(found):
                members[number].add(partial(self._client.read, parse=parse), part)

        body = partial(_group_body, [[member.part for member in prompt] for prompt in by_prompt(members)])
        await self._send_part("/generate_group", first.is_streamed, body, on_event)

    async def pause(self, mode: PauseMode) -> None:
        await self._client.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._client.post("/continue_generation", {})

    @property
    def has_second_copy(self) -> bool:
        return True

    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None:
        if self._received[0] is not update:
            await self.prepare_weights(update, rank=rank)
        update_id, self._received = self._received[1], (None, "")
        body = {"weight_version": str(update.version), "mode": mode, "update_id": update_id}
        await self._client.post("/install_weights", body)

    async def prepare_weights(self, update: WeightUpdate, *, rank: int) -> None:
        if update.kind == "adapter":
            raise _no_adapters()
        update_id = uuid.uuid4().hex  # a second update of this server may run at the same time
        if update.is_folder:
            body = {"model_path": await self._folder_of(update), "update_id": update_id}
            await self._client.post("/update_weights_from_disk", body)
        else:
            await self._receive(update, rank, update_id)
        self._received = update, update_id

    async def _receive(self, update: WeightUpdate, rank: int, update_id: str) -> None:
        if self._group_name != update.group_name:
            await self.abandon_update()
            await self._client.post("/init_weights_update_group", group_body(update, rank))
            self._group_name = update.group_name
        for bucket in update.buckets:
            body = flat_bucket(bucket, update.group_name, flush_cache=False)
            await self._client.post("/update_weights_from_distributed", {**body, "update_id": update_id})

    async def abandon_update(self) -> None:
        if self._group_name:  # a pending join ends with the trainer's store
            group_name, self._group_name = self._group_name, ""
            await self._client.post("/destroy_weights_update_group", {"group_name": group_name})

    async def info(self) -> ReplicaInfo:
        status, _ = await self._client.exchange("GET", "/health")
        if status != 200:
            raise ServerUnavailable(f"{self.name} answered /health with status {status}", code="server.request_failed")
        answer = await self._client.get("/get_model_info")
        try:
            model = orjson.loads(answer)
            return ReplicaInfo(
                version=int(model["weight_version"]),
                vocab_size=int(model["vocab_size"]),
                context_length=int(model["context_length"]),
                weights_whole=True,
            )
        except (KeyError, TypeError, ValueError) as error:
            text = f"{self.name} is not a native server ({error!r}): name its backend in allocation_mode"
            raise ServerUnavailable(text, code="server.wrong_backend") from error

    async def load(self) -> ReplicaLoad:
        answer = await self._client.get("/server_info")
        return self._client.parsed(
            answer,
            lambda info: ReplicaLoad(
                running=int(info["running_requests"]),
                queued=int(info["queued_requests"]),
                cache_usage=info["kv_tokens_used"] / max(info["kv_tokens_capacity"], 1),
                generated_tokens=int(info["generated_tokens_total"]),
            ),
        )

    async def _abort(self, part_id: str) -> None:
        await self._client.post("/abort_request", {"rid": part_id})

    async def close(self) -> None:
        await super().close()
        await self._groups.close()

    async def load_adapter(self, name: str, path: str) -> None:
        raise _no_adapters()

    async def unload_adapter(self, name: str) -> None:
        raise _no_adapters()


def _no_adapters() -> RequestError:
    return RequestError("native servers have no LoRA adapters: use sglang or vllm", code="server.no_adapters")


def _generate_body(part: GenerationPart) -> dict[str, Any]:
    gconfig = part.gconfig
    sampling: dict[str, Any] = {
        "max_new_tokens": part.max_new_tokens,
        "min_new_tokens": part.min_new_tokens,
        "temperature": gconfig.temperature,
        # top_k=1 selects the likeliest token and keeps the log-probability of this temperature.
        "top_p": 1.0 if gconfig.greedy else gconfig.top_p,
        "top_k": 1 if gconfig.greedy else (-1 if gconfig.top_k >= ALL_TOKENS else gconfig.top_k),
        "stop_token_ids": gconfig.stop_token_ids,
        "stop": gconfig.stop,
        "frequency_penalty": gconfig.frequency_penalty,
        "repetition_penalty": gconfig.repetition_penalty,
        "ignore_eos": gconfig.ignore_eos,
    }
    if part.seed is not None:
        sampling["sampling_seed"] = part.seed
    if part.num_prior_output_tokens:
        sampling["num_prior_output_tokens"] = part.num_prior_output_tokens
    if part.is_streamed:
        sampling["stream_interval"] = part.stream_interval
    body = {
        "rid": part.part_id,
        "input_ids": part.wire_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": part.is_streamed,
    }
    if part.images:
        body["image_data"] = part.image_urls
    if part.group_id:
        body["group_id"] = part.group_id
    if part.experts is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": part.num_known_experts}
    return body


def _group_body(prompts: list[list[GenerationPart]]) -> dict[str, Any]:
    """The body of the first part, with the ids and seeds of all, and their prompts if there are several."""
    body = _generate_body(prompts[0][0])
    del body["rid"]
    body["sampling_params"].pop("sampling_seed", None)
    if len(prompts) == 1:
        return body | _samples(prompts[0])
    del body["input_ids"]
    body.pop("group_id", None)
    body["prompts"] = [
        {"input_ids": parts[0].wire_ids, "group_id": parts[0].group_id, **_samples(parts)} for parts in prompts
    ]
    return body


def _samples(parts: list[GenerationPart]) -> dict[str, Any]:
    return {
        "samples": [
            {"rid": part.part_id} if part.seed is None else {"rid": part.part_id, "sampling_seed": part.seed}
            for part in parts
        ]
    }


def parse_chunk(answer: dict[str, Any], experts: ExpertShape | None = None) -> PartChunk:
    """One answer or event of /generate. KeyError, TypeError or ValueError when a field is missing or wrong.

    ServerUnavailable for the event of an error that ends a stream.
    """
    if "error" in answer:
        raise ServerUnavailable(answer["error"]["message"], code=answer["code"])
    meta = answer["meta_info"]
    token_ids: list[int] = answer["output_ids"]
    finish = meta["finish_reason"]
    spans = [(int(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]]
    return PartChunk(
        token_ids,
        [entry[0] for entry in meta["output_token_logprobs"]],
        versions_of(spans, len(token_ids)) if token_ids else Runs(),
        None if finish is None else checked_reason(finish["type"]),
        None,
        None if experts is None else experts_of(meta, experts, item_bytes=0),
    )


def _command(config: PPOConfig, on_gpu: bool) -> ServerCommand:
    argv = (sys.executable, "-m", "areal.inference.server", "--config", str(RunPaths.of(config).config))
    return ServerCommand(argv=argv, memory_bytes=_served_bytes(config, on_gpu))


def _served_bytes(config: PPOConfig, on_gpu: bool) -> int | None:
    """On a GPU without native.max_total_tokens without a cache, which takes the memory that is left."""
    native, shape = config.native, ModelShape.read(NATIVE.model(config))
    if shape is None:
        return None
    tokens = native.max_total_tokens or (0 if on_gpu else native.max_running_requests * _CPU_TOKENS_PER_REQUEST)
    # A GPU server can have its second copy of the weights in host memory.
    copies = 1 if on_gpu and native.weight_buffer != "device" else 2
    return (copies * shape.parameters + tokens * shape.kv_values_per_token) * _ELEMENT_BYTES[native.dtype]


NATIVE = ServerBackend(
    name="native",
    title="the native server",
    client=NativeReplica,
    command=_command,
    model_key="model_path",
    returns_experts=True,
    context_key="context_length",
)
