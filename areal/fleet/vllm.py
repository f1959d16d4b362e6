"""The client of one vLLM server. With `vllm_wire`, the only module that knows its URLs and its JSON.

Written for vLLM 0.32 with --enable-scale-out, VLLM_SERVER_DEV_MODE=1 and areal's worker extension. The server reports
the policy versions of an answer only at its end, so tokens that arrive during a weight update are held until then.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from areal.api.columns import Runs
from areal.api.config import GenerationHyperparameters, PPOConfig
from areal.api.data import GenerationRequest, ScoredRow, TokenScores, WeightUpdate
from areal.api.errors import ConfigError, RequestError, ServerUnavailable
from areal.fleet.adapters import Parts, ServedAdapters, ended_by_stops, with_version
from areal.fleet.replica import (
    ALL_TOKENS,
    NO_VERSION,
    AnswerForm,
    Chunks,
    FinishReason,
    PartChunk,
    PauseMode,
    ReplicaInfo,
    ReplicaLoad,
)
from areal.fleet.server_backend import (
    ADAPTERS,
    ALLOCATED,
    COMMON_FIXED,
    COMMON_OWNED,
    CPU_REQUESTS,
    GETS_ADAPTERS,
    LISTENS,
    ONE_GROUP,
    ONE_PROCESS,
    OWN_GPUS,
    QWEN_VL,
    SERVER_SIDE,
    FlagRules,
    Flags,
    Problems,
    ScoringCall,
    ServerBackend,
    ServerCommand,
    checked_scores,
    cpu_cache_tokens,
    element_bytes,
    foreign_command,
)  # fmt: skip
from areal.fleet.server_client import (
    HttpReplica,
    checked_reason,
    group_body,
    prior_output_bias,
    refuse_native_only,
    version_number,
    versions_of,
)
from areal.models.checkpoint_files import folder_problem
from areal.models.model_shape import ModelShape
from areal.models.vision_layout import read_vision_layout
from areal.system.network import LOOPBACK

# ----------------------------------------------------------------------------------------------------------------------
# The JSON of vLLM's servers: pure functions between it and the records of `areal.fleet.replica`.

MAX_BIASED_TOKENS = 1024
"""A request with more entries in its logit bias ends a server on GPU."""


def generate_body(request: GenerationRequest, form: AnswerForm) -> dict[str, Any]:
    """The body of /inference/v1/generate."""
    vision, is_streamed = form.vision, request.gconfig.max_new_tokens > form.stream_interval
    body: dict[str, Any] = {
        "request_id": request.request_id,
        # For some families the server writes the tokens around an image too.
        "token_ids": request.input_ids if vision is None else vision.bare(request.input_ids, request.images),
        "sampling_params": _sampling(request, {} if vision is None else vision.bans),
        "stream": is_streamed,
    }
    if is_streamed:
        body["sampling_params"]["stream_interval"] = form.stream_interval
    if request.images and vision is not None:
        # The server caches images by uuid and would use the old one for another image with the same.
        body["content_parts"] = [
            {"type": "image_url", "url": vision.url(image), "uuid": image.sha256} for image in request.images
        ]
    if request.adapter:
        body["model"] = request.adapter
    return body


def _sampling(request: GenerationRequest, bans: dict[int, float]) -> dict[str, Any]:
    """The settings under vLLM's names. It silently ignores unknown names."""
    gconfig = request.gconfig
    refuse_native_only(request)
    if problem := next(_presence_problems(gconfig), None):
        raise RequestError(f"gconfig.{problem[0]}: {problem[1]}", code="server.unsupported_sampling")
    sampling: dict[str, Any] = {
        "max_tokens": gconfig.max_new_tokens,
        # vLLM masks the model's end token until min_tokens even when ignore_eos is set.
        "min_tokens": 0 if gconfig.ignore_eos and not gconfig.stop else gconfig.min_new_tokens,
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": 1.0 if gconfig.greedy else gconfig.top_p,
        "top_k": 0 if gconfig.greedy or gconfig.top_k >= ALL_TOKENS else gconfig.top_k,
        "repetition_penalty": gconfig.repetition_penalty,
        "frequency_penalty": gconfig.frequency_penalty,
        "ignore_eos": gconfig.ignore_eos,
        "stop_token_ids": [] if gconfig.ignore_eos else gconfig.stop_token_ids,
        "logprobs": 0,  # of the sampled token only
        "detokenize": bool(gconfig.stop),  # the text is not used
    }
    if gconfig.stop:
        sampling["stop"] = gconfig.stop
        sampling["skip_special_tokens"] = False  # a stop string may be one
    if request.seed is not None:
        sampling["seed"] = part_seed(request.seed, request.num_prior_output_tokens)
    if bias := prior_output_bias(request) | bans:
        if len(bias) > MAX_BIASED_TOKENS:
            raise RequestError(
                f"vLLM continues an answer with a frequency_penalty only up to {MAX_BIASED_TOKENS} different tokens, "
                f"and this one has {len(bias)}: set gconfig.frequency_penalty to 0, or use native servers",
                code="server.unsupported_sampling",
            )
        sampling["logit_bias"] = {str(token): value for token, value in bias.items()}
    return sampling


