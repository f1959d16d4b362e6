"""The bodies of requests of the Tinker SDK 0.38, JSON and protobuf, and the messages of its results.

Field numbers are those of the SDK's messages. Nothing is imported from the SDK, which clients install themselves.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal.api.columns import Packed
from areal.api.data import GenerationResponse
from areal.api.errors import RequestError


def invalid(message: str) -> RequestError:
    """The error for a request with a wrong field."""
    return RequestError(message, code="request.invalid_field")


# ----------------------------------------------------------------------------------------------------------------------
# JSON.


class Body(BaseModel):
    """The base of JSON bodies. Fields that the SDK may add are ignored."""

    model_config = ConfigDict(allow_inf_nan=False, protected_namespaces=())


Number = Annotated[int, Field(ge=0, lt=2**63)]
"""A number that clients count or choose."""
MAX_SAMPLES, MAX_TOP = 1024, 1024
TopK = Annotated[int, Field(ge=0, le=MAX_TOP)]


class TextChunk(Body):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(Body):
    chunks: list[TextChunk]

    @property
    def token_ids(self) -> Packed[int]:
        try:
            return Packed(array("i", [token for chunk in self.chunks for token in chunk.tokens]))
        except OverflowError as error:
            raise invalid(f"the prompt has no token ids: {error}") from error


class SampleSettings(Body):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Number | None = None
    stop: str | list[str] | list[int] | None = None
    """None: the end token of the model. A list replaces it; an empty one: nothing ends an answer."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(Body):
    """Fields of /asample."""

    sampling_session_id: str
    seq_id: Number
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: Prompt
    sampling_params: SampleSettings = SampleSettings()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: TopK = 0
    topk_sample_logprobs: TopK = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: TopK = 0


class AdapterSettings(Body):
    """What a tenant chooses when it creates an adapter."""

    rank: Annotated[int, Field(ge=1, le=2**20)] = 32
    seed: Number | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def trains(self, layer: str) -> bool:
        """Whether the adapter of the module `layer` is trained."""
        names = layer.split(".")
        if names[-1] == "lm_head":
            return self.train_unembed
        return self.train_mlp if {"mlp", "feed_forward", "shared_expert"} & set(names) else self.train_attn


class SessionBody(Body):
    session_id: str


class CreateModelBody(SessionBody):
    model_seq_id: Number
    base_model: str
    user_metadata: dict[str, str] | None = None
    lora_config: AdapterSettings = AdapterSettings()
    optimizer_config: dict[str, Any] = Field(default_factory=dict)


class LoadBody(Body):
    path: str
    optimizer: bool
    model_id: str = ""
    seq_id: Number | None = None
    session_id: str = ""
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, str] | None = None


class ModelBody(Body):
    model_id: str


class TrainingBody(ModelBody):
    """The fields of every request that trains or saves a model."""

    seq_id: Annotated[int, Field(ge=1, lt=2**63)]


class AdamBody(Body):
    learning_rate: Annotated[float, Field(ge=0, le=1e3)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class StepBody(TrainingBody):
    adam_params: AdamBody


class TtlBody(Body):
    ttl_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None


class SaveBody(TrainingBody, TtlBody):
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    age_encryption_recipients: list[str] | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SamplerBody(SessionBody):
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class FutureBody(Body):
    request_id: str


class TargetBody(Body):
    sampling_session_id: str
    cloned_sampler_id: Number = 0


class FuturesBody(Body):
    target: TargetBody
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0)] | None = 25.0
    retrieved_request_ids: list[str] = Field(default_factory=list)


class PathBody(Body):
    tinker_path: str


class CommandBody(Body):
    """What a trainer rank asks for."""

    run_id: Number
    epoch: str
    number: Number


BodyT = TypeVar("BodyT", bound=Body)


