"""The rules by which an answer generated in parts, on several replicas or under several versions, is one answer.

Pure: no clock, no network. Token limits apply to the whole answer: each part may add what is left. An answer never
continues under an older policy than the one that generated its newest token.
"""

import base64
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal.api.columns import Packed, Runs, RunsBuilder, append, joined, to_runs
from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, StopReason
from areal.api.errors import RequestError, ServerUnavailable
from areal.api.routed_experts import ExpertShape, RoutedExperts
from areal.data.image_files import RunImages
from areal.fleet.replica import NO_VERSION, FinishReason, GenerationPart, PartChunk, RequestLimits


def token_budget(gconfig: GenerationHyperparameters, num_prompt_tokens: int) -> int:
    """Maximum tokens of the whole answer. RequestError when the prompt leaves no room."""
    if num_prompt_tokens == 0:
        raise RequestError("the prompt is empty: a request needs at least one token id", code="request.invalid_field")
    budget = min(gconfig.max_new_tokens, gconfig.max_tokens - num_prompt_tokens)
    if budget <= 0:
        raise RequestError(
            f"a prompt of {num_prompt_tokens} tokens leaves no room for an answer under "
            f"gconfig.max_tokens={gconfig.max_tokens}: raise it or shorten the prompt",
            code="request.too_long",
        )
    return budget


