"""The client of one SGLang server. With `sglang_wire`, the only module that knows its URLs and its JSON.

Written for SGLang 0.5.23; `sglang_wire.ServerFacts` states what differs in versions since 0.5.10. A call ends with the
server's answer, with the connection, or with its caller's time limit.
"""

import asyncio
import contextlib
import re
import zlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from areal.api.columns import ExpertShape, Runs
from areal.api.config import GenerationHyperparameters, PPOConfig
from areal.api.config.train import ALL_LINEAR
from areal.api.data import GenerationRequest, ScoredRow, TokenScores, WeightSpec, WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.adapters import Parts, ServedAdapters, ended_by_stops, with_version
from areal.fleet.replica import (
    ALL_TOKENS,
    NO_VERSION,
    AnswerForm,
    Chunks,
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
    GENERATE_SCORING,
    GETS_ADAPTERS,
    LISTENS,
    NO_KEY,
    ONE_GROUP,
    ONE_PROCESS,
    OWN_GPUS,
    QWEN_VL,
    FlagRules,
    Flags,
    Problems,
    ServerBackend,
    ServerCommand,
    cpu_cache_tokens,
    foreign_command,
)  # fmt: skip
from areal.fleet.server_client import (
    HttpReplica,
    checked_reason,
    experts_of,
    flat_bucket,
    group_body,
    refuse_native_only,
    version_number,
    versions_of,
)
from areal.models.checkpoint_files import folder_problem
from areal.models.vision_layout import read_vision_layout
from areal.observe.log import get_logger

# ----------------------------------------------------------------------------------------------------------------------
# SGLang's dialect: pure functions between its JSON and the records of `areal.fleet.replica`, and its sampling limits.
#
# Measured with SGLang 0.5.23. Its log-probabilities are those of the logits it samples from, at the request's
# temperature and before top-k and top-p. That is what training needs, as long as nothing else changes the logits. Its
# penalties count the last token of the prompt instead of the newest token of the answer; penalties and the minimum
# length start again when a request is put back into the queue.

_LOWEST_TEMPERATURE = 1e-6
"""SGLang treats a lower temperature as greedy and reports log-probabilities of temperature 1."""
_MAX_STOP_STRINGS = 32
_ONLY_THE_LIKELIEST = 1e-9
"""A top_p that keeps one token."""
_HAS_SESSIONS = (0, 5, 21)
"""First version in which a collective update is a session with a begin and an end."""

_EXPERT_BYTES = 4
"""SGLang sends the number of an expert as int32."""

