"""Owns the frozen reference policy's role: log-probabilities that the KL penalty is measured against."""

from __future__ import annotations

from dataclasses import replace

from areal.api.batch import TrainBatch
from areal.api.engine import TrainEngine


class Reference:
    """A policy that is never trained, on all trainer ranks."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine

    def with_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add the reference's log-probabilities; a collective."""
        logprobs = self._engine.forward(batch).logprobs
        if logprobs is None:
            raise ValueError("the reference's engine gave no log-probabilities: it was built as a critic")
        return replace(batch, ref_logprobs=logprobs)
