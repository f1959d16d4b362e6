"""Owns the JSON of SGLang's servers: pure functions between it and the records of `areal.fleet.replica`."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

from areal.api.data import WeightSpec
from areal.api.errors import RequestError
from areal.fleet.continuation import versions_of
from areal.fleet.replica import FinishReason, GenerationPart, PartChunk
from areal.fleet.sglang_server import sampling_problems
from areal.fleet.slot import ANY_VERSION

_ALL_TOKENS = 100_000_000
"""The default of gconfig.top_k, which means no limit; SGLang says -1."""
_ONLY_THE_LIKELIEST = 1e-9
"""A top_p that leaves one token."""
_NAMELESS_VERSION = "default"
"""What a server says whose weights nobody has given a version."""
_HAS_SESSIONS = (0, 5, 21)
"""From here on a collective update is a session with a begin and an end."""

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
    """What does not change while a server lives."""

    has_update_sessions: bool
    context_length: int
    """Most tokens of prompt and answer together that are never cut, whatever their shares."""
    is_deterministic: bool
    has_memory_saver: bool
    first_folder: str
    """Folder or hub name of the weights it started with."""


def generate_body(part: GenerationPart, facts: ServerFacts, *, stream: bool) -> dict[str, Any]:
    """What /generate is asked. RequestError for what the server would not do as asked."""
    if problem := next(iter(sampling_problems(part.gconfig, {})), None):
        raise RequestError(f"gconfig.{problem[0]}: {problem[1]}")
    body: dict[str, Any] = {
        "rid": part.part_id,
        "input_ids": part.input_ids,
        "sampling_params": _sampling(part, stream=stream),
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": stream,
    }
    if facts.is_deterministic:  # without a seed all requests would get the same
        seed = zlib.crc32(part.part_id.encode()) if part.seed is None else part.seed
        body["sampling_params"]["sampling_seed"] = seed
    elif part.seed is not None:
        raise RequestError(
            "the server does not follow seeds: start it with sglang.enable_deterministic_inference=true, which needs a "
            "GPU, or send requests without a seed"
        )
    if part.adapter:
        body["lora_path"] = part.adapter
    return body


def _sampling(part: GenerationPart, *, stream: bool) -> dict[str, Any]:
    """The settings as SGLang names them; a server may have defaults of its own, so none is left out."""
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
        # Where all requests that run have top_k=1, SGLang forgets the temperature of their log-probabilities.
        plain = gconfig.temperature == 1.0
        sampling |= {"top_k": 1, "top_p": 1.0} if plain else {"top_k": -1, "top_p": _ONLY_THE_LIKELIEST}
    if stream:
        sampling["stream_interval"] = part.stream_interval
    return sampling


class PartReader:
    """Reads the answers or events of one part, cumulative and incremental streams alike.

    Where the server tells versions only with the end of an answer, or never, tokens count as made by the version that
    was known before they came: the true one may be newer by one, or older where the trainer went back meanwhile, which
    the end of the answer puts right.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._num_seen = 0
        self.finished = False

    def read(self, answer: dict[str, Any], known_version: int) -> PartChunk:
        """KeyError, TypeError or ValueError when it is not as agreed; RequestError when the server refuses the part."""
        meta = answer["meta_info"]
        reason = _finish_reason(meta["finish_reason"])
        total = meta.get("completion_tokens", 0)
        # Ids and log-probabilities from the same list: of a request aborted in the queue, output_ids repeats a token.
        entries = _new_entries(meta.get("output_token_logprobs") or [], self._num_seen, total)
        self._num_seen = total
        versions = [self._version] * len(entries)
        self._version = max(known_version, self._version)
        part_versions: list[int] | None = None
        if reason is not None:
            self.finished = True
            if total and (spans := meta.get("weight_versions")) is not None:
                told = [(version_number(span["version"]), span["start"], span["end"]) for span in spans]
                part_versions = versions_of(told, total)
                versions = part_versions[total - len(entries) :]
        return PartChunk(
            [entry[1] for entry in entries], [entry[0] for entry in entries], versions, reason, part_versions
        )


def _new_entries(entries: list[Any], num_seen: int, total: int) -> list[Any]:
    """Those not seen yet, out of a list of the new ones or one that ends with all."""
    if len(entries) == total - num_seen:
        return entries
    if len(entries) < total or total < num_seen:
        raise ValueError(f"{len(entries)} log-probabilities of {total} tokens, {num_seen} of them seen")
    return entries[len(entries) - total + num_seen :]


def _finish_reason(told: dict[str, Any] | None) -> FinishReason | None:
    if told is None:
        return None
    reason = told["type"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {reason!r}")
    if reason == "abort" and told.get("status_code") == 400:
        raise RequestError(told["message"])
    return reason


def version_number(told: str, *, has_dummy_weights: bool = False) -> int:
    """A server that was not told a version holds its first weights: version 0, or none when they are random."""
    if told == _NAMELESS_VERSION:
        return ANY_VERSION if has_dummy_weights else 0
    return int(told)


def parse_version(model_info: dict[str, Any]) -> int:
    """The policy version, from /model_info. KeyError or ValueError when it is not as agreed."""
    return version_number(model_info["weight_version"], has_dummy_weights=model_info.get("load_format") == "dummy")


def parse_facts(server_info: dict[str, Any]) -> ServerFacts:
    """From /server_info. KeyError, TypeError or ValueError when it is not as agreed."""
    if not server_info["internal_states"]:
        raise ValueError("no scheduler answered")
    return ServerFacts(
        has_update_sessions=_has_sessions(str(server_info["version"])),
        context_length=int(server_info["max_req_input_len"]),
        is_deterministic=bool(server_info.get("enable_deterministic_inference")),
        has_memory_saver=bool(server_info.get("enable_memory_saver")),
        first_folder=str(server_info["model_path"]),
    )


def _has_sessions(version: str) -> bool:
    """Everything that depends on the server's version. One built from source may have no number: taken as new."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return numbers[:2] == (0, 0) or numbers >= _HAS_SESSIONS


def vocabulary_probe() -> dict[str, Any]:
    """A body of /generate that is refused with the size of the vocabulary, which SGLang tells nowhere else."""
    sampling = {"max_new_tokens": 1, "logit_bias": {str(_IMPOSSIBLE_TOKEN): 0.0}}
    return {"rid": "asks-for-the-vocabulary-size", "input_ids": [0], "sampling_params": sampling}


def parse_vocabulary(refusal: bytes) -> int:
    """Tokens of the vocabulary. ValueError when the refusal does not tell."""
    found = _VOCABULARY.search(refusal)
    if found is None:
        raise ValueError(refusal[:200].decode(errors="replace"))
    return int(found[1]) + 1


def bucket_body(bucket: list[WeightSpec], group_name: str, version: int | None) -> dict[str, Any]:
    """What /update_weights_from_distributed is asked; `version` only with the last bucket.

    Until then the server holds a mixture, and must say so to a controller that was not there: its version is none.
    """
    return {
        "names": [spec.name for spec in bucket],
        "dtypes": [spec.dtype for spec in bucket],
        "shapes": [spec.shape for spec in bucket],
        "group_name": group_name,
        # One flush at the end is enough; the version counts only once every weight is there.
        "flush_cache": version is not None,
        "abort_all_requests": False,
        "weight_version": str(ANY_VERSION if version is None else version),
        "load_format": "flattened_bucket",
    }


def generated_tokens(metrics: str) -> int:
    """From /metrics, over all label sets; 0 before the first token."""
    lines = (line for line in metrics.splitlines() if line.startswith("sglang:generation_tokens_total"))
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))
