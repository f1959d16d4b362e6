"""The JSON of vLLM's servers: pure functions between it and the records of `areal.fleet.replica`."""

from dataclasses import dataclass
from typing import Any

from areal.api.errors import RequestError
from areal.fleet.continuation import checked_reason, prior_output_bias, version_number
from areal.fleet.replica import ALL_TOKENS, FinishReason, GenerationPart, ReplicaLoad

MAX_BIASED_TOKENS = 1024
"""A request with more entries in its logit bias ends a server on GPU."""


def generate_body(part: GenerationPart, *, stream: bool) -> dict[str, Any]:
    """The body of /inference/v1/generate."""
    # For some families the server writes the tokens around an image too.
    ids = part.input_ids if part.vision is None else part.vision.bare(part.input_ids, part.images)
    body: dict[str, Any] = {
        "request_id": part.part_id,
        "token_ids": ids,
        "sampling_params": _sampling(part, stream=stream),
        "stream": stream,
    }
    if part.images:
        # The server caches images by uuid and would use the old one for another image with the same.
        urls = zip(part.images, part.image_urls, strict=True)
        body["content_parts"] = [{"type": "image_url", "url": url, "uuid": image.sha256} for image, url in urls]
    if part.adapter:
        body["model"] = part.adapter
    return body


def _sampling(part: GenerationPart, *, stream: bool) -> dict[str, Any]:
    """The settings under vLLM's names. It silently ignores unknown names."""
    gconfig = part.gconfig
    sampling: dict[str, Any] = {
        "max_tokens": part.max_new_tokens,
        # vLLM masks the model's end token until min_tokens even when ignore_eos is set.
        "min_tokens": 0 if gconfig.ignore_eos and not gconfig.stop else part.min_new_tokens,
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
    if part.seed is not None:
        sampling["seed"] = part_seed(part.seed, part.num_prior_output_tokens)
    if bias := prior_output_bias(part) | ({} if part.vision is None else part.vision.bans):
        if len(bias) > MAX_BIASED_TOKENS:
            raise RequestError(
                f"vLLM continues an answer with a frequency_penalty only up to {MAX_BIASED_TOKENS} different tokens, "
                f"and this one has {len(bias)}: set gconfig.frequency_penalty to 0, or use native servers",
                code="server.unsupported_sampling",
            )
        sampling["logit_bias"] = {str(token): value for token, value in bias.items()}
    if stream:
        sampling["stream_interval"] = part.stream_interval
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
    """On the last piece: (version, start, end) of all tokens of the part."""


def parse_piece(answer: dict[str, Any]) -> Piece:
    """KeyError, TypeError or ValueError when a field is missing or wrong."""
    choice = answer["choices"][0]
    token_ids: list[int] = choice["token_ids"] or []
    logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]] if token_ids else []
    found = choice["weight_versions"]
    spans = None if found is None else [(version_number(s["version"]), s["start"], s["end"]) for s in found]
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
    """From /metrics, summed over the engines of a data-parallel server. KeyError when a metric is missing."""
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
