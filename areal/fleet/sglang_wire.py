"""The JSON of SGLang's servers: pure functions between it and the records of `areal.fleet.replica`."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

from areal.api.data import WeightSpec
from areal.api.errors import RequestError
from areal.fleet.continuation import version_number, versions_of
from areal.fleet.replica import NO_VERSION, FinishReason, GenerationPart, PartChunk
from areal.fleet.sglang_server import sampling_problems

_ALL_TOKENS = 100_000_000
"""The default of gconfig.top_k, which means no limit; SGLang's value is -1."""
_ONLY_THE_LIKELIEST = 1e-9
"""A top_p that keeps one token."""
_HAS_SESSIONS = (0, 5, 21)
"""Since this version a collective update is a session with a begin and an end."""

_VOCABULARY = re.compile(rb"\[0, (\d+)\]")
_IMPOSSIBLE_TOKEN = 2**31 - 1
_OFF = {
    "min_p": 0.0,
    "min_new_tokens": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Properties that do not change while a server runs."""

    has_update_sessions: bool
    context_length: int
    """Maximum tokens of prompt and answer together that the server never truncates."""
    is_deterministic: bool
    first_folder: str
    """Folder or hub name of the weights it started with."""


def generate_body(part: GenerationPart, facts: ServerFacts, *, stream: bool) -> dict[str, Any]:
    """The body of /generate. RequestError for settings that the server does not apply exactly."""
    if problem := next(iter(sampling_problems(part.gconfig, {})), None):
        raise RequestError(f"gconfig.{problem[0]}: {problem[1]}", code="server.unsupported_sampling")
    body: dict[str, Any] = {
        "rid": part.part_id,
        "input_ids": part.input_ids,
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
            "the server ignores seeds: start it with sglang.enable_deterministic_inference=true, which needs a GPU, or "
            "send requests without a seed",
            code="server.unsupported_sampling",
        )
    if part.adapter:
        body["lora_path"] = part.adapter
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
        "top_k": -1 if gconfig.top_k >= _ALL_TOKENS else gconfig.top_k,
        **_OFF,
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

    def __init__(self, version: int) -> None:
        self._version = version
        self._num_seen = 0
        self.finished = False

    def read(self, answer: dict[str, Any], known_version: int) -> PartChunk:
        """KeyError, TypeError or ValueError when a field is missing or wrong; RequestError when the server refuses."""
        meta = answer["meta_info"]
        reason = _finish_reason(meta["finish_reason"])
        total = meta.get("completion_tokens", 0)
        # Ids and log-probabilities come from one list: output_ids repeats a token of a request aborted in the queue.
        entries = _new_entries(meta.get("output_token_logprobs") or [], self._num_seen, total)
        self._num_seen = total
        versions = [self._version] * len(entries)
        self._version = max(known_version, self._version)
        part_versions: list[int] | None = None
        if reason is not None:
            self.finished = True
            if total and (spans := meta.get("weight_versions")) is not None:
                numbered = [(version_number(span["version"]), span["start"], span["end"]) for span in spans]
                part_versions = versions_of(numbered, total)
                versions = part_versions[total - len(entries) :]
        return PartChunk(
            [entry[1] for entry in entries], [entry[0] for entry in entries], versions, reason, part_versions
        )


def _new_entries(entries: list[Any], num_seen: int, total: int) -> list[Any]:
    """The entries not seen yet: the whole list, or the end of a cumulative one."""
    if len(entries) == total - num_seen:
        return entries
    if len(entries) < total or total < num_seen:
        raise ValueError(f"{len(entries)} log-probabilities of {total} tokens, {num_seen} of them seen")
    return entries[len(entries) - total + num_seen :]


def _finish_reason(finish: dict[str, Any] | None) -> FinishReason | None:
    if finish is None:
        return None
    reason = finish["type"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {reason!r}")
    if reason == "abort" and finish.get("status_code") == 400:
        raise RequestError(finish["message"], code="server.request_refused")
    return reason


def parse_version(model_info: dict[str, Any]) -> int:
    """The policy version in /model_info. KeyError or ValueError when a field is missing or wrong."""
    return version_number(model_info["weight_version"], has_dummy_weights=model_info.get("load_format") == "dummy")


def parse_facts(server_info: dict[str, Any]) -> ServerFacts:
    """From /server_info. KeyError, TypeError or ValueError when a field is missing or wrong."""
    if not server_info["internal_states"]:
        raise ValueError("no scheduler answered")
    return ServerFacts(
        has_update_sessions=_has_sessions(str(server_info["version"])),
        context_length=int(server_info["max_req_input_len"]),
        is_deterministic=bool(server_info.get("enable_deterministic_inference")),
        first_folder=str(server_info["model_path"]),
    )


def _has_sessions(version: str) -> bool:
    """A server built from source may have no version number: it is treated as new."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return numbers[:2] == (0, 0) or numbers >= _HAS_SESSIONS


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


def bucket_body(bucket: list[WeightSpec], group_name: str, version: int | None) -> dict[str, Any]:
    """The body of /update_weights_from_distributed. `version` is given with the last bucket only.

    Until then the server has a mixture of weights, which it reports as no version.
    """
    return {
        "names": [spec.name for spec in bucket],
        "dtypes": [spec.dtype for spec in bucket],
        "shapes": [spec.shape for spec in bucket],
        "group_name": group_name,
        # One flush at the end is enough; the version is valid once all weights have arrived.
        "flush_cache": version is not None,
        "abort_all_requests": False,
        "weight_version": str(NO_VERSION if version is None else version),
        "load_format": "flattened_bucket",
    }


def generated_tokens(metrics: str) -> int:
    """From /metrics, over all label sets; 0 before the first token."""
    lines = (line for line in metrics.splitlines() if line.startswith("sglang:generation_tokens_total"))
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))
