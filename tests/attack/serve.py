"""Requests to the gateway of `areal serve` that the SDK never sends, as hypothesis strategies."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from areal.serve.wire import _class_of
from tests.attack.controller import _RAW, _VALUES, Attack, _dumped

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [4]}]}
SAVED = "tinker://MODEL/weights/one"
BODIES: dict[str, dict[str, Any]] = {
    "client/config": {"sdk_version": "0.38.0"},
    "create_session": {"tags": [], "sdk_version": "0.38.0"},
    "session_heartbeat": {"session_id": "SESSION"},
    "sessions/OTHER/finish": {"reason": {"type": "closed"}},
    "create_model": {"session_id": "SESSION", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}},
    "get_info": {"model_id": "MODEL"},
    "optim_step": {"model_id": "MODEL", "seq_id": 1, "adam_params": {"learning_rate": 0.1}},
    "save_weights": {"model_id": "MODEL", "seq_id": 1, "path": "one", "ttl_seconds": 1, "overwrite": True},
    "save_weights_for_sampler": {"model_id": "MODEL", "seq_id": 1, "sampling_session_seq_id": 1},
    "save_weights_external": {"model_id": "MODEL", "seq_id": 1, "path": "one", "age_encryption_recipients": ["a"]},
    "load_weights": {
        "session_id": "SESSION",
        "model_seq_id": 1,
        "path": "tinker://MODEL/weights/one",
        "optimizer": True,
    },
    "weights_info": {"tinker_path": SAVED},
    "create_sampling_session": {"session_id": "SESSION", "sampling_session_seq_id": 1, "base_model": "tiny"},
    "asample": {
        "sampling_session_id": "SESSION:sample:1",
        "seq_id": 1,
        "num_samples": 1,
        "prompt": PROMPT,
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": [3]},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 1,
        "topk_sample_logprobs": 1,
        "target_prompt_logprobs": {"data": [1], "shape": [1, 1], "dtype": "int64"},
    },
    "retrieve_future": {"request_id": "SESSION:sample:1:1"},
    "retrieve_futures": {
        "target": {"sampling_session_id": "SESSION:sample:1", "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "timeout": 0,
        "retrieved_request_ids": ["SESSION:sample:1:1", "x"],
    },
    "cancel_future": {"request_id": "SESSION:sample:1:1"},
}
"""Path -> a valid body. SESSION and MODEL stand for those that exist."""
GETS = [
    "sessions", "sessions/SESSION", "training_runs", "training_runs/MODEL", "training_runs/MODEL/checkpoints",
    "checkpoints", "samplers/SESSION:sample:1", "get_server_capabilities",
]  # fmt: skip
_PAGES = ["", "?limit=2&offset=0", "?limit=-1", "?limit=x", f"?offset={'9' * 5000}", "?limit=%C2%B2", "?offset=1.5"]
CHECKPOINTS = [
    f"training_runs/MODEL/checkpoints/{kind}/{name}"
    for kind in ("weights", "sampler_weights", "external_weights", "..", "%2e%2e")
    for name in ("one", "..", "%2e%2e%2f", "x" * 300)
]


@st.composite
def _changed(draw: st.DrawFn, path: str) -> bytes:
    """A valid body with some of its fields replaced, or removed."""
    body: dict[str, Any] = {**BODIES[path]}
    inner = body
    for name in [*body]:
        if isinstance(body[name], dict) and draw(st.booleans()):
            body[name] = inner = {**body[name]}
    for name in draw(st.lists(st.sampled_from([*inner]), max_size=3)):
        if draw(st.booleans()):
            inner[name] = draw(_VALUES)
        else:
            inner.pop(name, None)
    return _dumped(body)


def attacks() -> st.SearchStrategy[Attack]:
    """JSON requests to every route for clients. Some of them are valid."""
    path = st.sampled_from(sorted(BODIES))
    changed = path.flatmap(lambda item: st.builds(Attack, st.just("POST"), st.just(item), _changed(item)))
    raw = st.builds(Attack, st.just("POST"), st.sampled_from([*BODIES, "forward_backward"]), _RAW)
    listed = st.builds(
        lambda entry, page: Attack("GET", entry + page, b""), st.sampled_from(GETS), st.sampled_from(_PAGES)
    )
    method = st.sampled_from(["GET", "DELETE", "PUT", "POST"])
    ending = st.sampled_from(["", "/ttl", "/publish", "/external_weights_urls"])
    saved = st.builds(
        lambda element, end, how, body: Attack(how, element + end, body),
        st.sampled_from(CHECKPOINTS),
        ending,
        method,
        _RAW,
    )
    return st.one_of(changed, changed, changed, raw, listed, saved)


_SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**62]), max_size=3)
_BYTES = st.one_of(
    st.binary(max_size=24), st.sampled_from([b"\1\0\0\0\0\0\0\0" * 2, b"\xff" * 16, b"\0\0\xc0\x7f" * 2])
)
_IDS = st.sampled_from([b"\1\0\0\0\2\0\0\0", b"\1\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x7f", b"\1\0\0", b""])
_LOSSES = [
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
    "",
    "\0",
]


@st.composite
def loss_bodies(draw: st.DrawFn, model: str, seq: int) -> bytes:
    """A ForwardBackwardRequest with tensors whose bytes, types and shapes need not agree."""
    message = _class_of("ForwardBackwardRequest")(model_id=model, seq_id=seq, loss_fn=draw(st.sampled_from(_LOSSES)))
    message.forward_only = draw(st.booleans())
    for key in draw(st.lists(st.sampled_from(["clip_low_threshold", "clip_high_threshold", "beta", "x"]), max_size=2)):
        added = message.loss_fn_config_v2.add(key=key)
        if draw(st.booleans()):
            added.value.number = draw(st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1e300]))
        else:
            added.value.text = "x"
    for _ in range(draw(st.integers(0, 2))):
        datum = message.data.add()
        for _ in range(draw(st.integers(0, 2))):
            if draw(st.integers(0, 5)):
                datum.model_input.add().encoded_text.tokens = draw(_IDS)
            else:
                datum.model_input.add().image.data = b"x"
        for name in ("target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask", "x"):
            if draw(st.integers(0, 3)):
                tensor = datum.loss_fn_inputs.add(key=name).value
                tensor.dtype = draw(st.sampled_from([1, 2, 3, 4, 0, 99]))
                tensor.shape.extend(draw(st.one_of(st.just([2]), _SHAPES)))
                if draw(st.integers(0, 3)):
                    tensor.dense = draw(_BYTES)
                else:
                    for field in ("values", "crow_indices", "col_indices"):
                        setattr(tensor.sparse_csr, field, draw(_BYTES))
    return message.SerializeToString()