def part_seed(seed: int, num_prior_output_tokens: int) -> int:
    """The seed of one part: vLLM can restart its random numbers with each request, and the rest of an answer must not
    get the random numbers of its beginning again."""
    if not num_prior_output_tokens:
        return seed
    mixed = (seed + num_prior_output_tokens * 0x9E3779B97F4A7C15) % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63


@dataclass(frozen=True, slots=True)
class Piece:
    """One answer or event of /inference/v1/generate."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    spans: list[tuple[int, int, int]] | None
    """(version, start, end) of all tokens of the part, on the last piece."""


def parse_piece(answer: dict[str, Any]) -> Piece:
    """KeyError, TypeError or ValueError when a field is missing or wrong."""
    choice = answer["choices"][0]
    token_ids: list[int] = choice["token_ids"] or []
    logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]] if token_ids else []
    versions = choice["weight_versions"]
    spans = None if versions is None else [(version_number(s["version"]), s["start"], s["end"]) for s in versions]
    return Piece(token_ids, logprobs, checked_reason(choice["finish_reason"]), spans)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state that areal's extension reports from the workers."""

    vocab_size: int
    context_length: int
    weights_whole: bool
    first_folder: str
    """The folder that the server loaded first, on its own machine."""
    has_dummy_weights: bool
    """It was started without a checkpoint. Stays true after a weight update."""


def parse_worker_state(answer: dict[str, Any]) -> WorkerState:
    """The state of all workers of a server. KeyError, TypeError or ValueError when a field is missing or wrong."""
    states: list[dict[str, Any]] = answer["results"]
    if not states:
        raise ValueError("no worker answered")
    first = states[0]
    return WorkerState(
        vocab_size=int(first["vocab_size"]),
        context_length=int(first["context_length"]),
        first_folder=str(first["first_folder"]),
        weights_whole=all(state["weights_whole"] for state in states),
        has_dummy_weights=bool(first["has_dummy_weights"]),
    )


def worker_errors(answer: dict[str, Any]) -> list[str]:
    """The errors of the workers of a server; empty when all succeeded. KeyError or TypeError as above."""
    return [str(result["error"]) for result in answer["results"] if "error" in result]


def parse_load(metrics: str) -> ReplicaLoad:
    """Load in /metrics, summed over the engines of a data-parallel server. KeyError when a metric is missing."""
    values: dict[str, list[float]] = {}
    for line in metrics.splitlines():
        if line.startswith("vllm:"):
            name = line.partition("{")[0].partition(" ")[0]
            values.setdefault(name, []).append(float(line.rpartition(" ")[2]))
    usage = values["vllm:kv_cache_usage_perc"]
    return ReplicaLoad(
        running=int(sum(values["vllm:num_requests_running"])),
        queued=int(sum(values["vllm:num_requests_waiting"])),
        cache_usage=sum(usage) / len(usage),
        generated_tokens=int(sum(values["vllm:generation_tokens_total"])),
    )


BUCKET_TIMEOUT_S = 120.0
"""Maximum time that a server waits for one bucket of weights, or for the other ranks to join. It answers nothing else
meanwhile: a trainer that hangs blocks the server this long."""
_EXTENSION_HELP = (
    "start it with VLLM_SERVER_DEV_MODE=1, areal/server_side on PYTHONPATH, --worker-extension-cls "
    'areal_vllm.extension.WorkerExtension and --weight-transfer-config \'{"backend":"areal"}\''
)