_VOCABULARY = re.compile(rb"\[0, (\d+)\]")
_IMPOSSIBLE_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Properties that do not change while a server runs."""

    has_update_sessions: bool
    context_length: int
    """Maximum tokens of prompt and answer together that the server never truncates."""
    is_deterministic: bool
    has_step_in_flight: bool
    """A pause that keeps requests leaves a step in flight, whose token is then reported with the version after it."""
    first_folder: str
    """Folder or hub name of the weights it started with."""


def sampling_problems(gconfig: GenerationHyperparameters, flags: Flags, needs_logprobs: bool = True) -> Problems:
    """See `areal.fleet.server_backend.SamplingLimits`."""
    other_servers = "or use native or vllm servers"
    if not gconfig.greedy and gconfig.temperature < _LOWEST_TEMPERATURE:
        minimum = f"SGLang's minimum of {_LOWEST_TEMPERATURE:g}"
        yield "temperature", f"{gconfig.temperature:g} is below {minimum}: raise it, or set greedy: true"
    if penalty := gconfig.frequency_penalty:
        yield "frequency_penalty", f"{penalty:g} is applied one token late by SGLang: set it to 0, {other_servers}"
    if penalty := gconfig.presence_penalty:
        yield "presence_penalty", f"{penalty:g} is applied one token late by SGLang: set it to 0, or use native servers"
    if (penalty := gconfig.repetition_penalty) != 1:
        text = f"{penalty:g} skips the prompt and the newest token on SGLang: set it to 1, {other_servers}"
        yield "repetition_penalty", text
    if gconfig.min_new_tokens and not (gconfig.ignore_eos and not gconfig.stop):
        yield (
            "min_new_tokens",
            f"{gconfig.min_new_tokens} changes SGLang's log-probabilities, and its count restarts after a pause: set "
            "it to 0, or use native servers",
        )
    if gconfig.stop and flags.get("skip_tokenizer_init"):
        yield "stop", "needs the server's tokenizer: remove sglang.skip_tokenizer_init, or use stop_token_ids"
    if gconfig.stop and len(gconfig.stop) > _MAX_STOP_STRINGS:
        yield "stop", f"has {len(gconfig.stop)} strings, and SGLang accepts {_MAX_STOP_STRINGS}: remove some"
    if needs_logprobs and flags.get("rl_on_policy_target"):
        yield (
            "temperature",
            "is rounded to bfloat16 by sglang.rl_on_policy_target, log-probabilities too: remove that flag",
        )


def generate_body(request: GenerationRequest, form: AnswerForm, facts: ServerFacts) -> dict[str, Any]:
    """The body of /generate. RequestError for settings that the server does not apply exactly."""
    refuse_native_only(request)
    if problem := next(iter(sampling_problems(request.gconfig, {})), None):
        raise RequestError(f"gconfig.{problem[0]}: {problem[1]}", code="server.unsupported_sampling")
    vision, is_streamed = form.vision, request.gconfig.max_new_tokens > form.stream_interval
    sampling = _sampling(request.gconfig)
    if is_streamed:
        sampling["stream_interval"] = form.stream_interval
    if facts.is_deterministic:  # without a seed all requests would use the same one
        seed = zlib.crc32(request.request_id.encode()) if request.seed is None else request.seed
        sampling["sampling_seed"] = seed
    elif request.seed is not None:
        raise RequestError(
            "the server ignores seeds: set sglang.enable_deterministic_inference=true (GPU only), or send no seed",
            code="server.unsupported_sampling",
        )
    body: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": request.input_ids if vision is None else vision.collapsed(request.input_ids, request.images),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": is_streamed,
    }
    if vision is not None:
        sampling["logit_bias"] = {str(token): bias for token, bias in vision.bans.items()}
        if request.images:
            body["image_data"] = [vision.url(image) for image in request.images]
    if request.adapter:
        body["lora_path"] = request.adapter
    if form.experts is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.num_known_experts}
    return body


def _sampling(gconfig: GenerationHyperparameters) -> dict[str, Any]:
    """The settings under SGLang's names. All of them: a server can have other defaults."""
    sampling: dict[str, Any] = {
        "max_new_tokens": gconfig.max_new_tokens,
        "stop": gconfig.stop or [],
        "stop_token_ids": gconfig.stop_token_ids,
        "ignore_eos": gconfig.ignore_eos,
        "temperature": gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": -1 if gconfig.top_k >= ALL_TOKENS else gconfig.top_k,
        "min_p": 0.0,
        "min_new_tokens": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    if gconfig.greedy or gconfig.top_k == 1:
        # When all running requests have top_k=1, SGLang reports log-probabilities without the temperature.
        plain = gconfig.temperature == 1.0
        sampling |= {"top_k": 1, "top_p": 1.0} if plain else {"top_k": -1, "top_p": _ONLY_THE_LIKELIEST}
    return sampling


class PartReader:
    """Reads the answers or events of one part, cumulative and incremental streams alike.

    A server that reports versions only at the end of an answer, or never: its tokens get the version that was known
    before they arrived. The true version can be newer by one, or older after the trainer recovered; the end of the
    answer corrects it.
    """

    def __init__(self, version: int, experts: ExpertShape | None = None) -> None:
        """`experts`: of the model, when the answers have the chosen ones."""
        self._version = version
        self._experts = experts
        self._num_seen = 0

    def read(self, answer: dict[str, Any], known_version: int) -> PartChunk:
        """KeyError, TypeError or ValueError when a field is missing or wrong; RequestError when the server refuses."""
        meta = answer["meta_info"]
        finish: dict[str, Any] | None = meta["finish_reason"] or None
        reason = None if finish is None else checked_reason(finish["type"])
        if finish is not None and reason == "abort" and finish.get("status_code") == 400:
            raise RequestError(finish["message"], code="server.request_refused")
        total = meta.get("completion_tokens", 0)
        # Ids and log-probabilities come from one list: output_ids repeats a token of a request aborted in the queue.
        entries = _new_entries(meta.get("output_token_logprobs") or [], self._num_seen, total)
        self._num_seen = total
        versions = Runs.of(self._version, len(entries))
        self._version = max(known_version, self._version)
        part_versions: Runs[int] | None = None
        if reason is not None and total and (spans := meta.get("weight_versions")) is not None:
            numbered = [(version_number(span["version"]), span["start"], span["end"]) for span in spans]
            part_versions = versions_of(numbered, total)
            versions = part_versions[total - len(entries) :]
        token_ids, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
        experts = None if reason is None else experts_of(meta, self._experts, item_bytes=_EXPERT_BYTES)
        num_cached = meta.get("cached_tokens", 0)
        return PartChunk(token_ids, logprobs, versions, reason, part_versions, experts, num_cached)


def _new_entries(entries: list[Any], num_seen: int, total: int) -> list[Any]:
    """The entries not seen yet: the whole list, or the end of a cumulative one."""
    if len(entries) == total - num_seen:
        return entries
    if len(entries) < total or total < num_seen:
        raise ValueError(f"{len(entries)} log-probabilities of {total} tokens, {num_seen} of them seen")
    return entries[len(entries) - total + num_seen :]


def parse_version(model_info: dict[str, Any]) -> int:
    """The policy version in /model_info. KeyError or ValueError when a field is missing or wrong."""
    return version_number(model_info["weight_version"], has_dummy_weights=model_info.get("load_format") == "dummy")


def parse_facts(server_info: dict[str, Any]) -> ServerFacts:
    """Facts in /server_info. KeyError, TypeError or ValueError when a field is missing or wrong."""
    if not server_info["internal_states"]:
        raise ValueError("no scheduler answered")
    numbers = tuple(int(number) for number in re.findall(r"\d+", str(server_info["version"]))[:3])
    return ServerFacts(
        # A server built from source may have no version number: it is treated as new.
        has_update_sessions=numbers[:2] == (0, 0) or numbers >= _HAS_SESSIONS,
        context_length=int(server_info["max_req_input_len"]),
        is_deterministic=bool(server_info.get("enable_deterministic_inference")),
        has_step_in_flight=server_info.get("disable_overlap_schedule") is False,
        first_folder=str(server_info["model_path"]),
    )


def vocabulary_probe() -> dict[str, Any]:
    """A body of /generate that is refused with the size of the vocabulary, which no endpoint reports."""
    sampling = {"max_new_tokens": 1, "logit_bias": {str(_IMPOSSIBLE_TOKEN): 0.0}}
    return {"rid": "vocabulary-size", "input_ids": [0], "sampling_params": sampling}


def parse_vocabulary(refusal: bytes) -> int:
    """Size of the vocabulary in tokens. ValueError when the refusal does not contain it."""
    match = _VOCABULARY.search(refusal)
    if match is None:
        raise ValueError(refusal[:200].decode(errors="replace"))
    return int(match[1]) + 1


def bucket_body(
    bucket: list[WeightSpec], group_name: str, version: int | None, *, keep_cache: bool = False
) -> dict[str, Any]:
    """The body of /update_weights_from_distributed. `version` is given with the last bucket only.

    Until then the server has a mixture of weights, which it reports as no version.
    """
    body = flat_bucket(bucket, group_name, flush_cache=version is not None and not keep_cache)
    return {**body, "abort_all_requests": False, "weight_version": str(NO_VERSION if version is None else version)}


def generated_tokens(metrics: str) -> int:
    """Tokens in /metrics over all label sets; 0 before the first token."""
    lines = (line for line in metrics.splitlines() if line.startswith("sglang:generation_tokens_total"))
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


log = get_logger(__name__)

DRAIN_S = 1.0
"""How long a pause waits until aborted requests return; SGLang itself checks for them once a second."""


class SGLangReplica(HttpReplica):
    """See `areal.fleet.replica.Replica`."""

    def __init__(self, name: str, address: str, token: str = "", form: AnswerForm | None = None) -> None:
        super().__init__(name, address, token, form)
        self._version = 0
        """Version of the last report of the server or of the last update."""
        self._facts: ServerFacts | None = None
        self._vocab_size = 0
        """0: not known yet."""
        self._is_updating = False
        self._num_updates = 0
        """Started so far."""
        self._num_running = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._adapters = ServedAdapters(self.load_adapter, self.unload_adapter)

    # Generation

    async def generate(self, requests: Sequence[GenerationRequest]) -> Chunks:
        """See the protocol. The server aborts the request of a connection that is dropped."""
        facts = await self._known_facts()
        self._num_running += 1
        self._drained.clear()
        try:
            with self._adapters.chosen(requests[0]) as (request, version):
                parts = self._parts(request, facts)
                async with aclosing(parts), aclosing(ended_by_stops(request, parts, self._texts)) as chunks:
                    async for chunk in chunks:
                        yield 0, with_version(chunk, version)
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._drained.set()
        await self._adapters.drop_unused()

    async def _parts(self, request: GenerationRequest, facts: ServerFacts) -> Parts:
        reader, is_streamed = (
            PartReader(self._version, self.form.experts),
            request.gconfig.max_new_tokens > self.form.stream_interval,
        )
        body = generate_body(request, self.form, facts)

        def read(answer: dict[str, Any]) -> PartChunk:
            if "error" in answer:  # the status of a stream is sent before the error occurs
                status = answer["error"].get("code", 400)
                refused = orjson.dumps(answer)
                raise self._client.refusal("/generate", status if isinstance(status, int) else 500, refused)
            return reader.read(answer, self._version)

        async with aclosing(self._client.answers("/generate", body, is_streamed=is_streamed)) as answers:
            async for answer in answers:
                yield self._client.parsed(answer, read)

    async def _texts(self, token_lists: list[Sequence[int]]) -> list[str]:
        answer = await self._client.post("/detokenize", {"tokens": token_lists, "skip_special_tokens": False})
        return self._client.parsed(answer, lambda fields: [str(text) for text in fields["text"]])

    # Control

    async def pause(self, mode: PauseMode) -> None:
        """abort: the server checks once a second whether all requests have returned, so they are awaited here first."""
        if mode == "abort":
            await self._client.post("/abort_request", {"abort_all": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._drained.wait()
        await self._client.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._client.post("/continue_generation", {})

    async def info(self) -> ReplicaInfo:
        """Uses /server_info, which the process that computes answers also while it is paused, unlike /health.

        That process does not answer during a weight update: then only the HTTP process is asked.
        """
        facts = await self._known_facts(again=not self._is_updating)
        if not self._vocab_size:
            self._vocab_size = await self._ask_vocab_size()
        asked_at = None if self._is_updating else self._num_updates
        version = self._client.parsed(await self._client.get("/model_info"), parse_version)
        if asked_at == self._num_updates:  # otherwise an update has set it, or will
            self._version = version
        return ReplicaInfo(
            version=version, vocab_size=self._vocab_size, context_length=facts.context_length, weights_whole=None
        )

    async def _known_facts(self, *, again: bool = False) -> ServerFacts:
        if self._facts is None or again:
            self._facts = self._client.parsed(await self._client.get("/server_info"), parse_facts)
        return self._facts

    async def _ask_vocab_size(self) -> int:
        """A paused server would not answer, so it is resumed first: this new client did not pause it."""
        await self.resume()
        path = "/generate"
        status, answer = await self._client.exchange("POST", path, vocabulary_probe())
        if status != 400:
            raise self._client.refusal(path, status, answer)
        try:
            return parse_vocabulary(answer)
        except ValueError as error:
            text = f"{self.name} does not report the size of its vocabulary: {error}"
            raise ServerUnavailable(text, code="server.unreadable_answer") from error

    async def load(self) -> ReplicaLoad:
        answer = await self._client.get("/v1/loads")
        metrics = await self._client.get("/metrics")

        def parse(fields: dict[str, Any]) -> ReplicaLoad:
            loads = fields["loads"]
            return ReplicaLoad(
                running=sum(load["num_running_reqs"] for load in loads),
                queued=sum(load["num_waiting_reqs"] for load in loads),
                cache_usage=max(load["token_usage"] for load in loads),
                generated_tokens=generated_tokens(metrics.decode()),
            )

        return self._client.parsed(answer, parse)

    # Weights

    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None:
        if update.kind == "adapter":
            await self._adapters.use(update.path, update.version)
            body = {"new_version": str(update.version), "abort_all_requests": False}
            await self._client.post("/update_weight_version", body)
            self._version = update.version
            return await self._adapters.drop_unused()
        facts = await self._known_facts()
        if mode == "in_place" and facts.has_step_in_flight and not self._num_updates:
            text = "%s: one token of each answer gets the version after its own at an update: start it with %s"
            log.warning(text, self.name, "--disable-overlap-schedule")
        self._is_updating = True
        self._num_updates += 1
        try:
            if update.fills_served_weights:
                await self._receive(update, facts, rank, keep_cache=mode == "in_place")
            else:
                await self._load_folder(update, facts, keep_cache=mode == "in_place")
        finally:
            self._is_updating = False
        self._version = update.version

    async def _load_folder(self, update: WeightUpdate, facts: ServerFacts, *, keep_cache: bool) -> None:
        """RequestError when no weight was changed.

        Some folders end SGLang, and it answers 400 for others after it changed weights: that counts as a failure, and a
        good folder repairs the weights afterwards.
        """
        folder = Path(await self._folder_of(update))
        if update.kind == "disk":  # a copy on the server's machine has the checksums of the trainer's folder
            folder = folder.resolve()
            problem = await asyncio.to_thread(folder_problem, folder, Path(facts.first_folder))
            if problem:
                raise RequestError(problem, code="weights.bad_folder")
        path = "/update_weights_from_disk"
        body = {
            "model_path": str(folder),
            "load_format": "auto",  # a server that started with dummy weights would load dummy weights again
            "flush_cache": not keep_cache,
            "abort_all_requests": False,
            "weight_version": str(update.version),
        }
        status, answer = await self._client.exchange("POST", path, body)
        if status != 200:
            raise ServerUnavailable(str(self._client.refusal(path, status, answer)), code="server.request_failed")

    async def _receive(self, update: WeightUpdate, facts: ServerFacts, rank: int, *, keep_cache: bool) -> None:
        if self._group_name != update.group_name:
            await self.abandon_update()
            await self._client.post("/init_weights_update_group", group_body(update, rank))
            self._group_name = update.group_name
        if facts.has_update_sessions:
            await self._begin_session()
        last = len(update.buckets) - 1
        for index, bucket in enumerate(update.buckets):
            version = update.version if index == last else None
            body = bucket_body(bucket, update.group_name, version, keep_cache=keep_cache)
            await self._client.post("/update_weights_from_distributed", body)
        if facts.has_update_sessions:
            await self._client.post("/end_weight_update", {})

    async def _begin_session(self) -> None:
        """A session that an interrupted update left open is closed first."""
        path, body = "/begin_weight_update", {"selector": "all"}
        status, answer = await self._client.exchange("POST", path, body)
        if status == 400:
            await self._client.post("/end_weight_update", {})
            await self._client.post(path, body)
        elif status != 200:
            raise self._client.refusal(path, status, answer)

    async def abandon_update(self) -> None:
        """Leave the group. A server that waits for a bucket reads this only after its wait: it ends with the trainer's
        connection, or with torch's time limit."""
        await super().abandon_update()
        if self._group_name:  # a pending join ends with the trainer's store
            group_name, self._group_name = self._group_name, ""
            path, body = "/destroy_weights_update_group", {"group_name": group_name}
            status, answer = await self._client.exchange("POST", path, body)
            if status not in (200, 400):  # 400: it is not in the group
                raise self._client.refusal(path, status, answer)

    # LoRA adapters

    async def load_adapter(self, name: str, path: str) -> None:
        await self._client.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(Path(path).resolve())})

    async def unload_adapter(self, name: str) -> None:
        await self._client.post("/unload_lora_adapter", {"lora_name": name})

    async def score(self, row: ScoredRow, top_k: int) -> TokenScores:
        name = self._adapters.name
        return await GENERATE_SCORING.ask(self._client, row, top_k, {"lora_path": name} if name else {})


# ----------------------------------------------------------------------------------------------------------------------
# SGLang as a backend: its command and its flags.

_KEEP_SIZE: dict[str, Any] = {"image": {"do_resize": False}}
"""--mm-process-config."""


def _command(config: PPOConfig, on_gpu: bool) -> ServerCommand:
    servers = config.allocation.inference
    assert servers is not None, "a run that starts servers allocates them"
    defaults: dict[str, Any] = {
        "log_level_http": "warning",  # without a log line per health check
        "skip_server_warmup": True,  # the warm-up text kills a server whose small tokenizer has no token for it
    }
    owned: dict[str, Any] = {
        "tp_size": servers.instance_size,
        "nccl_port": "{port_nccl}",  # SGLang draws one at random, which two servers may both choose
        "enable_metrics": True,
        "incremental_streaming_output": True,
        **{name: value for name, (value, _) in run_flags(config).items()},
    }
    env = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # otherwise a paused server is soon reported as unhealthy
    if read_vision_layout(SGLANG.model(config)) is not None:
        env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"  # otherwise it keeps image features of the old weights after an update
    if config.publishes_adapters and config.actor.lora is not None:
        lora = config.actor.lora
        targets = lora.target_modules if isinstance(lora.target_modules, list) else ["all"]
        targets = ["all"] if ALL_LINEAR in targets else targets
        defaults |= {"max_lora_rank": lora.served_rank, "lora_target_modules": targets}
        defaults |= {"max_loras_per_batch": ADAPTERS + 1}  # and the base model
    if not on_gpu:
        defaults |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "lora_backend": "torch_native",
            "disable_cuda_graph": True,
            "sleep_on_idle": True,  # otherwise the idle scheduler keeps a core busy
            "max_running_requests": CPU_REQUESTS,
            "max_total_tokens": cpu_cache_tokens(config, SGLANG),
        }
        owned["device"] = "cpu"
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    program = ("-m", "sglang.launch_server", f"--model-path={SGLANG.model(config)}")
    return foreign_command(config, SGLANG, program=program, defaults=defaults, owned=owned, env=env)


