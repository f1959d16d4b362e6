"""The client's side of the binary messages: encodes requests and decodes results."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal.serve.wire import LossRequest, new_message, parsed_message


def encode_loss_request(request: LossRequest, model_id: str = "m", seq_id: int = 1) -> bytes:
    """The bytes of a ForwardBackwardRequest."""
    message = new_message("ForwardBackwardRequest", model_id=model_id, seq_id=seq_id, loss_fn=request.loss_fn)
    message.forward_only = request.forward_only
    for key, value in request.config.items():
        message.loss_fn_config_v2.add(key=key).value.number = value
    for datum in request.data:
        added = message.data.add()
        added.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, values in datum.inputs.items():
            is_float = values.dtype.kind == "f"
            tensor = added.loss_fn_inputs.add(key=name).value
            tensor.dtype, tensor.dense = 1 if is_float else 2, values.astype("<f4" if is_float else "<i8").tobytes()
            tensor.shape.extend(values.shape)
    return message.SerializeToString()


def decode_loss_output(data: bytes) -> tuple[list[np.ndarray], dict[str, float]]:
    """Log-probabilities of each datum and metrics, from a ForwardBackwardOutput."""
    message, result = parsed_message("ForwardBackwardOutput", data), list[np.ndarray]()
    for record in message.loss_fn_outputs:
        tensor = next(entry.value for entry in record.fields if entry.key == "logprobs")
        ends = np.frombuffer(tensor.offsets, "<i8") // 4
        flat, trailing = np.frombuffer(tensor.data, "<f4"), tuple(tensor.trailing_shape)
        result += [flat[low:high].reshape(-1, *trailing) for low, high in itertools.pairwise(ends)]
    return result, {entry.key: entry.value for entry in message.metrics}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a SampleResponse."""

    token_ids: list[int]
    logprobs: list[float]
    is_cut: bool


def decode_sample(data: bytes) -> list[Answer]:
    """The answers of a SampleResponse."""
    return [
        Answer(_values(sequence.tokens, "<i4"), _values(sequence.logprobs, "<f4"), sequence.stop_reason == 1)
        for sequence in parsed_message("SampleResponse", data).sequences
    ]


def _values(data: bytes, kind: str) -> list[Any]:
    return np.frombuffer(data, kind).tolist()
