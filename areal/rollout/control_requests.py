"""The requests of trainers to the controller: one record per route, and the one place that parses and checks them.

Types and ranges are checked here, without the state of the run; `areal.rollout.trainer_rules` compares with that.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from areal.api.data import MAX_REPLICAS, ProbeScore, WeightSpec, WeightUpdate
from areal.api.errors import RequestError

MAX_COUNT = 2**31 - 1
"""Largest step, version and rank: versions of tokens are int32."""
_MAX_TEXT = 4096

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Size = Annotated[int, Field(ge=1, le=MAX_COUNT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRequest:
    """A request of a trainer rank."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    run_id: Count
    """Number of earlier starts of the trainer ranks in this launch: requests of an earlier start are refused."""

    def problem(self) -> str:
        """What is out of range; empty = nothing that its types do not say."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest(TrainerRequest):
    rank: Count
    world_size: Size
    dp_size: Size
    step: Count
    """Train steps done."""
    version: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest(TrainerRequest):
    step: Count
    dp_rank: Count
    dp_size: Size
    with_payloads: bool = True
    """False: the rank reads the payloads from the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequest(TrainerRequest):
    update: WeightUpdate
    waits: bool = True
    """False: the answer comes when the update has started."""

    def problem(self) -> str:
        found = _update_problem(self.update)
        return found and f"update.{found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(TrainerRequest):
    score: ProbeScore

    def problem(self) -> str:
        score = self.score
        lengths = {len(score.answer_ids), len(score.logprobs)}
        return "" if len(lengths) == 1 and len(score.answer_ids) <= _MAX_TEXT else "score: its lists differ in length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedRequest(TrainerRequest):
    step: Count
    version: Count
    weights_checksum: Annotated[str, Field(pattern=r"^[0-9a-f]{0,128}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest(TrainerRequest):
    step: Count
    mode: Annotated[str, Field(max_length=100)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRequest(TrainerRequest):
    step: Count
    path: Annotated[str, Field(max_length=_MAX_TEXT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest(TrainerRequest):
    steps: Count
    """Train steps done."""


Request = TypeVar("Request", bound=TrainerRequest)


def parse_request(kind: type[Request], body: bytes) -> Request:
    """The record of a JSON body. Raises RequestError for other JSON, an unknown field, a wrong type or range."""
    try:
        request: Request = _adapter(kind).validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        code = "request.not_json" if first["type"] == "json_invalid" else "request.invalid_field"
        name = ".".join(str(part) for part in first["loc"])[:100] or "the body"
        raise RequestError(f"{name}: {' '.join(first['msg'].split())}", code=code) from None
    if problem := request.problem():
        raise RequestError(problem, code="request.invalid_field")
    return request


def parse_version(text: str) -> int:
    """The version of a query string. Raises RequestError unless it is a number of at most ten digits in range."""
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > MAX_COUNT:
        message = f"version is {text[:20]!r}, expected a number from 0 to {MAX_COUNT}: GET /replicas?version=N"
        raise RequestError(message, code="request.invalid_field")
    return int(text)


@cache
def _adapter(kind: type[TrainerRequest]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _update_problem(update: WeightUpdate) -> str:
    """What is out of range in a weight update; empty = nothing. `trainer_rules` checks its version and folder."""
    texts = (update.path, update.master_address, update.backend, update.group_name, *update.replicas)
    checks = {
        f"version: not in 0 to {MAX_COUNT}": 0 <= update.version <= MAX_COUNT,
        f"replicas: more than {MAX_REPLICAS}, or one of them twice": (
            len(set(update.replicas)) == len(update.replicas) <= MAX_REPLICAS
        ),
        f"text: longer than {_MAX_TEXT} characters": all(len(text) <= _MAX_TEXT for text in texts),
        "master_port: not in 0 to 65535": 0 <= update.master_port <= 65535,
        "backend: not nccl or gloo": update.backend in ("", "nccl", "gloo"),
        "ranks_per_replica: not in 1 to 65536": 1 <= update.ranks_per_replica <= 65536,
        "buckets: a weight without a name or dtype, or with a size out of range": all(
            _is_weight(spec) for bucket in update.buckets for spec in bucket
        ),
        "replicas: a collective update of replicas needs master_address, master_port, backend, group_name, buckets": (
            not update.replicas
            or (
                bool(update.master_address and update.master_port and update.backend and update.group_name)
                and bool(update.buckets)
            )
        ),
        "path: a collective update has none": update.is_folder or not update.path,
        "mirrors: only the fleet knows them": not update.mirrors,
        "path: not an http:// address": update.kind != "http" or update.path.startswith("http://"),
        "replicas: an update from a folder addresses all replicas": not (update.is_folder and update.replicas),
    }
    return next((problem for problem, holds in checks.items() if not holds), "")


def _is_weight(spec: WeightSpec) -> bool:
    sizes_fit = len(spec.shape) <= 16 and all(0 <= size <= 2**48 for size in spec.shape)
    return sizes_fit and 0 < len(spec.name) <= _MAX_TEXT and 0 < len(spec.dtype) <= 32
