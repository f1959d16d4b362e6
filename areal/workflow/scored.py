"""The base of the built-in workflows: a prompt from the row, sampling settings, and one shared scorer."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.api.workflow import RewardFn, RolloutWorkflow
from areal.data.chat import EncodedPrompt
from areal.data.row_check import require_prompts
from areal.data.tokenizer import Tokenizer
from areal.workflow.sampling import request_settings, settings_for_length, settings_of_row
from areal.workflow.scoring import Scorer


class ScoredWorkflow(RolloutWorkflow):
    """A workflow that scores its answers with reward functions.

    `reward_fn` is a top-level function, a registered name, module:function or file.py:function; empty = the functions
    in `reward`.
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        *,
        reward: RewardConfig | None = None,
        enable_thinking: bool = False,
    ) -> None:
        self._scorer = Scorer(reward_fn, reward or RewardConfig())
        self._owns_scorer = True
        self._num_samples = gconfig.n_samples
        self._settings = request_settings(gconfig, tokenizer)
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking

    @abstractmethod
    def prompt(self, row: dict[str, Any]) -> EncodedPrompt:
        """The prompt of a row."""

    def check_row(self, row: dict[str, Any]) -> None:
        """InputError when `row` has no prompt, no room for an answer, or no reward function."""
        self._scorer.check_row(row)
        settings_for_length(settings_of_row(self._settings, row), len(self.prompt(row).token_ids), list(row))

    def check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """InputError when the first row cannot be run, or any row has no usable prompt or no reward function."""
        require_prompts(rows)
        self._scorer.check_rows(rows)
        super().check_rows(rows)

    def for_evaluation(self, gconfig: GenerationHyperparameters) -> Self:
        """The same workflow with other sampling settings and one sample per prompt. It shares the scorer."""
        clone = copy.copy(self)
        clone._owns_scorer = False
        clone._num_samples = 1
        clone._settings = request_settings(gconfig, self.tokenizer)
        return clone

    async def aclose(self) -> None:
        """Stop the reward pool, unless this workflow was made by `for_evaluation`."""
        if self._owns_scorer:
            await self._scorer.aclose()