def parsed(kind: type[BodyT], data: bytes) -> BodyT:
    """The body of a request. RequestError that names the first wrong field."""
    try:
        return kind.model_validate_json(data or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise invalid(f"{where}: {first['msg']}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Binary messages.

PROTOBUF = "application/x-protobuf"
_PACKAGE = "areal_tinker"
_MESSAGES = {
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "FieldsEntry": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag string, 2 fields FieldsEntry*, 3 num_datums int64",
    "NumberEntry": "1 key string, 2 value double",
    "LossValue": "1 number double, 2 text string",
    "ValueEntry": "1 key string, 2 value LossValue",
    "TensorEntry": "1 key string, 2 value Tensor",
    "EncodedText": "1 tokens bytes",
    "Image": "1 data bytes, 2 format string",
    "Chunk": "1 encoded_text EncodedText, 2 image Image, 3 dmel Image",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs TensorEntry*",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, "
    "5 loss_fn_config NumberEntry*, 6 forward_only bool, 7 loss_fn_config_v2 ValueEntry*",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics NumberEntry*",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "AltTokens": "1 tokens Tensor, 2 logprobs Tensor",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs TopkLogprobs",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs, "
    "4 prompt_cache_hit_tokens int32, 5 target_prompt_logprobs Tensor, 6 prompt_alt_tokens AltTokens",
}
"""Message -> its fields: number, name, type; * = repeated. A map is a list of entries, and enums are integers: the
bytes are the same."""
_FLOAT, _INT64, _INT32, _BFLOAT16 = 1, 2, 3, 4
_NUMPY = {_FLOAT: "<f4", _INT64: "<i8", _INT32: "<i4"}
_STOP, _LENGTH = 0, 1
_MAX_CELLS = 2**24  # The largest sparse tensor, whose size its bytes do not limit.


@cache
def _class_of(name: str) -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto2")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            number, field_name, kind = text.split()
            added = message.field.add(name=field_name, number=int(number))
            added.label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            if kind in _MESSAGES:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
                added.options.packed = kind == "int64" and added.label == kinds.LABEL_REPEATED
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence of a training request."""

    tokens: np.ndarray
    """int64 [N]."""
    inputs: Mapping[str, np.ndarray]
    """Name -> int64 or float32, one row for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRequest:
    """A request for a loss, with or without gradients."""

    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float] = field(default_factory=dict[str, float])
    forward_only: bool = False


def new_message(name: str, **fields: Any) -> Any:
    """A message of the table."""
    return _class_of(name)(**fields)


def parsed_message(name: str, data: bytes) -> Any:
    """The message of these bytes. RequestError for others."""
    message = new_message(name)
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise invalid(f"the body is not a {name}: {error}") from error
    return message


def decode_loss_request(body: bytes) -> LossRequest:
    """The content of a ForwardBackwardRequest. RequestError for what cannot be computed."""
    message = parsed_message("ForwardBackwardRequest", body)
    config: dict[str, float] = {entry.key: entry.value for entry in message.loss_fn_config}
    for entry in message.loss_fn_config_v2:
        if entry.value.HasField("text"):
            raise invalid(f"loss_fn_config: {entry.key}={entry.value.text!r} is not a number")
        config[entry.key] = entry.value.number
    return LossRequest(
        data=[_datum(datum, number) for number, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        config=config,
        forward_only=message.forward_only,
    )


def _set_tensor(message: Any, values: np.ndarray) -> None:
    is_float = values.dtype.kind == "f"
    message.dtype = _FLOAT if is_float else _INT64
    message.dense = values.astype(_NUMPY[message.dtype]).tobytes()
    message.shape.extend(values.shape)


def _datum(message: Any, number: int) -> Datum:
    parts: list[np.ndarray] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise RequestError(f"datum {number} has an image or audio chunk: only text", code="request.no_images")
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise invalid(f"datum {number}: {len(data)} bytes are no int32 tokens")
        parts.append(np.frombuffer(data, "<i4"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    return Datum(tokens=tokens, inputs={entry.key: _array(entry.value, entry.key) for entry in message.loss_fn_inputs})


def _array(message: Any, name: str) -> np.ndarray:
    """The values of a Tensor, int64 or float32. RequestError when bytes and shape do not agree."""
    shape, kind = tuple(message.shape), message.dtype
    try:
        if not message.HasField("sparse_csr"):
            return _widened(_values(message.dense, kind).reshape(shape))
        if math.prod(shape) > _MAX_CELLS:
            raise ValueError(f"more than {_MAX_CELLS} cells")
        sparse = message.sparse_csr
        rows, columns = (np.frombuffer(data, "<i8") for data in (sparse.crow_indices, sparse.col_indices))
        values = _values(sparse.values, kind)
        dense = np.zeros(shape, values.dtype)
        dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
        return _widened(dense)
    except (ValueError, IndexError, KeyError) as error:
        raise invalid(f"input {name} of shape {list(shape)} cannot be read: {error}") from error


def _values(data: bytes, kind: int) -> np.ndarray:
    if kind == _BFLOAT16:
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, _NUMPY[kind])


def _widened(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int64)


def encode_loss_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput. `logprobs`: of each datum, float32 in the shape of its target tokens."""
    message = new_message("ForwardBackwardOutput", loss_fn_output_type="ArrayRecord")
    for trailing, neighbours in groupby(logprobs, key=lambda values: values.shape[1:]):
        group = list(neighbours)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(group))
        tensor = record.fields.add(key="logprobs").value
        sizes = [4 * values.size for values in group]
        tensor.data = b"".join(values.astype("<f4").tobytes() for values in group)
        tensor.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype("<i8").tobytes()
        tensor.dtype = _FLOAT
        tensor.trailing_shape.extend(trailing)
    for key, value in metrics.items():
        message.metrics.add(key=key, value=value)
    return message.SerializeToString()


Likeliest = Sequence[tuple[int, float]]
"""The likeliest tokens at a place, with their log-probabilities."""
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
"""A cell without a likely token."""


def encode_sample(
    answers: Sequence[GenerationResponse], rescored: Sequence[GenerationResponse], *, with_logprobs: bool
) -> bytes:
    """The SampleResponse of these answers, in order. `rescored`: what they are as prompts, as far as that is wanted.
    `with_logprobs`: of the tokens of the prompt."""
    message = new_message("SampleResponse", prompt_cache_hit_tokens=answers[0].num_cached_tokens)
    for answer in answers:
        added = message.sequences.add(stop_reason=_LENGTH if answer.stop_reason == "length" else _STOP)
        added.tokens = np.asarray(answer.output_ids, "<i4").tobytes()
        added.logprobs = np.asarray(answer.output_logprobs, "<f4").tobytes()
    for added, again in zip(message.sequences, rescored, strict=False):
        if again.prompt_scores is not None:
            _set_top(added.topk_sampled_logprobs, again.prompt_scores.top[len(answers[0].input_ids) :])
    scores = answers[0].prompt_scores
    if scores is None:
        return message.SerializeToString()
    if with_logprobs:
        message.prompt_logprobs = np.asarray(scores.logprobs, "<f4").tobytes()
    if any(scores.top):
        _set_top(message.topk_prompt_logprobs, scores.top)
    if any(scores.draws):
        ids, values = _cells(scores.draws[1:])
        _set_tensor(message.prompt_alt_tokens.tokens, ids)
        _set_tensor(message.prompt_alt_tokens.logprobs, values)
    if len(scores.targets):
        _set_tensor(message.target_prompt_logprobs, np.asarray(scores.targets, np.float32))
    return message.SerializeToString()


def _set_top(message: Any, rows: Sequence[Likeliest]) -> None:
    ids, values = _cells(rows)
    message.length, message.k = ids.shape
    message.token_ids, message.logprobs = ids.astype("<i4").tobytes(), values.tobytes()


def _cells(rows: Sequence[Likeliest]) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 and log-probabilities float32, [rows, k]; the rest of a short row is empty."""
    width = max(map(len, rows))
    ids = np.full((len(rows), width), _NO_TOKEN, np.int64)
    values = np.full((len(rows), width), _NO_LOGPROB, np.float32)
    for row, cells in enumerate(rows):
        for column, (token, logprob) in enumerate(cells):
            ids[row, column], values[row, column] = token, logprob
    return ids, values
