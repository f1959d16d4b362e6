"""Owns the rules by which an answer made in parts, on several replicas or under several versions, is one answer.

Pure: no clock, no network. Token limits concern the whole answer: each part gets exactly what is left. An answer never
goes on under an older policy than made its newest token.
"""

from __future__ import annotations

from collections import Counter

from areal.api.config.inference import GenerationHyperparameters
from areal.api.data import GenerationRequest, GenerationResponse, StopReason
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.replica import GenerationPart, PartChunk


def token_budget(gconfig: GenerationHyperparameters, num_prompt_tokens: int) -> int:
    """Most tokens the whole answer may have. RequestError when the prompt leaves no room."""
    if num_prompt_tokens == 0:
        raise RequestError("the prompt is empty: a request needs at least one token id")
    budget = min(gconfig.max_new_tokens, gconfig.max_tokens - num_prompt_tokens)
    if budget <= 0:
        raise RequestError(
            f"a prompt of {num_prompt_tokens} tokens leaves no room for an answer under "
            f"gconfig.max_tokens={gconfig.max_tokens}: raise it or shorten the prompt"
        )
    return budget


class Answer:
    """One answer while it is made: the tokens so far and what to ask for next."""

    def __init__(self, request: GenerationRequest, *, stream_interval: int) -> None:
        self._request = request
        self._stream_interval = stream_interval
        self._budget = token_budget(request.gconfig, len(request.input_ids))
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._replicas: list[str] = []
        self._num_parts = 0
        self._part_start = 0
        """Tokens that there were when the current part began."""
        self._stop_reason: StopReason | None = None

    @property
    def finished(self) -> bool:
        return self._stop_reason is not None

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_parts(self) -> int:
        """Asked for so far."""
        return self._num_parts

    @property
    def newest_version(self) -> int | None:
        """The policy that made the newest token, None before the first."""
        return self._versions[-1] if self._versions else None

    def next_part(self, replica_name: str) -> GenerationPart:
        """What `replica_name` is asked for now."""
        request, done = self._request, len(self._token_ids)
        if not self._replicas or self._replicas[-1] != replica_name:
            self._replicas.append(replica_name)
        self._num_parts += 1
        self._part_start = done
        return GenerationPart(
            part_id=f"{request.request_id}-{self._num_parts % 1000:03d}",
            input_ids=request.input_ids + self._token_ids if done else request.input_ids,
            num_prior_output_tokens=done,
            max_new_tokens=self._budget - done,
            min_new_tokens=min(max(request.gconfig.min_new_tokens - done, 0), self._budget - done),
            gconfig=request.gconfig,
            adapter=request.adapter,
            group_id=request.group_id,
            seed=request.seed,
            stream_interval=self._stream_interval,
        )

    def add(self, chunk: PartChunk) -> None:
        """Take in tokens of the current part. ServerUnavailable when the replica broke the protocol, or went back to an
        older policy: tokens from there on are not taken in."""
        count = len(chunk.token_ids)
        if len(chunk.logprobs) != count or len(chunk.versions) != count:
            raise ServerUnavailable(
                f"{self._replicas[-1]} sent {count} tokens with {len(chunk.logprobs)} log-probabilities "
                f"and {len(chunk.versions)} versions"
            )
        if len(self._token_ids) + count > self._budget:
            raise ServerUnavailable(f"{self._replicas[-1]} sent more tokens than it was asked for")
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        first, versions = len(self._versions), chunk.versions
        if chunk.part_versions is not None:
            first, versions = self._part_start, self._told_at_the_end(chunk.part_versions)
        self._take_versions(first, versions)
        if chunk.finish_reason in ("stop", "length"):
            self._stop_reason = chunk.finish_reason

    def _told_at_the_end(self, versions: list[int]) -> list[int]:
        """What the server tells of the whole part, checked. Where it cannot be right, none of the part can be used."""
        count = len(self._token_ids) - self._part_start
        if len(versions) != count:
            self._cut(self._part_start)
            raise ServerUnavailable(f"{self._replicas[-1]} told {len(versions)} versions of a part of {count} tokens")
        return versions

    def _take_versions(self, first: int, versions: list[int]) -> None:
        """Let these be the versions of the tokens from `first` on; tokens from where they fall are dropped."""
        del self._versions[first:]
        rising = _num_rising(versions, self.newest_version)
        self._versions += versions[:rising]
        if rising < len(versions):
            self._cut(first + rising)
            raise ServerUnavailable(
                f"{self._replicas[-1]} went on under policy version {versions[rising]}, which is older than "
                f"{self.newest_version}, which made the tokens before"
            )

    def _cut(self, num_tokens: int) -> None:
        del self._token_ids[num_tokens:]
        del self._logprobs[num_tokens:]
        del self._versions[num_tokens:]

    def interrupted(self) -> None:
        """The part ended early, by an abort or a failure: settle whether the answer was complete all the same."""
        if self._stop_reason is None and len(self._token_ids) >= self._budget:
            self._stop_reason = "length"
        if self._stop_reason is None and self._ends_with_stop_token():
            self._stop_reason = "stop"

    def _ends_with_stop_token(self) -> bool:
        gconfig = self._request.gconfig
        if not self._token_ids or gconfig.ignore_eos or len(self._token_ids) < gconfig.min_new_tokens:
            return False
        return self._token_ids[-1] in gconfig.stop_token_ids

    def response(self, *, latency_s: float, ttft_s: float) -> GenerationResponse:
        """The finished answer."""
        return GenerationResponse(
            request_id=self._request.request_id,
            input_ids=self._request.input_ids,
            output_ids=self._token_ids,
            output_logprobs=self._logprobs,
            output_versions=self._versions,
            stop_reason=self._stop_reason or "interrupted",
            replicas=self._replicas,
            num_interruptions=self._num_parts - 1,
            latency_s=latency_s,
            ttft_s=ttft_s,
        )


def prior_output_bias(part: GenerationPart) -> dict[int, float]:
    """What to add to logits so that the frequency penalty counts the answer's earlier parts, by token id.

    For servers that take all of `part.input_ids` for prompt and penalise only the output they make: the penalty is
    linear in the count and taken off before the temperature, so this bias and the server's own penalty add up to that
    of the unbroken answer. A repetition penalty multiplies, so beside one it would not.
    """
    penalty, num_prior = part.gconfig.frequency_penalty, part.num_prior_output_tokens
    if penalty == 0 or num_prior == 0:
        return {}
    return {token: -penalty * count for token, count in Counter(part.input_ids[-num_prior:]).items()}


def _num_rising(versions: list[int], floor: int | None) -> int:
    """How many of the first versions do not fall, starting from `floor`."""
    if versions and (floor is None or versions[0] >= floor) and versions.count(versions[0]) == len(versions):
        return len(versions)  # nearly always
    for index, version in enumerate(versions):
        if floor is not None and version < floor:
            return index
        floor = version
    return len(versions)


def versions_of(spans: list[tuple[int, int, int]], num_tokens: int) -> list[int]:
    """Spans (version, start, end) over a chunk's tokens -> one version per token. ValueError unless they cover it."""
    if len(spans) == 1 and spans[0][1] == 0 and spans[0][2] == num_tokens:
        return [spans[0][0]] * num_tokens
    versions: list[int] = []
    for version, start, end in spans:
        if start != len(versions) or end < start:
            raise ValueError(f"version spans {spans} have a gap or overlap")
        versions += [version] * (end - start)
    if len(versions) != num_tokens:
        raise ValueError(f"version spans {spans} cover {len(versions)} of {num_tokens} tokens")
    return versions
