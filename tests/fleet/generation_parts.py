"""Makes the requests that clients of servers get, and collects what they return."""

from __future__ import annotations

import dataclasses
from typing import Any

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.api.errors import ArealError
from areal.fleet.replica import AnswerForm, PartChunk, Replica

PROMPT = [1000, 1001, 1002, 1003]
FORM = AnswerForm(stream_interval=2)


def a_part(num_tokens: int = 6, **changes: Any) -> GenerationRequest:
    ours = {key: changes.pop(key) for key in list(changes) if key in GenerationRequest.__dataclass_fields__}
    gconfig = GenerationHyperparameters(max_new_tokens=num_tokens, **changes)
    part = GenerationRequest(request_id="r-001", input_ids=PROMPT, gconfig=gconfig, seed=7)
    return dataclasses.replace(part, **ours)


class Chunks(list[PartChunk]):
    """The chunks of one answer."""

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self for token in chunk.token_ids]

    @property
    def versions(self) -> list[int]:
        return [version for chunk in self for version in chunk.versions]

    async def collect(self, replica: Replica, request: GenerationRequest, interval: int | None = None) -> Chunks:
        """Add the chunks of an answer. `interval`: the client streams that many tokens per chunk from now on."""
        if interval is not None:
            replica.form = AnswerForm(stream_interval=interval)  # pyright: ignore[reportAttributeAccessIssue]
        async for _, chunk in replica.generate([request]):
            if isinstance(chunk, ArealError):
                raise chunk
            self.append(chunk)
        return self