class VLLMReplica(HttpReplica):
    """See `areal.fleet.replica.Replica`."""

    def __init__(self, name: str, address: str, token: str = "", form: AnswerForm | None = None) -> None:
        super().__init__(name, address, token, form)
        self._version = 0
        """Version of the last report of the server."""
        self._num_updates = 0
        """Started so far."""
        self._is_updating = False
        self._info: ReplicaInfo | None = None
        """Facts of the last health check."""
        self._adapters = ServedAdapters(self.load_adapter, self.unload_adapter)

    async def generate(self, requests: Sequence[GenerationRequest]) -> Chunks:
        """See the protocol. The server aborts the request of a connection that is dropped."""
        to_texts = functools.partial(self._texts, requests[0].gconfig.stop or [])
        with self._adapters.chosen(requests[0]) as (request, version):
            parts = self._parts(request)
            async with aclosing(parts), aclosing(ended_by_stops(request, parts, to_texts)) as chunks:
                async for chunk in chunks:
                    yield 0, with_version(chunk, version)
        await self._adapters.drop_unused()

    async def _parts(self, request: GenerationRequest) -> Parts:
        """The tokens of a part as soon as their versions are known."""
        path, is_streamed = "/inference/v1/generate", request.gconfig.max_new_tokens > self.form.stream_interval
        version, num_updates = self._version, self._num_updates
        held: list[Piece] = []
        """Pieces that wait for the end of the part, because a weight update started before they arrived."""
        num_passed_on = 0
        async with aclosing(
            self._client.answers(path, generate_body(request, self.form), is_streamed=is_streamed)
        ) as answers:
            async for event in answers:
                if event.startswith(b'{"error"'):  # a stream can end with an error
                    status = self._client.parsed(event, lambda error: int(error["error"]["code"]))
                    raise self._client.refusal(path, status, event)
                piece = self._client.parsed(event, parse_piece)
                held.append(piece)
                if piece.finish_reason is None and self._num_updates != num_updates:
                    continue
                token_ids = [token for piece in held for token in piece.token_ids]
                logprobs = [logprob for piece in held for logprob in piece.logprobs]
                held.clear()
                versions, reported = Runs.of(version, len(token_ids)), None
                if piece.finish_reason is not None:
                    reported = self._reported_versions(piece, num_passed_on + len(token_ids))
                    versions = reported[num_passed_on:]
                num_passed_on += len(token_ids)
                yield PartChunk(token_ids, logprobs, versions, piece.finish_reason, reported)

    def _reported_versions(self, last: Piece, num_tokens: int) -> Runs[int]:
        try:
            return versions_of(last.spans or [], num_tokens)
        except ValueError as error:
            text = f"{self.name} did not report the versions of an answer: {error}"
            raise ServerUnavailable(text, code="server.unreadable_answer") from error

    async def _texts(self, stops: list[str], token_lists: list[Sequence[int]]) -> list[str]:
        """The texts of lists, each a prefix of the next. If the last has no stop string, the others stay empty."""
        whole = await self._text(token_lists[-1])
        if not any(stop in whole for stop in stops):
            return [""] * (len(token_lists) - 1) + [whole]
        return list(await asyncio.gather(*(self._text(token_ids) for token_ids in token_lists)))

    async def _text(self, token_ids: Sequence[int]) -> str:
        answer = await self._client.post("/detokenize", {"tokens": token_ids})
        return self._client.parsed(answer, lambda fields: str(fields["prompt"]))

    async def pause(self, mode: PauseMode) -> None:
        """abort and retract clear the cache of keys and values of the old weights."""
        clear_cache = "false" if mode == "in_place" else "true"
        query = urlencode({"mode": "abort" if mode == "abort" else "keep", "clear_cache": clear_cache})
        await self._client.post(f"/pause?{query}", {})

    async def resume(self) -> None:
        await self._client.post("/resume", {})

    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None:
        if update.kind == "adapter":
            await self._adapters.use(update.path, update.version)
            await self._client.post("/update_weight_version", {"new_version": str(update.version)})
            self._version = update.version
            return await self._adapters.drop_unused()
        self._is_updating = True
        try:
            folder = await self._folder_of(update)
            if update.kind == "disk":
                state = await self._worker_state()
                if problem := await asyncio.to_thread(folder_problem, Path(folder), Path(state.first_folder)):
                    raise RequestError(f"{self.name} cannot load these weights: {problem}", code="weights.bad_folder")
            elif not folder and self._group_name != update.group_name:
                self._group_name = ""
                await self._call_workers("areal_join", {**group_body(update, rank), "timeout_s": BUCKET_TIMEOUT_S})
                self._group_name = update.group_name
            # The server has no version until the end: an update that fails never counts as the version before.
            self._num_updates += 1
            await self._client.post("/update_weight_version", {"new_version": str(NO_VERSION)})
            if folder:
                await self._call_workers("areal_load_folder", folder)
            else:
                await self._receive(update)
            await self._use_weights(update.version, keep_cache=mode == "in_place")
        finally:
            self._is_updating = False
        self._version = update.version

    async def _receive(self, update: WeightUpdate) -> None:
        await self._call_workers("areal_start_update")
        for bucket in update.buckets:
            info = {
                "names": [spec.name for spec in bucket],
                "dtype_names": [spec.dtype for spec in bucket],
                "shapes": [spec.shape for spec in bucket],
            }
            await self._call_workers("areal_receive", info)
        await self._call_workers("areal_finish_update")

    async def _use_weights(self, version: int, *, keep_cache: bool) -> None:
        """Clear the cache of the old weights unless it is kept, then set the version."""
        try:
            if not keep_cache:
                answer = await self._client.post("/reset_prefix_cache?reset_running_requests=true", {})
                if not self._client.parsed(answer, lambda fields: fields["success"]):
                    text = f"{self.name} did not clear the KV cache of the old weights"
                    raise ServerUnavailable(text, code="server.request_failed")
            await self._client.post("/update_weight_version", {"new_version": str(version)})
        except RequestError as error:  # RequestError would mean that the weights are unchanged
            raise ServerUnavailable(str(error), code="server.request_failed") from error

    async def abandon_update(self) -> None:
        """A server that waits for a bucket reads no call: its wait ends with the trainer's connection, or after
        BUCKET_TIMEOUT_S. The next update joins again."""
        self._group_name = ""
        await super().abandon_update()

    async def info(self) -> ReplicaInfo:
        """Only the HTTP process answers during a weight update."""
        if self._is_updating and self._info is not None:
            await self._client.get("/health")
            return self._info
        asked_at = None if self._is_updating else self._num_updates
        state = await self._worker_state()
        weights = await self._client.get("/weight_info")
        version = self._client.parsed(
            weights, lambda fields: version_number(fields["weight_version"], has_dummy_weights=state.has_dummy_weights)
        )
        if asked_at == self._num_updates:  # otherwise an update has set it, or will
            self._version = version
        self._info = ReplicaInfo(
            version=version,
            vocab_size=state.vocab_size,
            context_length=state.context_length,
            weights_whole=state.weights_whole,
        )
        return self._info

    async def _worker_state(self) -> WorkerState:
        return self._client.parsed(await self._call_workers("areal_state"), parse_worker_state)

    async def _call_workers(self, method: str, *args: Any) -> bytes:
        """Run a method of areal's extension in every worker. ServerUnavailable when one worker fails."""
        path = "/collective_rpc"
        status, answer = await self._client.exchange("POST", path, {"method": method, "args": list(args)})
        if status == 404 or b"has no attribute 'areal_" in answer:
            text = f"{self.name} runs without areal's extension: {_EXTENSION_HELP}"
            raise ServerUnavailable(text, code="server.no_extension")
        if status != 200:
            raise self._client.refusal(path, status, answer)
        if errors := self._client.parsed(answer, worker_errors):
            raise ServerUnavailable(f"{self.name} failed {method}: {errors[0]}", code="server.request_failed")
        return answer

    async def load(self) -> ReplicaLoad:
        answer = await self._client.get("/metrics")
        try:
            return parse_load(answer.decode())
        except (KeyError, ValueError) as error:
            raise self._client.unreadable(error) from error

    async def load_adapter(self, name: str, path: str) -> None:
        if not await asyncio.to_thread((Path(path) / "adapter_config.json").is_file):  # vLLM's workers would disagree
            text = f"{self.name} cannot load the LoRA adapter {path}: it has no adapter_config.json"
            raise RequestError(text, code="server.adapter_folder")
        await self._client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        await self._client.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def score(self, row: ScoredRow, top_k: int) -> TokenScores:
        name = self._adapters.name
        return await SCORING.ask(self._client, row, top_k, {"model": name} if name else {})


