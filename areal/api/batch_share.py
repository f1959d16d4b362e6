"""The record that the rollout controller sends each trainer rank. In a separate module because it needs numpy."""

from dataclasses import dataclass, field

import numpy as np

from areal.api.images import ImageRef


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """One data-parallel rank's share of train batch `step`, flat: S sequences, T tokens, token aligned."""

    step: int
    version: int
    """Policy version of the trainer when it consumes this batch."""
    token_ids: np.ndarray  # [T] int32
    lengths: np.ndarray  # [S] int32, sums to T
    loss_mask: np.ndarray  # [T] uint8
    rollout_logprobs: np.ndarray  # [T] float32
    output_versions: np.ndarray  # [T] int32, -1 where not generated
    rewards: np.ndarray  # [S] float32
    group_index: np.ndarray  # [S] int32, equal within a group, unique over the whole batch (all ranks)
    finished: np.ndarray  # [S] uint8
    baselines: np.ndarray  # [S] float32, NaN if there is no greedy answer
    reward_parts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """[S, K] float32, scores of the functions `reward_names`, NaN where one did not score; [0, 0] = none recorded."""
    reward_names: list[str] = field(default_factory=list[str])
    """K names, equal on all ranks."""
    sessions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """[S] int32, equal within a session, unique over the share; [0] = each sequence is a session, and no turns."""
    turns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """[T] int32, number of the answer of a trained token in its session, in order of time."""
    turn_rewards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """[T] float32, reward of a trained token's turn and those after it; [0] = all have the reward of the session."""
    temperatures: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """[T] float32, temperature of each generated token, NaN = that of the run; [0] = that of the run for all."""
    routed_experts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), np.int16))
    """[T, layers, k] int16, experts that the servers chose for each token, -1 = not recorded; [0, 0, 0] = none."""
    images: list[tuple[ImageRef, ...]] = field(default_factory=list[tuple[ImageRef, ...]])
    """S tuples, the images of each sequence in order; empty = no sequence has any."""
    stats: dict[str, float] = field(default_factory=dict[str, float])
    """Statistics of the whole batch (queue, staleness, episodes), equal on every rank."""
