"""Filters that decide after scoring whether a group is trained on."""

from areal.api.data import TrajectoryGroup
from areal.api.registry import ACCEPT_CALL, load_function, resolve_function
from areal.api.workflow import AcceptFn


def mixed_rewards(group: TrajectoryGroup) -> bool:
    """False when all answers have the same score: the advantages within such a group are zero.

    The scores are the rewards, or their part from the functions in reward.filter_on.
    """
    rewards = group.filter_rewards or [trajectory.reward for trajectory in group.trajectories]
    return min(rewards) < max(rewards)


def resolve_accept_fn(name: str) -> AcceptFn | None:
    """The filter of rollout.should_accept_fn, a registered name or the path of a function; None when empty."""
    if not name:
        return None
    return load_function(resolve_function(name, "filters", key="rollout.should_accept_fn"), ACCEPT_CALL)