# ----------------------------------------------------------------------------------------------------------------------
# vLLM as a backend: its command, its flags, and the sampling settings that it does not apply exactly.
#
# vLLM reports one kind of log-probability for all requests of a server (--logprobs-mode): of the softmax of the model's
# logits, or of the distribution that was sampled from, after temperature, penalties and truncation. Training needs the
# log-probabilities of logits / temperature, so only some settings can be used together.

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature and refuses a higher one."""
_MAX_STOP_IDS = 100
"""Stop ids of a request. vLLM takes 128 on a GPU, including the model's end tokens."""
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank."""
_UNCUT = {"do_image_splitting": False, "do_resize": False}
_PROCESSOR_SETTINGS: dict[str, dict[str, Any]] = {
    "internvl": {"use_fast": False},  # torchvision makes another tile of the whole image
    "idefics3": _UNCUT,
    "smolvlm": _UNCUT,
}
"""--mm-processor-kwargs of the families that need them, so that the numbers of the colours are those of the trainer."""
_CPU_CACHE_BYTES = 2**30
"""KV cache on the CPU for a model that is not on this machine."""


def logprobs_mode(gconfig: GenerationHyperparameters, *, has_bans: bool = False) -> str:
    """The --logprobs-mode under which a server reports the log-probabilities that training needs.

    `has_bans`: tokens are banned, which raw log-probabilities ignore.
    """
    if has_bans:
        return PROCESSED
    is_raw = (gconfig.temperature == 1 and not gconfig.temperature_key) or gconfig.greedy
    return RAW if is_raw else PROCESSED


def sampling_problems(gconfig: GenerationHyperparameters, flags: Flags, needs_logprobs: bool = True) -> Problems:
    """See `SamplingLimits`."""
    if not gconfig.greedy and not _LOWEST_TEMPERATURE <= gconfig.temperature <= _HIGHEST_TEMPERATURE:
        accepted = f"{_LOWEST_TEMPERATURE:g} to {_HIGHEST_TEMPERATURE:g}"
        yield (
            "temperature",
            f"{gconfig.temperature:g} is outside the range of vLLM, {accepted}: change it, or set greedy",
        )
    if needs_logprobs:
        yield from _logprob_problems(gconfig)
    yield from _penalty_problems(gconfig, flags)
    if gconfig.stop and flags.get("skip_tokenizer_init"):
        yield "stop", "needs the server's tokenizer: remove vllm.skip_tokenizer_init, or use stop_token_ids"
    if gconfig.stop and gconfig.ignore_eos and gconfig.min_new_tokens:
        yield (
            "min_new_tokens",
            f"{gconfig.min_new_tokens} with ignore_eos and stop masks the end token in vLLM: remove one of the three",
        )
    if len(gconfig.stop_token_ids) > _MAX_STOP_IDS:
        yield "stop_token_ids", f"has {len(gconfig.stop_token_ids)} ids, and vLLM accepts {_MAX_STOP_IDS}: remove some"


def run_flags(config: PPOConfig) -> dict[str, tuple[Any, str]]:
    """See `ServerBackend`."""
    needed: dict[str, tuple[Any, str]] = {"enable_lora": (True, GETS_ADAPTERS)} if config.publishes_adapters else {}
    layout = read_vision_layout(VLLM.model(config))
    settings = None if layout is None else _PROCESSOR_SETTINGS.get(layout.family)
    if settings:
        why = "areal sends images in their final size, and this server must not cut or resize them otherwise"
        needed["mm_processor_kwargs"] = settings, why
    return needed


_ONLINE = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4")
"""Kinds of --quantization that vLLM makes from bfloat16 weights of all linear layers, at the start and, by its
layerwise reload, at each update. By the source of vLLM 0.32.0: `_ONLINE_SHORTHANDS` of config/quantization.py, of which
two more are for experts alone; fp8 is fp8_per_tensor (get_quant_config in model_loader/weight_utils.py)."""


def own_problems(config: PPOConfig) -> Problems:
    """See `ServerBackend`."""
    quantization = VLLM.given(config).get("quantization")
    if quantization not in (None, *_ONLINE) and not config.publishes_adapters:
        text = (
            f"{quantization!r} is no kind that vLLM makes from the trainer's weights, of all linear layers: use one of"
        )
        yield "vllm.quantization", f"{text} {', '.join(_ONLINE)}"
    if read_vision_layout(VLLM.model(config)) is not None:
        yield from _image_problems(config)


def _image_problems(config: PPOConfig) -> Problems:
    if config.rollout.weight_update == "keep_cache":
        text = "keep_cache would keep image features of old weights on vLLM: use keep or interrupt, or native servers"
        yield "rollout.weight_update", text
    if changed := _changed_distribution(config.gconfig):
        text = "makes vLLM report log-probabilities that training cannot use, because image tokens are banned: set it "
        yield f"gconfig.{changed[0]}", f"{text}to its default, or use native servers"


def _changed_distribution(gconfig: GenerationHyperparameters) -> list[str]:
    """The settings that sample from another distribution than the softmax of logits / temperature."""
    changes_distribution = {
        "top_p": gconfig.top_p < 1,
        "top_k": gconfig.top_k < ALL_TOKENS,
        "frequency_penalty": gconfig.frequency_penalty != 0,
        "repetition_penalty": gconfig.repetition_penalty != 1,
        "min_new_tokens": gconfig.min_new_tokens > 0 and not gconfig.ignore_eos,  # end tokens are masked until then
    }
    return [name for name, is_used in changes_distribution.items() if is_used]


def _logprob_problems(gconfig: GenerationHyperparameters) -> Problems:
    changed = _changed_distribution(gconfig)
    if gconfig.greedy and gconfig.temperature != 1:
        yield (
            "temperature",
            f"{gconfig.temperature:g} has no effect on greedy answers of vLLM, nor on their log-probabilities: set it "
            "to 1, or greedy to false",
        )
    elif logprobs_mode(gconfig) == PROCESSED and changed:
        yield (
            "temperature",
            f"{gconfig.temperature:g} with {' and '.join(changed)} makes vLLM report log-probabilities that training "
            "cannot use: set it to 1, set the others to their defaults, or use native servers",
        )


def _presence_problems(gconfig: GenerationHyperparameters) -> Iterator[tuple[str, str]]:
    """The penalty counts a token once: a bias for earlier parts would count it again when the rest repeats it."""
    if penalty := gconfig.presence_penalty:
        text = f"{penalty:g} cannot be continued exactly on vLLM after an interruption"
        yield "presence_penalty", f"{text}: set it to 0, or use native servers"


def _penalty_problems(gconfig: GenerationHyperparameters, flags: Flags) -> Problems:
    """An answer that continues after an interruption must be penalised like one that was not interrupted."""
    yield from _presence_problems(gconfig)
    if not gconfig.frequency_penalty:
        return
    reason = f"{gconfig.frequency_penalty:g} cannot be continued exactly on vLLM after an interruption"
    if gconfig.repetition_penalty != 1:
        other = f"repetition_penalty={gconfig.repetition_penalty:g}"
        yield "frequency_penalty", f"{reason} together with {other}: use one of them, or native servers"
    if gconfig.max_new_tokens > MAX_BIASED_TOKENS + 1:  # the last token has none after it
        yield (
            "frequency_penalty",
            f"{reason} with max_new_tokens={gconfig.max_new_tokens}: set it to 0, max_new_tokens to at most "
            f"{MAX_BIASED_TOKENS + 1}, or use native servers",
        )
    if flags.get("speculative_config"):
        yield "frequency_penalty", f"{reason} with speculation: set it to 0, or remove vllm.speculative_config"


def _command(config: PPOConfig, on_gpu: bool) -> ServerCommand:
    """Whether vLLM computes on a GPU is decided when it is built, so no flag says it."""
    servers = config.allocation.inference
    assert servers is not None, "a run that starts servers allocates them"
    options, model = VLLM.given(config), VLLM.model(config)
    # No log line for each health check; as many likeliest tokens of a place as the trainer asks for (batch/log_ratio).
    defaults: dict[str, Any] = {"uvicorn_log_level": "warning", "max_logprobs": 64}
    env = {
        "PYTHONPATH": str(SERVER_SIDE),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK,
    }
    if config.publishes_adapters and config.actor.lora is not None:
        rank = config.actor.lora.served_rank
        fitting = (size for size in _LORA_RANKS if size >= rank)
        defaults |= {"max_lora_rank": next(fitting, rank), "max_loras": ADAPTERS}
    if config.publishes_adapters or options.get("enable_lora"):
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not on_gpu:
        shape, cache_bytes = ModelShape.read(model), _CPU_CACHE_BYTES
        if shape is not None:
            element = element_bytes(options.get("dtype", config.actor.compute_dtype))
            if element == 4 and shape.family.startswith(("qwen3_5", "qwen3_next")):
                text = "vLLM computes the linear attention of this model on the CPU in bfloat16 only"
                raise ConfigError(f"vllm.dtype: {text}: set it to bfloat16", code="model.unsupported")
            cache_bytes = cpu_cache_tokens(config, VLLM) * shape.kv_values_per_token * element
        defaults |= {"enforce_eager": True, "max_num_seqs": CPU_REQUESTS, "kv_cache_memory_bytes": cache_bytes}
        # Bound threads of two servers would share one core.
        env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    layout = read_vision_layout(model)
    extension = "llava" if layout is not None and layout.family == "llava" else "extension"
    owned: dict[str, Any] = {
        "tensor_parallel_size": servers.instance_size,
        "enable_scale_out": True,
        "worker_extension_cls": f"areal_vllm.{extension}.WorkerExtension",
        "weight_transfer_config": {"backend": "areal"},
        "logprobs_mode": logprobs_mode(config.gconfig, has_bans=layout is not None),
        **{name: value for name, (value, _) in run_flags(config).items()},
    }
    program = ("-m", "vllm.entrypoints.cli.main", "serve", model)
    return foreign_command(config, VLLM, program=program, defaults=defaults, owned=owned, env=env)


def part_words(part: int, num_parts: int) -> tuple[str, ...]:
    """See `ServerBackend`. The other parts have no HTTP server."""
    words = (
        f"--nnodes={num_parts}",
        f"--node-rank={part}",
        "--master-addr={first_address}",
        "--master-port={first_port}",
    )
    return (*words, "--headless") if part else words


def _scoring_body(token_ids: Sequence[int], first: int, top_k: int) -> dict[str, Any]:
    return {"prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}


def _scores(answer: Any, token_ids: Sequence[int], first: int, top_k: int) -> TokenScores:
    places, top = answer["choices"][0]["prompt_logprobs"][first:], list[list[tuple[int, float]]]()
    logprobs = [place[str(token)]["logprob"] for place, token in zip(places, token_ids[first:], strict=True)]
    for place in places if top_k else ():
        ranked = sorted(place.items(), key=lambda entry: entry[1]["rank"])[:top_k]
        top.append([(int(token), entry["logprob"]) for token, entry in ranked])
    return checked_scores(logprobs, top, len(token_ids) - first, top_k)


SCORING = ScoringCall("/v1/completions", _scoring_body, _scores)

VLLM = ServerBackend(
    name="vllm",
    title="vLLM",
    client=VLLMReplica,
    command=_command,
    model_key="model",
    context_key="max_model_len",
    scoring=SCORING,
    sampling_problems=sampling_problems,
    own_problems=own_problems,
    image_families=(*QWEN_VL, "llava", *_PROCESSOR_SETTINGS),
    run_flags=run_flags,
    areal_defaults={
        "seed": 1,
        "max_model_len": 32768,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.9,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "uvicorn_log_level": "warning",
    },
    minimum_version="0.30.0",  # --enable-scale-out
    tested_version="0.32.0",
    part_words=part_words,
    address_variable="VLLM_HOST_IP",
    flags=FlagRules(
        seed="seed",
        tokenizer="tokenizer",
        owned={
            **COMMON_OWNED,
            **dict.fromkeys(("uds", "master_addr", "master_port"), LISTENS),
            **dict.fromkeys(("grpc", "headless"), ONE_PROCESS),
            "enable_scale_out": "areal needs it",
            "tokens_only": "areal needs the other endpoints too",
            "weight_transfer_config": "areal sets its own",
            "logprobs_mode": "areal derives it from gconfig",
            "device_ids": OWN_GPUS,
            "root_path": "areal calls the server directly",
        },
        fixed={
            **COMMON_FIXED,
            "prefill_context_parallel_size": (1, ALLOCATED),
            "distributed_executor_backend": ("mp", ONE_GROUP),
            "api_server_count": (1, ONE_PROCESS),
            "disable_log_stats": (False, "areal reads the metrics"),
        },
        negatable=True,
        bare=frozenset({"disable_log_stats", "aggregate_engine_logging"}),
        ignored={
            "worker_extension_cls": (),  # AReaL files name AReaL's; areal sets its own
            "swap_space": (),  # removed together with vLLM's first engine
        },
    ),
)
