"""SGLang's dialect: pure functions between its JSON and the records of `areal.fleet.replica`, and its sampling limits.

Measured with SGLang 0.5.23. Its log-probabilities are those of the logits it samples from, at the request's temperature
and before top-k and top-p. That is what training needs, as long as nothing else changes the logits. Its penalties count
the last token of the prompt instead of the newest token of the answer; penalties and the minimum length start again
when a request is put back into the queue.
"""

import re
import zlib
from dataclasses import dataclass
from typing import Any

from areal.api.columns import Runs
from areal.api.config import GenerationHyperparameters
from areal.api.data import WeightSpec
from areal.api.errors import RequestError
from areal.api.routed_experts import ExpertShape
from areal.fleet.continuation import checked_reason, experts_of, version_number, versions_of
from areal.fleet.replica import ALL_TOKENS, NO_VERSION, GenerationPart, PartChunk
from areal.fleet.server_client import flat_bucket
from areal.fleet.server_flags import Flags, Problems

_LOWEST_TEMPERATURE = 1e-6
"""SGLang treats a lower temperature as greedy and reports log-probabilities of temperature 1."""
_MAX_STOP_STRINGS = 32
_ONLY_THE_LIKELIEST = 1e-9
"""A top_p that keeps one token."""
_HAS_SESSIONS = (0, 5, 21)
"""Since this version a collective update is a session with a begin and an end."""

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


def generate_body(part: GenerationPart, facts: ServerFacts, *, stream: bool) -> dict[str, Any]:
    """The body of /generate. RequestError for settings that the server does not apply exactly."""
    if problem := next(iter(sampling_problems(part.gconfig, {})), None):
        raise RequestError(f"gconfig.{problem[0]}: {problem[1]}", code="server.unsupported_sampling")
    body: dict[str, Any] = {
        "rid": part.part_id,
        "input_ids": part.wire_ids,
        "sampling_params": _sampling(part, stream=stream),
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": stream,
    }
    if facts.is_deterministic:  # without a seed all requests would use the same one
        seed = zlib.crc32(part.part_id.encode()) if part.seed is None else part.seed
        body["sampling_params"]["sampling_seed"] = seed
    elif part.seed is not None:
        raise RequestError(
            "the server ignores seeds: set sglang.enable_deterministic_inference=true (GPU only), or send no seed",
            code="server.unsupported_sampling",
        )
    if part.vision is not None:
        body["sampling_params"]["logit_bias"] = {str(token): bias for token, bias in part.vision.bans.items()}
    if part.images:
        body["image_data"] = part.image_urls
    if part.adapter:
        body["lora_path"] = part.adapter
    if part.experts is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": part.num_known_experts}
    return body


def _sampling(part: GenerationPart, *, stream: bool) -> dict[str, Any]:
    """The settings under SGLang's names. All of them: a server can have other defaults."""
    gconfig = part.gconfig
    sampling: dict[str, Any] = {
        "max_new_tokens": part.max_new_tokens,
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
    if stream:
        sampling["stream_interval"] = part.stream_interval
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
        self.finished = False

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
        if reason is not None:
            self.finished = True
            if total and (spans := meta.get("weight_versions")) is not None:
                numbered = [(version_number(span["version"]), span["start"], span["end"]) for span in spans]
                part_versions = versions_of(numbered, total)
                versions = part_versions[total - len(entries) :]
        token_ids, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
        experts = None if reason is None else experts_of(meta, self._experts, item_bytes=_EXPERT_BYTES)
        return PartChunk(token_ids, logprobs, versions, reason, part_versions, experts)


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
    """From /server_info. KeyError, TypeError or ValueError when a field is missing or wrong."""
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
    found = _VOCABULARY.search(refusal)
    if found is None:
        raise ValueError(refusal[:200].decode(errors="replace"))
    return int(found[1]) + 1


def bucket_body(
    bucket: list[WeightSpec], group_name: str, version: int | None, *, keep_cache: bool = False
) -> dict[str, Any]:
    """The body of /update_weights_from_distributed. `version` is given with the last bucket only.

    Until then the server has a mixture of weights, which it reports as no version.
    """
    body = flat_bucket(bucket, group_name, flush_cache=version is not None and not keep_cache)
    return {**body, "abort_all_requests": False, "weight_version": str(NO_VERSION if version is None else version)}


def generated_tokens(metrics: str) -> int:
    """From /metrics, over all label sets; 0 before the first token."""
    lines = (line for line in metrics.splitlines() if line.startswith("sglang:generation_tokens_total"))
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))
