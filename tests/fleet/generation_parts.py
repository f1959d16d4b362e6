"""Makes the parts of answers that adapters are asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

from areal.api.config.rollout import GenerationHyperparameters
from areal.fleet.replica import GenerationPart

PROMPT = [1000, 1001, 1002, 1003]


def a_part(num_tokens: int = 6, **changes: Any) -> GenerationPart:
    own = {key: changes.pop(key) for key in list(changes) if key in GenerationPart.__dataclass_fields__}
    gconfig = GenerationHyperparameters(max_new_tokens=num_tokens, **changes)
    part = GenerationPart(
        part_id="r-001",
        input_ids=PROMPT,
        num_prior_output_tokens=0,
        max_new_tokens=num_tokens,
        min_new_tokens=gconfig.min_new_tokens,
        gconfig=gconfig,
        adapter="",
        group_id="",
        seed=7,
        stream_interval=2,
    )
    return dataclasses.replace(part, **own)
