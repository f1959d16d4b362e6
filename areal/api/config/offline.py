"""Options of training on rows, without rollouts: supervised fine-tuning, reward models, DPO."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from areal.api.config.data import misplaced_data
from areal.api.config.experiment import BaseExperimentConfig
from areal.api.config.fields import Problem, Problems, choice, number, option
from areal.api.config.loss_assembly import scale_problems
from areal.api.config.relevance import when
from areal.api.config.train import ScoreModelConfig, TrainEngineConfig, no_optimizer


@dataclass(frozen=True, kw_only=True)
class RowsExperimentConfig(BaseExperimentConfig):
    """What all trainings on rows share: there are no servers, and an evaluation is a forward pass."""

    row_type: ClassVar[str]
    """Required value of train_dataset.type and valid_dataset.type."""
    sequences_per_row: ClassVar[int] = 1
    """Sequences per row, as total_train_n_seqs counts them: 2 for pairs."""

    def problems(self) -> Problems:
        yield from super().problems()
        yield from misplaced_data(self.row_type, self.train_dataset, self.valid_dataset)

    @property
    def _wants_servers(self) -> bool | None:
        return False


@dataclass(frozen=True, kw_only=True)
class SFTOptions:
    """Which tokens of a row are trained on, and how token losses become one loss."""

    train_on: str = choice("last", "last", "assistant", "all")
    """Trained tokens: last = the last answer, assistant = every answer in `messages`, all = prompt and answers."""
    loss_aggregation: str = choice(
        "token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    )
    """How the token losses of a batch over all ranks become one number; see docs/algorithms.md."""
    loss_scale_tokens: int | None = number(None, low=1, relevant=when("loss_aggregation", "seq-mean-token-sum-norm"))
    """Divisor in tokens, required by seq-mean-token-sum-norm; null = not set."""

    def problems(self) -> Problems:
        yield from scale_problems(self.loss_aggregation, self.loss_scale_tokens)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RowsExperimentConfig):
    """Supervised fine-tuning."""

    row_type: ClassVar[str] = "sft"

    model: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """The trained model."""
    sft: SFTOptions = field(default_factory=SFTOptions)
    """Trained tokens and loss."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        return {"model": self.model}

    def problems(self) -> Problems:
        yield from super().problems()
        if self.model.optimizer is None:
            yield no_optimizer("model")


@dataclass(frozen=True, kw_only=True)
class RWOptions:
    """The loss of a reward model."""

    use_margin: bool = False
    """Require a score difference above the value in the column `margin`; false = ignore that column."""
    center_coef: float = number(0.0, low=0)
    """Coefficient of (score of chosen + score of rejected)^2, which keeps scores near 0; 0 = off."""


@dataclass(frozen=True, kw_only=True)
class RWConfig(RowsExperimentConfig):
    """A reward model, trained on pairs of a chosen and a rejected answer (Bradley-Terry)."""

    row_type: ClassVar[str] = "rw"
    sequences_per_row: ClassVar[int] = 2

    model: ScoreModelConfig = field(default_factory=ScoreModelConfig)
    """The reward model."""
    rw: RWOptions = field(default_factory=RWOptions)
    """Loss of the reward model."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        return {"model": self.model}

    def problems(self) -> Problems:
        yield from super().problems()
        yield from _cut_pairs("model", self.model)
        if self.model.optimizer is None:
            yield no_optimizer("model")


@dataclass(frozen=True, kw_only=True)
class DPOOptions:
    """The loss of direct preference optimisation."""

    loss_type: str = choice("sigmoid", "sigmoid", "ipo")
    """Loss function: sigmoid = DPO (Rafailov et al. 2023), ipo = IPO (Azar et al. 2023)."""
    beta: float = number(0.1, above=0)
    """Strength of the constraint to the reference: a higher value keeps the policy closer."""
    label_smoothing: float = number(0.0, low=0, below=0.5, relevant=when("loss_type", "sigmoid"))
    """Assumed fraction of pairs with swapped labels (conservative DPO)."""
    logp_reduction: str = choice("sum", "sum", "mean")
    """Log-probability of an answer: sum over its tokens (both papers) or mean (IPO in AReaL and TRL)."""
    nll_coef: float = number(0.0, low=0)
    """Coefficient of -log p per token of the chosen answer, added to the loss of its pair; 0 = off."""
    reference_free: bool = False
    """Use a uniform reference, whose log-probabilities cancel, instead of the model in `ref`."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig(RowsExperimentConfig):
    """A policy, trained on pairs of a chosen and a rejected answer relative to a frozen reference."""

    row_type: ClassVar[str] = "rw"
    sequences_per_row: ClassVar[int] = 2

    actor: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """The policy."""
    ref: TrainEngineConfig | None = option(None, relevant=when("dpo.reference_free", False))
    """The frozen reference, usually with path: ${actor.path}; null only with dpo.reference_free=true."""
    dpo: DPOOptions = field(default_factory=DPOOptions)
    """The loss."""

    @property
    def models(self) -> dict[str, TrainEngineConfig]:
        return {"actor": self.actor} if self.ref is None else {"actor": self.actor, "ref": self.ref}

    def problems(self) -> Problems:
        yield from super().problems()
        yield from _cut_pairs("actor", self.actor)
        if self.actor.optimizer is None:
            yield no_optimizer("actor")
        if self.dpo.reference_free:
            return
        if self.ref is None:
            text = "is null: set ref.path=${actor.path}, or dpo.reference_free=true"
            yield Problem("ref", text, "config.missing_requirement")
            return
        if self.ref.optimizer is not None:
            yield "ref.optimizer", "is set, but a reference is never trained: set it to null"
        if not math.isclose(self.ref.temperature, self.actor.temperature):
            text = f"{self.ref.temperature} differs from actor.temperature={self.actor.temperature}: make them equal"
            yield "ref.temperature", text
        yield from _cut_pairs("ref", self.ref)


def _cut_pairs(path: str, model: TrainEngineConfig) -> Problems:
    if model.mb_spec.granularity not in (1, 2):
        yield f"{path}.mb_spec.granularity", "is always 2 here, because a pair is never split: remove it"