def run_flags(config: PPOConfig) -> dict[str, tuple[Any, str]]:
    """See `ServerBackend`."""
    needed: dict[str, tuple[Any, str]] = {}
    if config.publishes_adapters:
        needed["enable_lora"] = True, GETS_ADAPTERS
    if config.rollout.weight_update == "keep_cache":
        # A pause leaves the step in flight alone: its token of the old weights would be reported as one of the new.
        needed["disable_overlap_schedule"] = True, "rollout.weight_update=keep_cache needs exact versions"
    if config.actor.router_replay:
        needed["enable_return_routed_experts"] = True, "actor.router_replay needs the chosen experts"
    if read_vision_layout(SGLANG.model(config)) is not None:
        # Of Qwen2-VL, SGLang replaces the limits of preprocessor_config.json by its own.
        needed["mm_process_config"] = _KEEP_SIZE, "areal sends images in their final size"
    return needed


def own_problems(config: PPOConfig) -> Problems:
    """See `ServerBackend`."""
    kind = SGLANG.given(config).get("quantization")
    if kind is not None and not config.publishes_adapters:
        # SGLang 0.5.23, by its source: process_weights_after_loading of layers/quantization/fp8.py replaces `weight` by
        # its transposed codes without a weight_loader, which load_weights of models/qwen2.py calls at an update;
        # restore_weights_before_loading does nothing there. Not tried: other kinds, and the loader of
        # --load-format=flash_rl, which keeps what an update needs (fp8 of Qwen2 and Qwen3).
        text = f"{kind!r}: areal cannot update the weights of SGLang servers that quantize them"
        yield "sglang.quantization", f"{text}: remove it, or use vllm.quantization or native.quantization"


