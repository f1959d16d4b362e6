"""A workflow for benchmarks: random prompts, answers of given lengths, and random rewards. It needs no dataset."""

import random
from dataclasses import replace
from typing import Any
from uuid import uuid4

from areal.api.columns import packed_ids
from areal.api.config import GenerationHyperparameters
from areal.api.config.experiment import LengthRule
from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.workflow import RolloutWorkflow
from areal.data.tokenizer import Tokenizer
from areal.workflow.scoring import group_stats, new_request, single_turn_rows

_TEXT = "0123456789abcdefghijklmnopqrstuvwxyz"


class SyntheticWorkflow(RolloutWorkflow):
    """Generates `gconfig.n_samples` answers to a random prompt, each exactly as long as `length` draws.

    Prompt, lengths and rewards (0 or 1) depend on the column `index` of the row only, so that runs are comparable.
    """

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Tokenizer, *, length: str, prompt_length: int):
        """`length`: see LengthRule."""
        self._rule = LengthRule.parse(length)
        self._prompt_length = prompt_length
        self._num_samples = gconfig.n_samples
        self._settings = replace(gconfig, n_samples=1, ignore_eos=True, stop=[], stop_token_ids=[], min_new_tokens=0)
        self._alphabet = sorted({*tokenizer.encode(_TEXT, add_special_tokens=False)})

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        rng = random.Random(data["index"])
        prompt_ids = packed_ids(rng.choices(self._alphabet, k=self._prompt_length))
        lengths = [self._rule.draw(rng) for _ in range(self._num_samples)]
        group_id = uuid4().hex
        settings = [replace(self._settings, max_new_tokens=length) for length in lengths]
        responses = await engine.agenerate_group(
            [
                new_request(prompt_ids, setting, group_id=group_id, number=number)
                for number, setting in enumerate(settings)
            ]
        )
        rewards = [float(rng.randrange(2)) for _ in responses]
        trajectories = single_turn_rows(prompt_ids, responses, rewards)
        return TrajectoryGroup(trajectories=trajectories, stats=group_stats(trajectories, num_errors=0))
