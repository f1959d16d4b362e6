"""The reward of each turn from those of the session: discounted sums of what follows. Pure."""

from collections.abc import Mapping, Sequence


def turn_values(
    turns: Sequence[str], reward: float, rewards: Mapping[str, float], *, discount: float
) -> dict[str, float]:
    """Turn id -> its own reward plus, with `discount` per later turn, those of the later turns.

    `turns`: in order. `reward`: of the whole session; it belongs to the last turn.
    """
    values: dict[str, float] = {}
    following = reward
    for index, turn_id in enumerate(reversed(turns)):
        following = rewards.get(turn_id, 0.0) + (following if index == 0 else discount * following)
        values[turn_id] = following
    return values
