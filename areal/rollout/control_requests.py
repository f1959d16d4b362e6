"""The requests of trainers to the controller: one record per route, and the one place that parses and checks them.

Types and ranges are checked here, without the state of the run; `areal.rollout.control_requests` compares with that.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from areal.api.config import PPOConfig
from areal.api.data import MAX_REPLICAS, ProbeScore, ScoredRow, WeightSpec, WeightUpdate
from areal.api.errors import RequestError
from areal.ledger.state import LedgerBehind, LedgerState
from areal.system.run_paths import RunPaths

MAX_COUNT = 2**31 - 1
"""Largest step, version and rank: versions of tokens are int32."""
_MAX_TEXT = 4096
_MAX_SCORED = 64

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
        text = _update_problem(self.update)
        return text and f"update.{text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(TrainerRequest):
    score: ProbeScore

    def problem(self) -> str:
        score = self.score
        lengths = {len(score.answer_ids), len(score.logprobs)}
        return "" if len(lengths) == 1 and len(score.answer_ids) <= _MAX_TEXT else "score: its lists differ in length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(TrainerRequest):
    version: Count
    rows: list[ScoredRow]
    top_k: Annotated[int, Field(ge=0, le=_MAX_SCORED)]

    def problem(self) -> str:
        if not 1 <= len(self.rows) <= _MAX_SCORED:
            return f"rows: there are {len(self.rows)}, and 1 to {_MAX_SCORED} are scored"
        for row in self.rows:
            if not 1 <= row.first < len(row.token_ids):
                return f"rows: first is {row.first} in a row of {len(row.token_ids)} tokens"
            if not 0 <= min(row.token_ids) <= max(row.token_ids) <= MAX_COUNT:
                return "rows: a token id is out of range"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedRequest(TrainerRequest):
    step: Count
    version: Count
    weights_checksum: Annotated[str, Field(pattern=r"^[0-9a-f]{0,128}$")]
    ess: Annotated[float, Field(ge=0, le=1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest(TrainerRequest):
    step: Count
    mode: Annotated[str, Field(max_length=100)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundRequest(TrainerRequest):
    step: Count
    begins: bool = False
    """The evaluation after this step, the newest one, is to begin."""
    waits: bool = False
    """The answer comes when it has ended."""


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
    texts += (*update.deltas, *update.deltas.values(), *update.delta_bytes, update.published)
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
        "path: not an http:// or file:// address": (
            update.kind != "http" or update.path.startswith(("http://", "file://"))
        ),
        "deltas: not of http": not update.deltas or update.kind == "http",
        "replicas: an update from a folder addresses all replicas": not (update.is_folder and update.replicas),
    }
    return next((problem for problem, holds in checks.items() if not holds), "")


def _is_weight(spec: WeightSpec) -> bool:
    sizes_fit = len(spec.shape) <= 16 and all(0 <= size <= 2**48 for size in spec.shape)
    return sizes_fit and 0 < len(spec.name) <= _MAX_TEXT and 0 < len(spec.dtype) <= 32


# ----------------------------------------------------------------------------------------------------------------------
# Which request of a trainer the state of the run allows. Pure.
#
# The policy version is the number of train steps done. A trainer attaches at a step, then for each step k it requests
# batch k, sends version k + 1 and reports batch k as consumed. The servers have version k + 1 before it sends k + 2. A
# restarted trainer has a higher `run_id`, may publish the version of its checkpoint, and attaches there.


class OutOfOrder(RequestError):
    """The state of the run does not allow this request (HTTP 409)."""

    code = "rollout.out_of_order"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """What is fixed for a run."""

    world_size: int
    """Trainer ranks."""
    dp_size: int
    total_steps: int
    folder: PurePath
    """The run folder, absolute."""
    goals: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean reward by evaluation mode that ends the run early; empty = none."""

    @classmethod
    def of(cls, config: PPOConfig, *, total_steps: int) -> Self:
        dims = config.allocation.train[0].parallel
        return cls(
            world_size=dims.world_size,
            dp_size=dims.dp,
            total_steps=total_steps,
            folder=RunPaths.of(config).root,
            goals=config.evaluator.stop_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRun:
    """One start of the trainer ranks, as far as the controller knows it."""

    run_id: int
    start: int
    """Train steps done when it started; for a controller that restarted meanwhile: at its first request."""
    is_attached: bool


def check_shape(request: TrainerRequest, shape: RunShape) -> None:
    """Raise RequestError when a request does not fit the run in any state: ranks, sizes, paths."""
    match request:
        case AttachRequest():
            if (request.world_size, request.dp_size) != (shape.world_size, shape.dp_size):
                asked = f"world_size={request.world_size} dp_size={request.dp_size}"
                raise _invalid(f"{asked}, but the run has {shape.world_size} and {shape.dp_size}")
            if request.rank >= request.world_size:
                raise _invalid(f"rank={request.rank} is not below world_size={request.world_size}")
            if request.version != request.step:
                raise _invalid(f"version={request.version} after {request.step} train steps: they must be equal")
        case BatchRequest():
            if request.dp_size != shape.dp_size:
                raise _invalid(f"dp_size={request.dp_size}, but the run has {shape.dp_size}")
            if request.dp_rank >= request.dp_size:
                raise _invalid(f"dp_rank={request.dp_rank} is not below dp_size={request.dp_size}")
        case ConsumedRequest():
            if request.version != request.step + 1:
                raise _invalid(f"version={request.version} after train step {request.step}: it must be one higher")
        case CommittedRequest():
            _require_inside(request.path, shape.folder)
        case PublishRequest():
            if request.update.kind in ("disk", "adapter"):
                _require_inside(request.update.path, shape.folder)
            for address in (request.update.path, *request.update.deltas.values()):
                if address.startswith("file://"):
                    _require_inside(address.removeprefix("file://"), shape.folder)
        case _:
            pass


def allowed_run(
    request: TrainerRequest, run: TrainerRun | None, state: LedgerState, shape: RunShape
) -> TrainerRun | None:
    """The trainer run after `request`, given the one before; None = unknown. Raises OutOfOrder, LedgerBehind for what
    the ledger does not record, and RequestError as `check_shape`."""
    check_shape(request, shape)
    if run is not None and request.run_id < run.run_id:
        message = f"the trainers have started again (run {run.run_id}) since the start of run {request.run_id}"
        raise OutOfOrder(message, code="rollout.old_trainer")
    match request:
        case AttachRequest():
            return _after_attach(request, run, state, shape)
        case PublishRequest():
            return _after_publish(request, run, state, shape)
        case FinishRequest():
            _check_finish(request.steps, state, shape)
            return run
        case CompareRequest():
            return run
        case _:
            trained, known = _position(request, run, state)
            try:
                _check_step(request, trained, state)
            except OutOfOrder:
                if run is None:  # the controller restarted, and the attach of this trainer was lost
                    raise LedgerBehind(trained, state.newest_step) from None
                raise
            return known


def _after_attach(request: AttachRequest, run: TrainerRun | None, state: LedgerState, shape: RunShape) -> TrainerRun:
    if request.step >= shape.total_steps:
        raise OutOfOrder(f"step {request.step}: the run has {shape.total_steps} steps, none is left to train")
    if run is None or request.run_id > run.run_id:
        return TrainerRun(run_id=request.run_id, start=request.step, is_attached=True)
    expected = state.trained_steps if run.is_attached else run.start
    # A controller that restarted cannot know whether a publication ended a step or came from a new trainer.
    if request.step != expected and not request.step == run.start == state.version:
        raise OutOfOrder(f"step {request.step}: trainer run {run.run_id} is at step {expected}")
    return replace(run, is_attached=True)


def _after_publish(request: PublishRequest, run: TrainerRun | None, state: LedgerState, shape: RunShape) -> TrainerRun:
    version, trained = request.update.version, state.trained_steps
    following = trained + 1 if trained in state.batches else None
    state.require_version(version)
    is_new = run is None or request.run_id > run.run_id
    if trained is None:
        run = run if run and not is_new else TrainerRun(run_id=request.run_id, start=version, is_attached=False)
        is_allowed = version == run.start and version <= shape.total_steps
    elif run is None and version in (trained, following):  # the controller restarted while the trainer trained
        run, is_allowed = TrainerRun(run_id=request.run_id, start=version, is_attached=True), True
    elif run is None or is_new:
        run = TrainerRun(run_id=request.run_id, start=version, is_attached=False)
        is_allowed = version <= (state.newest_step or 0)  # the version of a checkpoint, perhaps of an earlier run
    else:
        if version > trained + 1:
            raise LedgerBehind(version, state.newest_step)
        is_current = run.is_attached or run.start == trained
        current = state.trainer_version if run.is_attached else run.start
        is_allowed = version == current or (is_current and version == following)
    if not is_allowed:
        text = f"version {version}: the run serves version {state.version} after {trained} train steps"
        raise OutOfOrder(text)
    return run


def _check_finish(steps: int, state: LedgerState, shape: RunShape) -> None:
    if state.trained_steps is not None:
        state.require_reached(steps)
    goals = shape.goals
    # the result of an evaluation in the background arrives after further steps
    known = state.evaluations
    is_reached = bool(goals) and any(
        step <= steps and all(known.get((step, mode), {}).get("reward", -inf) >= goals[mode] for mode in goals)
        for step, _ in known
    )
    if steps < shape.total_steps and not is_reached:
        raise OutOfOrder(f"finish after {steps} of {shape.total_steps} train steps, and no goal is reached")


def _position(request: TrainerRequest, run: TrainerRun | None, state: LedgerState) -> tuple[int, TrainerRun]:
    """The steps done and the run of an attached trainer."""
    trained = state.trained_steps
    if trained is None:
        raise LedgerBehind(0, None)
    if run is None:
        return trained, TrainerRun(run_id=request.run_id, start=trained, is_attached=True)
    if not run.is_attached and run.start > trained:
        raise LedgerBehind(run.start, state.newest_step)
    if request.run_id > run.run_id or not (run.is_attached or run.start == trained):
        raise OutOfOrder(f"trainer run {request.run_id} is not attached")
    return trained, run


def _check_step(request: TrainerRequest, trained: int, state: LedgerState) -> None:
    """Raise LedgerBehind for a step beyond the ledger, OutOfOrder for an earlier one."""
    match request:
        case ConsumedRequest():
            state.require_batch(request.step, request.version)
            is_repeated = request.step == trained - 1 and request.step in state.consumed_steps
            is_allowed = is_repeated or request.step == trained
        case BatchRequest() | EvaluationRequest():
            state.require_reached(request.step)
            is_allowed = request.step == trained
        case BackgroundRequest():
            state.require_reached(request.step)
            is_allowed = request.step == trained or (request.step < trained and not request.begins)
        case CommittedRequest():  # a thread writes checkpoints while the training continues
            state.require_reached(request.step)
            is_allowed = request.step <= trained
        case _:
            return
    if not is_allowed:
        raise OutOfOrder(f"step {request.step}: {trained} steps are done, version {state.version} is published")


def _require_inside(text: str, folder: PurePath) -> None:
    path = PurePath(text)
    if "\0" in text or ".." in path.parts or not path.is_relative_to(folder) or path == folder:
        raise _invalid(f"path: {text[:200]!r} is not below the run folder {folder}")


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="request.invalid_field")