def core_bindings(index: int, size: int, threads: int, cores: Sequence[int]) -> dict[str, str]:
    """See `ServerBackend.core_bindings`. SGLang requires this variable when a server has several ranks."""
    if size == 1:
        return {}
    first = index * size * threads
    ranks = [[cores[(first + rank * threads + k) % len(cores)] for k in range(threads)] for rank in range(size)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, cores)) for cores in ranks)}


def part_words(part: int, num_parts: int) -> tuple[str, ...]:
    """See `ServerBackend`. The other parts serve only a health check, on their own loopback."""
    return (f"--nnodes={num_parts}", f"--node-rank={part}", "--dist-init-addr={first}")


SGLANG = ServerBackend(
    name="sglang",
    title="SGLang",
    client=SGLangReplica,
    command=_command,
    model_key="model_path",
    context_key="context_length",
    scoring=GENERATE_SCORING,
    sampling_problems=sampling_problems,
    image_families=QWEN_VL,
    own_problems=own_problems,
    run_flags=run_flags,
    returns_experts=True,
    areal_defaults={
        "random_seed": 1,
        "context_length": 32768,
        "mem_fraction_static": 0.9,
        "chunked_prefill_size": -1,
        "max_prefill_tokens": 32768,
        "schedule_policy": "lpm",
        "disable_radix_cache": True,
        "log_level": "warning",
        "log_level_http": "warning",
        "log_requests_level": 0,
        "decode_log_interval": 1,
    },
    minimum_version="0.5.10",  # --incremental-streaming-output
    tested_version="0.5.23",
    core_bindings=core_bindings,
    part_words=part_words,
    address_variable="SGLANG_HOST_IP",
    nccl_defaults={"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"},  # SGLang sets them to 0 when they are unset
    flags=FlagRules(
        seed="random_seed",
        tokenizer="tokenizer_path",
        owned={
            **COMMON_OWNED,
            **dict.fromkeys(("nccl_port", "dist_init_addr", "nccl_init_addr"), LISTENS),
            **dict.fromkeys(("grpc_mode", "smg_grpc_mode"), ONE_PROCESS),
            **dict.fromkeys(("device", "base_gpu_id", "gpu_id_step"), OWN_GPUS),
            **dict.fromkeys(("stream_output", "incremental_streaming_output"), "areal sets how answers are streamed"),
            "tp_size": ALLOCATED,
            "admin_api_key": NO_KEY,
            "weight_version": "areal counts the versions of the weights",
        },
        fixed={
            **COMMON_FIXED,
            **dict.fromkeys(("dp_size", "pp_size"), (1, ALLOCATED)),
            "enable_metrics": (True, "areal reads them"),
            "tokenizer_worker_num": (1, ONE_PROCESS),
            "allow_auto_truncate": (False, "areal refuses a prompt that does not fit"),
            "use_ray": (False, ONE_GROUP),
            "disaggregation_mode": ("null", "each server computes both prompts and answers"),
        },
        negatable=False,
        ignored={
            "enable_multithread_load": (),  # AReaL's patches of SGLang 0.5.2
            "enable_fast_load": (),
            "enable_ep_moe": (False,),
            "enable_nan_detection": (False,),
            # AReaL unloads an adapter before it loads the next; here requests continue with the adapter they began with
            **dict.fromkeys(("max_loaded_loras", "max_loras_per_batch"), (1,)),
        },
        renamed={"lora_target_modules": {ALL_LINEAR: "all"}},
    ),
)
