"""Owns the records that cross process and package borders before tensors exist: frozen, of lists and numbers.

Alignment: every per-token list of a record is *token aligned*: entry t speaks about token t itself.
The shift to next-token alignment happens once, in `areal.data.pack`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from areal.api.config.inference import GenerationHyperparameters

StopReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion of one prompt. `gconfig.n_samples` is ignored by engines: one request, one answer."""

    request_id: str
    """Unique, of fixed length (servers may match ids by prefix)."""
    input_ids: list[int]
    """Prompt token ids, at least one."""
    gconfig: GenerationHyperparameters
    """Sampling settings of this request."""
    group_id: str = ""
    """Requests with equal non-empty group ids share a prompt or a conversation: they stay on one replica."""
    seed: int | None = None
    """Sampling seed; None lets the server draw one."""
    adapter: str = ""
    """Versioned name of the LoRA adapter to generate with; empty = the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResponse:
    """What one request produced. The three output lists have equal length."""

    request_id: str
    input_ids: list[int]
    output_ids: list[int]
    """Generated ids, a stop token included when one was generated."""
    output_logprobs: list[float]
    """log_softmax(logits / T) of each chosen token."""
    output_versions: list[int]
    """Policy version that made each token, as told by the server."""
    stop_reason: StopReason
    replicas: list[str] = field(default_factory=list[str])
    """Names of the replicas that worked on it, in order; more than one after an interruption or a death."""
    num_interruptions: int = 0
    latency_s: float = 0.0
    ttft_s: float = 0.0
    """Seconds to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished sequence with its reward: prompt, answers and, in dialogues, later turns. Lists of length T."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 on tokens the policy generated and may learn from, else 0."""
    rollout_logprobs: list[float]
    """Log-probability under the policy that generated the token; 0.0 where loss_mask is 0."""
    output_versions: list[int]
    """Policy version that generated the token; -1 where none did."""
    reward: float
    finished: bool
    """False when a length limit cut the last answer."""
    baseline: float | None = None
    """Reward of a greedy answer to the same prompt, which nobody is trained on (ReMax); None = none was drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """What one episode yields: the trajectories of one prompt, compared with each other by group baselines."""

    trajectories: list[Trajectory]
    stats: dict[str, float] = field(default_factory=dict[str, float])
    """Scalars for the metrics, averaged over episodes (for example {"num_turns": 2.0})."""
    filter_rewards: list[float] = field(default_factory=list[float])
    """What filters such as mixed_rewards look at, one number a trajectory; empty = the rewards. Not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """One data-parallel rank's share of train batch `step`, flat. S sequences, T tokens in all; token aligned."""

    step: int
    version: int
    """Policy version the trainer holds when it consumes this batch."""
    token_ids: np.ndarray  # [T] int32
    lengths: np.ndarray  # [S] int32, sums to T
    loss_mask: np.ndarray  # [T] uint8
    rollout_logprobs: np.ndarray  # [T] float32
    output_versions: np.ndarray  # [T] int32, -1 where not generated
    rewards: np.ndarray  # [S] float32
    group_index: np.ndarray  # [S] int32, equal within a group, unique over the whole batch (all ranks)
    finished: np.ndarray  # [S] uint8
    baselines: np.ndarray  # [S] float32, NaN where no greedy answer was drawn
    stats: dict[str, float] = field(default_factory=dict[str, float])
    """Statistics of the whole batch (queue, staleness, episode stats), the same on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """Where training stands. `step` counts train steps from 0 over the whole run."""

    step: int
    epoch: int
    epoch_step: int
    steps_per_epoch: int
    total_steps: int

    @property
    def is_epoch_end(self) -> bool:
        return self.epoch_step == self.steps_per_epoch - 1

    @property
    def is_last(self) -> bool:
        return self.step == self.total_steps - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """Name, shape and dtype of one full (unsharded) weight under its Hugging Face name."""

    name: str
    shape: list[int]
    dtype: str
    """torch dtype name without the prefix, for example "bfloat16"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """What a trainer asks of the fleet: hold policy `version`, fetched in the way `kind` says."""

    version: int
    kind: Literal["disk", "collective"]
    path: str = ""
    """disk: the complete, versioned checkpoint folder."""
    master_address: str = ""
    """collective: host of the trainer's store (rank 0 of the update group)."""
    master_port: int = 0
    backend: str = ""
    """collective: "nccl" or "gloo"."""
    buckets: list[list[WeightSpec]] = field(default_factory=list[list[WeightSpec]])
    """collective: the broadcasts in order; each bucket is one flat uint8 tensor of its weights, concatenated."""
    group_name: str = ""
    """collective: name of the update group; a new name asks every replica to join a new group first."""
    replicas: list[str] = field(default_factory=list[str])
    """collective: the replicas of the group as the fleet calls them, in order: the ranks of replica i start at
    1 + i * ranks_per_replica."""
    ranks_per_replica: int = 1
    """collective: ranks that one replica takes, its tensor-parallel size."""

    @property
    def world_size(self) -> int:
        """Ranks of the update group: the trainer's and those of all replicas."""
        return 1 + len(self.replicas) * self.ranks_per_replica
