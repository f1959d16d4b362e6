"""Owns the options of training on rows, without rollouts: supervised fine-tuning, reward models, DPO."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from areal.api.config.data import misplaced_data
from areal.api.config.experiment import BaseExperimentConfig
from areal.api.config.fields import Problems, choice, number
from areal.api.config.train import ScoreModelConfig, TrainEngineConfig


@dataclass(frozen=True, kw_only=True)
class RowsExperimentConfig(BaseExperimentConfig):
    """What the trainings on rows share: there are no servers, and an evaluation is a forward pass."""

    row_type: ClassVar[str]
    """What train_dataset.type and valid_dataset.type must be."""
    sequences_per_row: ClassVar[int] = 1
    """Sequences that total_train_n_seqs counts for a row: 2 for pairs."""

    def problems(self) -> Problems:
        yield from super().problems()
        yield from misplaced_data(self.row_type, self.train_dataset, self.valid_dataset)
        if self.evaluator.stop_at or self.evaluator.modes != ["sampled"]:
            yield (
                "evaluator",
                "has modes or stop_at, but this training generates nothing, it evaluates the loss: remove them",
            )

    @property
    def _wants_servers(self) -> bool | None:
        return False


@dataclass(frozen=True, kw_only=True)
class SFTOptions:
    """What is learned from a row of supervised fine-tuning, and how token losses become one loss."""

    train_on: str = choice("last", "last", "assistant", "all")
    """Learned tokens: last = the last answer, assistant = every answer of `messages`, all = the prompt as well."""
    loss_aggregation: str = choice(
        "token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    )
    """How the token losses of a batch, on all ranks, become one number; docs/algorithms.md has the formulas."""
    loss_scale_tokens: int | None = number(None, low=1)
    """Constant length that divides with seq-mean-token-sum-norm, which needs it; no other aggregation takes one."""

    def problems(self) -> Problems:
        needs = self.loss_aggregation == "seq-mean-token-sum-norm"
        if needs and self.loss_scale_tokens is None:
            yield "loss_scale_tokens", f"is null, but loss_aggregation={self.loss_aggregation} divides by it: give one"
        if not needs and self.loss_scale_tokens is not None:
            yield "loss_scale_tokens", f"has no effect with loss_aggregation={self.loss_aggregation}: remove it"


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RowsExperimentConfig):
    """Supervised fine-tuning."""

    row_type: ClassVar[str] = "sft"

    model: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """The trained model."""
    sft: SFTOptions = field(default_factory=SFTOptions)
    """What is learned from a row."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        return {"model": self.model}

    def problems(self) -> Problems:
        yield from super().problems()
        if self.model.optimizer is None:
            yield "model.optimizer", "is null: the model would never learn; give at least {lr: 1e-5}"


@dataclass(frozen=True, kw_only=True)
class RWOptions:
    """The loss of a reward model."""

    use_margin: bool = False
    """Ask for a score difference above the pair's number in the column `margin`; false = that column is not read."""
    center_coef: float = number(0.0, low=0)
    """Weight of (score of chosen + score of rejected) squared, which keeps scores around 0; 0 = off."""


@dataclass(frozen=True, kw_only=True)
class RWConfig(RowsExperimentConfig):
    """A reward model, from pairs of answers of which one was preferred (Bradley-Terry)."""

    row_type: ClassVar[str] = "rw"
    sequences_per_row: ClassVar[int] = 2

    model: ScoreModelConfig = field(default_factory=ScoreModelConfig)
    """The reward model."""
    rw: RWOptions = field(default_factory=RWOptions)
    """Its loss."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        return {"model": self.model}

    def problems(self) -> Problems:
        yield from super().problems()
        yield from _cut_pairs("model", self.model)
        if self.model.optimizer is None:
            yield "model.optimizer", "is null: the model would never learn; give at least {lr: 1e-5}"


@dataclass(frozen=True, kw_only=True)
class DPOOptions:
    """The loss of direct preference optimisation."""

    loss_type: str = choice("sigmoid", "sigmoid", "ipo")
    """sigmoid = DPO (Rafailov et al. 2023), ipo = IPO (Azar et al. 2023)."""
    beta: float = number(0.1, above=0)
    """How strongly the policy is held to the reference: higher = closer."""
    label_smoothing: float = number(0.0, low=0, below=0.5)
    """Share of the pairs believed to be labelled the wrong way round (conservative DPO); sigmoid only."""
    logp_reduction: str = choice("sum", "sum", "mean")
    """Log-probability of an answer: sum over its tokens, as in both papers, or mean (IPO of AReaL and TRL)."""
    nll_coef: float = number(0.0, low=0)
    """Weight of -log p per token of the chosen answer, added to the loss of its pair; 0 = off."""
    reference_free: bool = False
    """Take a uniform reference, whose log-probabilities cancel, in place of the model in `ref`, which is then null."""

    def problems(self) -> Problems:
        if self.label_smoothing > 0 and self.loss_type != "sigmoid":
            yield "label_smoothing", f"has no effect with loss_type={self.loss_type}: remove it, or use sigmoid"


@dataclass(frozen=True, kw_only=True)
class DPOConfig(RowsExperimentConfig):
    """A policy, from pairs of answers of which one was preferred, held to a frozen reference."""

    row_type: ClassVar[str] = "rw"
    sequences_per_row: ClassVar[int] = 2

    actor: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """The policy."""
    ref: TrainEngineConfig | None = None
    """The frozen reference, usually path: ${actor.path}; null only with dpo.reference_free."""
    dpo: DPOOptions = field(default_factory=DPOOptions)
    """The loss."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        return {"actor": self.actor} if self.ref is None else {"actor": self.actor, "ref": self.ref}

    def problems(self) -> Problems:
        yield from super().problems()
        yield from _cut_pairs("actor", self.actor)
        if self.actor.optimizer is None:
            yield "actor.optimizer", "is null: the policy would never learn; give at least {lr: 1e-6}"
        yield from self._reference_problems()

    def _reference_problems(self) -> Problems:
        if self.ref is None:
            if not self.dpo.reference_free:
                yield "ref", "is null: give ref.path=${actor.path}, or set dpo.reference_free=true"
            return
        if self.dpo.reference_free:
            yield "ref", "is given, but dpo.reference_free=true does without it: remove one of them"
        if self.ref.optimizer is not None:
            yield "ref.optimizer", "is set, but a reference is never trained: set it to null"
        if not math.isclose(self.ref.temperature, self.actor.temperature):
            yield (
                "ref.temperature",
                f"{self.ref.temperature} differs from actor.temperature={self.actor.temperature}: make them equal",
            )
        yield from _cut_pairs("ref", self.ref)


def _cut_pairs(path: str, model: TrainEngineConfig) -> Problems:
    if model.mb_spec.granularity not in (1, 2):
        yield f"{path}.mb_spec.granularity", "is always 2 here, since a pair is never cut: remove it"
