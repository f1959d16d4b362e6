"""The JSON bodies of the native server: one record for each, which has the names, types and ranges of its fields.

RequestError for any other body; a field that a record does not have is refused, never ignored.
"""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from aiohttp import web
from pydantic import ConfigDict, FailFast, Field, TypeAdapter, ValidationError

from areal.api.data import MAX_REPLICAS
from areal.api.errors import RequestError
from areal.api.images import VisionLayout
from areal.inference.scheduler import SamplingParams
from areal.system.http_guard import read_body

TOO_LARGE = "request.too_large"
MAX_CONTROL_BYTES = 1 << 24
"""Maximum size of a control request. A bucket of a weight update names its weights, about 100 bytes each."""
MAX_SAMPLES, MAX_PROMPTS, MAX_TOP = 4096, 256, 1024
_JSON_HEADERS = {"Content-Type": "application/json"}
_BodyT = TypeVar("_BodyT", bound="Body")
PauseMode = Literal["abort", "retract", "in_place"]
Ids = Annotated[list[int], FailFast()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body without fields; the base of all."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Body):
    """One of several answers to a prompt."""

    rid: str
    sampling_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(Body):
    input_ids: Ids
    group_id: str = ""
    samples: Annotated[list[Sample], FailFast(), Field(min_length=1, max_length=MAX_SAMPLES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSettings(Body):
    """What applies to all answers of a request."""

    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    lora_path: str = ""
    """Name of a loaded LoRA adapter; empty = the base model."""
    image_data: Annotated[list[str], FailFast()] = field(default_factory=list[str])
    """PNG files as data URLs, in their final size, of the only prompt."""
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    """First token of the prompt whose log-probability is returned, at temperature 1; -1 = none is."""
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    """The answer has the likeliest tokens at each place of the prompt."""
    prompt_draws: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    """The answer has tokens that are drawn at each place of the prompt, at the temperature of the request."""
    prompt_targets: Annotated[list[Ids], FailFast()] = field(default_factory=list[Ids])
    """The answer has the log-probabilities of other tokens: row i is for token i + 1 of the prompt; -1 = none."""
    return_text: bool = False
    """Off by default, because decoding takes most of the time of a short request."""
    stream: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody(GenerateSettings):
    """Fields of /generate."""

    rid: str = ""
    input_ids: Ids
    group_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBody(GenerateSettings):
    """Fields of /generate_group."""

    prompts: Annotated[list[Prompt], FailFast(), Field(min_length=1, max_length=MAX_PROMPTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortBody(Body):
    rid: str | None = None
    abort_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseBody(Body):
    mode: PauseMode = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullBody(Body):
    url: str
    mirrors: list[str] = field(default_factory=list[str])
    deltas: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveBody(Body):
    """The base of the bodies that bring weights. With a version they are installed at once."""

    weight_version: str | None = None
    update_id: str = ""
    flush_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderBody(ReceiveBody):
    model_path: str
    abort_all_requests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadBody(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBody(UnloadBody):
    lora_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketBody(ReceiveBody):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0)]]]
    group_name: str
    load_format: Literal["flattened_bucket", "published"]
    """One broadcast for all names of a request; or all weights, or differences of them, for the copy in memory."""
    published: str = ""
    delta_bytes: dict[str, Annotated[int, Field(ge=1)]] = field(default_factory=dict[str, int])
    """The same as in `areal.api.data.WeightUpdate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallBody(Body):
    weight_version: str
    mode: PauseMode
    update_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinBody(Body):
    master_address: str
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    world_size: Annotated[int, Field(ge=2, le=1 + MAX_REPLICAS)]  # a native server is one rank
    group_name: str
    backend: str = "nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveBody(Body):
    group_name: str


@cache
def _adapter(kind: type[_BodyT]) -> TypeAdapter[_BodyT]:
    return TypeAdapter(kind)


async def read_json(request: web.Request, kind: type[_BodyT], max_bytes: int = MAX_CONTROL_BYTES) -> _BodyT:
    """The body of a request; an empty one is an empty object. RequestError unless it is a `kind` of `max_bytes`."""
    length = request.content_length or 0
    data = b"" if length > max_bytes else await read_body(request)
    if max(length, len(data)) > max_bytes:
        raise RequestError(f"the body is longer than {max_bytes} bytes", code=TOO_LARGE)
    try:
        return _adapter(kind).validate_json(data or b"{}")
    except ValidationError as failure:
        error = failure.errors(include_url=False)[0]
    if error["type"] == "json_invalid":
        raise RequestError(f"the body is not JSON: {error['msg']}", code="request.not_json")
    names = [place if isinstance(place, str) and place.isidentifier() else shown(place) for place in error["loc"]]
    raise invalid(f"{'.'.join(names)[:200] or 'the body'}: {error['msg']}, got {shown(error['input'])}")


def invalid(message: str) -> RequestError:
    return RequestError(message, code="request.invalid_field")


def ok() -> web.Response:
    return json_response({"success": True})


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, headers=_JSON_HEADERS)


def error_body(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message}, "code": code}


def error_response(status: int, message: str, code: str) -> web.Response:
    return json_response(error_body(message, code), status)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of the served model."""

    vocab_size: int
    context_length: int
    """Maximum tokens of prompt and answer together."""
    default_stop_ids: frozenset[int]
    """End tokens of the model."""
    has_tokenizer: bool
    layout: VisionLayout | None = None
    """The image layout of a model that takes images."""
    max_adapters: int = 0
    max_adapter_rank: int = 0


def seed_source(base: int) -> Callable[[], int]:
    """A source of seeds for requests without one, reproducible in the order of the requests."""
    random_numbers = Random(base)
    return lambda: random_numbers.getrandbits(63)


def shown(value: Any) -> str:
    """`value` in at most about 60 characters, in constant time; it may be deeply nested."""
    text = reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