class Answer:
    """One answer while it is generated: the tokens so far and the next part to request."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        stream_interval: int,
        experts: ExpertShape | None = None,
        vision: RunImages | None = None,
    ) -> None:
        """`experts`: record the chosen experts of a model of this shape. `vision`: of a model that takes images."""
        self._request = request
        self._vision = vision
        self._experts = None if experts is None else RoutedExperts(experts, b"")
        self._stream_interval = stream_interval
        self._budget = token_budget(request.gconfig, len(request.input_ids))
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._versions: RunsBuilder[int] = RunsBuilder()
        self._replicas: list[str] = []
        self.num_parts = 0
        """Requested so far."""
        self._part_start = 0
        """Number of tokens when the current part was requested."""
        self._stop_reason: StopReason | None = None

    @property
    def finished(self) -> bool:
        return self._stop_reason is not None

    @property
    def is_short(self) -> bool:
        """No part of it is streamed."""
        return self._budget <= self._stream_interval

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def newest_version(self) -> int | None:
        """The policy version of the newest token, None before the first."""
        return self._versions.values[-1] if self._versions.values else None

    def check(self, limits: RequestLimits) -> None:
        """RequestError when the answer exceeds these limits.

        Such a request ends some servers, and others silently shorten its answer.
        """
        gconfig, num_prompt = self._request.gconfig, len(self._request.input_ids)
        vocab_size, context = limits.vocab_size, limits.context_length
        _check_ids(self._request.input_ids, vocab_size, "the prompt", "use the tokenizer of the served model")
        if gconfig.stop_token_ids:
            _check_ids(gconfig.stop_token_ids, vocab_size, "gconfig.stop_token_ids", "remove it")
        if self._vision is not None:
            self._vision.collapsed(self._request.input_ids, self._request.images)
        elif self._request.images:
            text = "the prompt has images, and the served model takes none: use a model for images and text"
            raise RequestError(text, code="request.no_images")
        if num_prompt >= context:
            raise RequestError(
                f"a prompt of {num_prompt} tokens exceeds the servers' context length of {context}: shorten it",
                code="request.too_long",
            )
        if num_prompt + self._budget > context:
            raise RequestError(
                f"prompt ({num_prompt} tokens) and answer (up to {self._budget}) exceed the servers' context length: "
                f"set gconfig.max_new_tokens to at most {context - num_prompt}, or gconfig.max_tokens={context}",
                code="request.too_long",
            )

    def next_part(self, replica_name: str) -> GenerationPart:
        """The part that `replica_name` is to add now."""
        request, done = self._request, len(self._token_ids)
        if not self._replicas or self._replicas[-1] != replica_name:
            self._replicas.append(replica_name)
        self.num_parts += 1
        self._part_start = done
        return GenerationPart(
            part_id=f"{request.request_id}-{self.num_parts % 1000:03d}",
            input_ids=joined("i", (request.input_ids, Packed(self._token_ids))) if done else request.input_ids,
            num_prior_output_tokens=done,
            max_new_tokens=self._budget - done,
            min_new_tokens=min(max(request.gconfig.min_new_tokens - done, 0), self._budget - done),
            gconfig=request.gconfig,
            adapter=request.adapter,
            group_id=request.group_id,
            seed=request.seed,
            stream_interval=self._stream_interval,
            experts=None if self._experts is None else self._experts.shape,
            num_known_experts=0 if self._experts is None else len(self._experts),
            images=request.images,
            vision=self._vision,
        )

    def add(self, chunk: PartChunk) -> None:
        """Append tokens of the current part.

        ServerUnavailable when the replica breaks the protocol or returns to an older policy: the tokens from there on
        are not appended.
        """
        token_ids, logprobs, versions, finish_reason, part_versions, _ = chunk
        count, done = len(token_ids), len(self._token_ids)
        if len(logprobs) != count or len(versions) != count:
            others = f"{len(logprobs)} log-probabilities and {len(versions)} versions"
            raise self._broken(f"sent {count} tokens with {others}")
        if done + count > self._budget:
            raise self._broken("sent more tokens than requested")
        try:
            append(self._token_ids, token_ids)
            append(self._logprobs, logprobs)
        except (TypeError, OverflowError) as error:
            del self._token_ids[done:]
            raise self._broken(f"sent numbers of the wrong type or range: {error}") from error
        if part_versions is None:
            self._add_versions(to_runs(versions))
        else:
            num_in_part = done + count - self._part_start
            if len(part_versions) != num_in_part:
                self._cut(self._part_start)  # no token of the part has a known version
                raise self._broken(f"reported {len(part_versions)} versions for a part of {num_in_part} tokens")
            self._versions.cut(self._part_start)
            self._add_versions(to_runs(part_versions))
        if finish_reason is not None:
            self._add_experts(chunk)
            if finish_reason != "abort":
                self._stop_reason = finish_reason

    def _add_versions(self, versions: Runs[int]) -> None:
        """The versions of further tokens. Tokens from the first version that decreases are dropped."""
        done = self._versions
        if done.extend_last(versions):
            return
        start = 0
        for version, end in zip(versions.values, versions.ends, strict=True):
            if done.values and version < done.values[-1]:
                newest = done.values[-1]
                self._cut(len(done))
                raise self._broken(f"continued under version {version}, after version {newest}")
            done.add(version, end - start)
            start = end

    def _add_experts(self, chunk: PartChunk) -> None:
        """Those of the last chunk of a part. They belong to the pass that generated the next token: later parts, which
        compute earlier tokens again, do not replace them."""
        if self._experts is None:
            return
        found = chunk.routed_experts
        missing = len(self._request.input_ids) + len(self._token_ids) - 1 - len(self._experts)
        if found is None and chunk.finish_reason == "abort":
            return
        if found is None or (len(found) < missing and chunk.finish_reason != "abort"):
            raise self._broken(f"sent routed experts of {0 if found is None else len(found)} of {missing} tokens")
        try:
            self._experts = RoutedExperts.joined([self._experts, found[:missing]])
        except ValueError as error:
            raise self._broken(f"sent unusable routed experts: {error}") from error

    def _all_experts(self) -> RoutedExperts | None:
        """One row for each token but the last; unknown for parts that ended without a record."""
        if self._experts is None:
            return None
        count = len(self._request.input_ids) + len(self._token_ids) - 1
        rest = RoutedExperts.unknown(self._experts.shape, count - len(self._experts))
        return RoutedExperts.joined([self._experts[:count], rest])

    def _cut(self, num_tokens: int) -> None:
        del self._token_ids[num_tokens:]
        del self._logprobs[num_tokens:]
        self._versions.cut(num_tokens)
        if self._experts is not None:
            self._experts = self._experts[: len(self._request.input_ids) + num_tokens - 1]

    def _broken(self, text: str) -> ServerUnavailable:
        return ServerUnavailable(f"{self._replicas[-1]} {text}", code="server.unreadable_answer")

    def interrupted(self) -> None:
        """The part ended early, by an abort or a failure: finish the answer if it is complete nevertheless."""
        if self._stop_reason is None and len(self._token_ids) >= self._budget:
            self._stop_reason = "length"
        gconfig = self._request.gconfig
        may_stop = self._token_ids and not gconfig.ignore_eos and len(self._token_ids) >= gconfig.min_new_tokens
        if self._stop_reason is None and may_stop and self._token_ids[-1] in gconfig.stop_token_ids:
            self._stop_reason = "stop"

    def response(self, *, latency_s: float, ttft_s: float) -> GenerationResponse:
        return GenerationResponse(
            request_id=self._request.request_id,
            input_ids=self._request.input_ids,
            output_ids=Packed(self._token_ids),
            output_logprobs=Packed(self._logprobs),
            output_versions=self._versions.column(),
            stop_reason=self._stop_reason or "interrupted",
            replicas=self._replicas,
            routed_experts=self._all_experts(),
            num_interruptions=self.num_parts - 1,
            latency_s=latency_s,
            ttft_s=ttft_s,
        )


def _check_ids(ids: Sequence[int], vocab_size: int, where: str, fix: str) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        text = f"{where} has token id {wrong}, outside of the servers' vocabulary (0 to {vocab_size - 1}): {fix}"
        raise RequestError(text, code="request.token_id")


def prior_output_bias(part: GenerationPart) -> dict[int, float]:
    """Bias of logits by token id that applies the frequency penalty of the answer's earlier parts.

    For servers that treat all of `part.input_ids` as prompt and penalise only the output of the part. The penalty is
    linear in the count and subtracted before the temperature, so this bias plus the server's own penalty equals the
    penalty of the uninterrupted answer. A repetition penalty multiplies, so the sum does not hold together with one.
    """
    penalty, num_prior = part.gconfig.frequency_penalty, part.num_prior_output_tokens
    if penalty == 0 or num_prior == 0:
        return {}
    return {token: -penalty * count for token, count in Counter(part.input_ids[-num_prior:]).items()}


def checked_reason(reason: Any) -> FinishReason | None:
    """ValueError for a finish reason that is not one of the protocol."""
    if reason not in (None, "stop", "length", "abort"):
        raise ValueError(f"finish reason {reason!r}")
    return reason


def experts_of(meta: dict[str, Any], shape: ExpertShape | None, *, item_bytes: int) -> RoutedExperts | None:
    """The routed experts in the facts of an answer: base64 of numbers of `item_bytes` bytes, 0 = those of the shape.

    None when there are none. Raises ValueError for other than whole rows of existing experts.
    """
    text = meta.get("routed_experts")
    if shape is None or text is None:
        return None
    data = base64.b64decode(text, validate=True)
    if item_bytes not in (0, shape.item_bytes):
        numbers = np.frombuffer(data, f"<i{item_bytes}")
        if numbers.size and int(numbers.max()) >= shape.experts:
            raise ValueError(f"a routed expert has number {numbers.max()}, the model has {shape.experts}")
        data = numbers.astype("u1" if shape.item_bytes == 1 else "<i2").tobytes()  # -1, unknown, sets all bits
    return RoutedExperts(shape, data)


def version_number(reported: str, *, has_dummy_weights: bool = False) -> int:
    """The policy version from a foreign server's name for its weights.

    A server that was never given a version has its first weights: version 0, or none when they are random.
    """
    if reported == "default":
        return NO_VERSION if has_dummy_weights else 0
    return int(reported)


def versions_of(spans: Sequence[tuple[int, int, int]], num_tokens: int) -> Runs[int]:
    """Spans (version, start, end) of a chunk -> one version per token. ValueError unless they cover the chunk."""
    if len(spans) == 1 and spans[0][1] == 0 and spans[0][2] == num_tokens:  # nearly all chunks
        return Runs.of(spans[0][0], num_tokens)
    place = 0
    for _, start, end in spans:
        if start != place or end < start:
            raise ValueError(f"version spans {spans} have a gap or overlap")
        place = end
    if place != num_tokens:
        raise ValueError(f"version spans {spans} cover {place} of {num_tokens} tokens")
    return Runs((version, end - start) for version, start, end in spans)
