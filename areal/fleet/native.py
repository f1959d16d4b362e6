"""The native inference server as a backend: its client, its command and its memory."""

import math
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import orjson

from areal.api.columns import ExpertShape, Runs
from areal.api.config import PPOConfig
from areal.api.config.rollout import quantization_refusal
from areal.api.data import GenerationRequest, PromptScores, ScoredRow, TokenScores, WeightUpdate
from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.fleet.replica import ALL_TOKENS, AnswerForm, Chunks, PartChunk, PauseMode, ReplicaInfo, ReplicaLoad
from areal.fleet.server_backend import GENERATE_SCORING, ServerBackend, ServerCommand
from areal.fleet.server_client import (
    WRONG_FIELD,
    HttpReplica,
    checked_reason,
    experts_of,
    flat_bucket,
    group_body,
    versions_of,
)
from areal.models.model_shape import ModelShape
from areal.system.run_paths import RunPaths

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


class NativeReplica(HttpReplica):
    """See `areal.fleet.replica.Replica`. No other class knows the server's URLs and its JSON."""

    def __init__(self, name: str, address: str, token: str = "", form: AnswerForm | None = None) -> None:
        super().__init__(name, address, token, form)
        self._received: tuple[WeightUpdate | None, str] = (None, "")
        """The update whose weights the server has received and not installed, and its id on the server."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> Chunks:
        """See the protocol."""
        is_group, is_streamed = len(requests) > 1, requests[0].gconfig.max_new_tokens > self.form.stream_interval
        path, body = "/generate_group" if is_group else "/generate", _body(requests, self.form, is_streamed)
        async with aclosing(self._client.answers(path, body, is_streamed=is_streamed)) as answers:
            async for data in answers:
                answer: Any = self._client.parsed(data, list if is_group else dict)
                pairs = answer if is_group and is_streamed else enumerate(answer if is_group else [answer])
                for number, event in pairs:
                    yield number, self._chunk(event, requests[0].adapter)

    def _chunk(self, answer: dict[str, Any], adapter: str) -> PartChunk | ArealError:
        try:
            chunk = parse_chunk(answer, self.form.experts)
            if (other := answer["meta_info"].get("lora_path", "")) != adapter:
                raise ValueError(f"it is of adapter {other!r}, not {adapter!r}")
            return chunk
        except ArealError as error:
            return error
        except WRONG_FIELD as error:
            return self._client.unreadable(error)

    async def abort(self, request_id: str) -> None:
        """See the protocol."""
        await self._client.post("/abort_request", {"rid": request_id})

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
        if update.published:
            body = flat_bucket(update.buckets[0], update.group_name, flush_cache=False) | {
                "load_format": "published",
                "published": update.published,
                "delta_bytes": update.delta_bytes,
            }
            try:
                await self._client.post("/update_weights_from_distributed", {**body, "update_id": update_id})
            except RequestError as error:
                self.failed_deltas += error.code == "weights.bad_delta"
                raise
            return
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
            self.max_group = int(model["max_group_samples"])
            return ReplicaInfo(
                version=int(model["weight_version"]),
                vocab_size=int(model["vocab_size"]),
                context_length=int(model["context_length"]),
                weights_whole=True,
                adapters=frozenset(model["adapters"]),
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

    async def load_adapter(self, name: str, path: str) -> None:
        await self._client.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(Path(path).resolve())})

    async def unload_adapter(self, name: str) -> None:
        await self._client.post("/unload_lora_adapter", {"lora_name": name})

    async def score(self, row: ScoredRow, top_k: int) -> TokenScores:
        return await GENERATE_SCORING.ask(self._client, row, top_k)


def _body(requests: Sequence[GenerationRequest], form: AnswerForm, is_streamed: bool) -> dict[str, Any]:
    """The body of /generate, or of /generate_group for several requests with equal settings."""
    first, gconfig = requests[0], requests[0].gconfig
    sampling: dict[str, Any] = {
        "max_new_tokens": gconfig.max_new_tokens,
        "min_new_tokens": gconfig.min_new_tokens,
        "temperature": gconfig.temperature,
        # top_k=1 selects the likeliest token and keeps the log-probability of this temperature.
        "top_p": 1.0 if gconfig.greedy else gconfig.top_p,
        "top_k": 1 if gconfig.greedy else (-1 if gconfig.top_k >= ALL_TOKENS else gconfig.top_k),
        "stop_token_ids": gconfig.stop_token_ids,
        "stop": gconfig.stop,
        "frequency_penalty": gconfig.frequency_penalty,
        "presence_penalty": gconfig.presence_penalty,
        "repetition_penalty": gconfig.repetition_penalty,
        "ignore_eos": gconfig.ignore_eos,
    }
    if first.num_prior_output_tokens:
        sampling["num_prior_output_tokens"] = first.num_prior_output_tokens
    if is_streamed:
        sampling["stream_interval"] = form.stream_interval
    body: dict[str, Any] = {"sampling_params": sampling, "return_logprob": True, "stream": is_streamed}
    if first.raw_logprobs or first.only_stops:
        sampling |= {"raw_logprobs": first.raw_logprobs, "only_stops": first.only_stops}
    if first.scoring is not None:
        body |= {"logprob_start_len": first.scoring.first, "top_logprobs_num": first.scoring.top_k}
        body |= {"prompt_draws": first.scoring.num_draws, "prompt_targets": first.scoring.targets}
    if first.adapter:
        body["lora_path"] = first.adapter
    if first.images and form.vision is not None:
        body["image_data"] = [form.vision.url(image) for image in first.images]
    if form.experts is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": first.num_known_experts}
    if len(requests) == 1:
        if first.seed is not None:
            sampling["sampling_seed"] = first.seed
        return body | _prompt(first, form) | {"rid": first.request_id}
    prompts: list[dict[str, Any]] = []
    last: GenerationRequest | None = None
    for request in requests:
        if last is None or request.group_id != last.group_id or request.input_ids != last.input_ids:
            last = request
            prompts.append(_prompt(request, form) | {"samples": []})
        sample = {"rid": request.request_id}
        prompts[-1]["samples"].append(sample if request.seed is None else sample | {"sampling_seed": request.seed})
    return body | {"prompts": prompts}


def _prompt(request: GenerationRequest, form: AnswerForm) -> dict[str, Any]:
    ids = request.input_ids if form.vision is None else form.vision.collapsed(request.input_ids, request.images)
    return {"input_ids": ids, "group_id": request.group_id}


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
        meta["cached_tokens"],
        _scores_of(meta) if "input_token_logprobs" in meta else None,
    )


def _scores_of(meta: dict[str, Any]) -> PromptScores:
    """Of a prompt, from lists of (log-probability, token, null)."""
    places: dict[str, list[list[tuple[int, float]]]] = {
        name: [[(token, logprob) for logprob, token, _ in place] for place in meta.get(f"input_{name}_logprobs", ())]
        for name in ("top", "draw")
    }
    return PromptScores(
        logprobs=[math.nan if entry[0] is None else entry[0] for entry in meta["input_token_logprobs"]],
        top=places["top"],
        draws=places["draw"],
        targets=meta.get("input_target_logprobs", []),
    )


def _command(config: PPOConfig, on_gpu: bool) -> ServerCommand:
    argv = (sys.executable, "-m", "areal.inference.server", "--config", str(RunPaths.of(config).config))
    return ServerCommand(argv=argv, memory_bytes=_served_bytes(config, on_gpu))


def _served_bytes(config: PPOConfig, on_gpu: bool) -> int | None:
    """Bytes of weights, states and cache. The cache does not count on a GPU where it takes the memory that is left."""
    native, shape = config.native, ModelShape.read(NATIVE.model(config))
    if shape is None:
        return None
    size = _ELEMENT_BYTES[native.compute_dtype]
    loaded, per_token = shape.parameters * size, shape.kv_values_per_token * size
    weights = loaded - shape.block_matrices * size + native.quantized_bytes(shape.block_matrices, size)
    default = native.cpu_cache_tokens(native.context_length or 512, weight_bytes=weights, bytes_per_token=per_token)
    # A GPU server can have its second copy of the weights in host memory.
    copies = 1 if on_gpu and native.weight_buffer != "device" else 2
    packed = 0 if on_gpu else native.packed_bytes(weights)
    if packed and native.quantization != "none":
        packed = shape.vocabulary * shape.hidden * size  # that of the output head
    states = shape.states * size
    kept = states * (native.max_running_requests + native.num_snapshots(states, weights))
    held = max(copies * weights + packed, loaded)  # quantised once they are loaded
    if config.actor.sends_deltas and not on_gpu:  # as they are published
        held += shape.parameters * _ELEMENT_BYTES[config.actor.compute_dtype]
    return held + kept + (native.max_total_tokens or (0 if on_gpu else default)) * per_token


def state_problems(config: PPOConfig, free_bytes: int) -> Iterator[str]:
    """One sentence when a server with this memory lacks room for the states of its running sequences."""
    native, shape = config.native, ModelShape.read(NATIVE.model(config))
    if shape is not None and shape.states:
        size = _ELEMENT_BYTES[native.compute_dtype]
        yield from native.state_problems(shape.states * size, free_bytes - shape.parameters * size)


def own_problems(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """See `ServerBackend`."""
    kind, shape = config.native.quantization, ModelShape.read(NATIVE.model(config))
    if kind != "none" and shape is not None and (shape.experts or shape.states):
        yield "native.quantization", quantization_refusal(kind, "experts" if shape.experts else "layers with a state")


NATIVE = ServerBackend(
    name="native",
    title="the native server",
    client=NativeReplica,
    command=_command,
    model_key="model_path",
    own_problems=own_problems,
    returns_experts=True,
    context_key="context_length",
    scoring=GENERATE_SCORING,
)
