"""Which reward functions score a row, with which weights and metric names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.api.config import RewardConfig
from areal.api.config.rollout import selection_problems, short_names
from areal.api.config.schema import below
from areal.api.errors import ConfigError, InputError
from areal.api.registry import FunctionRef, function_ref, resolve_function
from areal.api.workflow import RewardFn


def resolve_reward_fn(reward_fn: RewardFn | str, *, key: str = "reward_fn") -> FunctionRef:
    """The reference of a reward given as a function, a registered name, module:function or file.py:function.

    `key` is the option to name in errors.
    """
    if isinstance(reward_fn, str):
        return resolve_function(reward_fn, "rewards", key=key)
    return function_ref(reward_fn)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    function: FunctionRef
    weight: float
    metric: str  # Its name in the metrics.
    counts_for_filter: bool  # Whether it is part of the reward that rollout.should_accept_fn gets.


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTable:
    default: tuple[WeightedReward, ...]
    """Functions for rows whose source `by_source` does not name; empty = such a row is an error."""
    by_source: Mapping[str, tuple[WeightedReward, ...]]
    source_key: str
    is_weighted: bool  # False in the short form: one function of weight 1, whose score is the reward.

    def source(self, row: Mapping[str, Any]) -> str:
        """The source of a row; empty when there is no `by_source`. InputError when the row names none."""
        if not self.by_source:
            return ""
        if self.source_key not in row:
            raise InputError(
                f"a row has no column {self.source_key!r} (reward.source_key), only {sorted(row)}: add it in the "
                "dataset's map_fn, or correct reward.source_key",
                code="reward.unknown_source",
            )
        if row[self.source_key] is None:
            raise InputError(
                f"a row's {self.source_key} is null: name a source in the dataset's map_fn",
                code="reward.unknown_source",
            )
        return str(row[self.source_key])

    def of(self, row: Mapping[str, Any]) -> tuple[WeightedReward, ...]:
        """The functions that score answers to `row`. InputError when its source has none."""
        result = self.by_source.get(self.source(row), self.default) if self.by_source else self.default
        if not result:
            raise InputError(
                f"a row's {self.source_key} is {row[self.source_key]!r}, which reward.by_source does not contain "
                f"({', '.join(self.by_source)}): add it there, or set reward.fns for all other sources",
                code="reward.unknown_source",
            )
        return result


def reward_table(reward_fn: RewardFn | str, config: RewardConfig) -> RewardTable:
    """The table of `reward_fn` (empty = not given) and the reward section. ConfigError when they are inconsistent."""
    default = resolve_reward_fn(reward_fn) if reward_fn else None
    short_form = "" if default is None else reward_fn if isinstance(reward_fn, str) else str(default)
    for path, text, *_ in [*below("reward", config.problems()), *selection_problems(config, short_form=short_form)]:
        raise ConfigError(f"{path}: {text}", code="reward.bad_section")
    if default is None and not config.names_functions:
        raise ConfigError(
            "reward_fn and reward.fns are empty: name a reward function, e.g. gsm8k", code="reward.none_given"
        )
    names = short_names({short_form, *config.fns, *(name for fns in config.by_source.values() for name in fns)} - {""})

    def terms(fns: Mapping[str, float], key: str) -> tuple[WeightedReward, ...]:
        return tuple(
            WeightedReward(
                function=default if default is not None and name == short_form else resolve_reward_fn(name, key=key),
                weight=weight,
                metric=names[name],
                counts_for_filter=not config.filter_on or name in config.filter_on,
            )
            for name, weight in fns.items()
        )

    return RewardTable(
        default=terms({short_form: 1.0} if short_form else config.fns, "reward.fns"),
        by_source={source: terms(fns, f"reward.by_source.{source}") for source, fns in config.by_source.items()},
        source_key=config.source_key,
        is_weighted=config.names_functions,
    )
