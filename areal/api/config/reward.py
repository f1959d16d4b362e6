"""Owns the options of rewards: which functions score an answer, with which weights, and the pool that runs them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from areal.api.config.fields import Problems, choice, number

SOURCE_KEY = "data_source"
MATH_NEEDS_S = 11.0
"""Seconds that the reward `math` may take for an answer that is hard to compare, and 1 to start on it."""
CODE_TESTS_S, CODE_STARTS_S = 10.0, 5.0
"""Seconds that the reward `code` gives all tests unless a row says otherwise, and that starting them may take."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What scores an answer: the sum of weighted functions, by the source of a row, run in a pool of processes."""

    fns: dict[str, float] = field(default_factory=dict[str, float])
    """Reward functions and their weights, e.g. {gsm8k: 1.0, format: 0.1}; the reward is the sum; {} = reward_fn."""
    by_source: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Functions and weights for rows of one source, by the name of the source; rows of other sources take fns."""
    source_key: str = SOURCE_KEY
    """Column of a row that names its source; read with by_source only."""
    filter_on: list[str] = field(default_factory=list[str])
    """Functions whose weighted sum rollout.should_accept_fn looks at, named as in fns; [] = the whole reward."""
    workers: int | None = number(None, low=1)
    """Worker processes; null = half of the cores, at least one."""
    timeout_s: float = number(15.0, above=0)
    """Seconds one call may take; its process is then killed and replaced."""
    on_error: str = choice("fail", "fail", "zero")
    """A call that raised, timed out or is not finite: fail = the episode fails, zero = it counts 0 in the sum."""

    def problems(self) -> Problems:
        for path, fns in self.tables():
            yield from _weight_problems(path, fns)
        if not self.source_key:
            yield "source_key", f"is empty: name the column that holds the source, for example {SOURCE_KEY}"
        elif self.source_key != SOURCE_KEY and not self.by_source:
            yield "source_key", f"is {self.source_key}, but by_source is empty, so nothing reads it: remove it"

    def tables(self) -> Iterator[tuple[str, dict[str, float]]]:
        """(key, functions and weights) of every set of functions that is given."""
        if self.fns:
            yield "fns", self.fns
        for source, fns in self.by_source.items():
            yield f"by_source.{source}", fns

    @property
    def names_functions(self) -> bool:
        """Whether fns or by_source say what scores an answer."""
        return bool(self.fns or self.by_source)


def _weight_problems(path: str, fns: Mapping[str, float]) -> Problems:
    if not fns:
        yield path, "names no function: give at least one, for example {exact: 1.0}"
    for name, weight in fns.items():
        if not math.isfinite(weight):
            yield f"{path}.{name}", f"the weight {weight} is not a finite number"
    if fns and not any(fns.values()):
        yield path, "gives every function the weight 0, so every reward would be 0: raise one"


def selection_problems(config: RewardConfig, *, short_form: str) -> Problems:
    """What is wrong with the choice of functions, reward_fn (`short_form`, as text; empty = not given) included.

    Paths are whole ones, from the top of the configuration.
    """
    if short_form and config.fns:
        yield "reward_fn", "and reward.fns both say what scores an answer: keep one"
    tables = dict(config.tables())
    if short_form and not config.fns:
        tables["reward_fn"] = {short_form: 1.0}
    known = {name for fns in tables.values() for name in fns}
    for name in config.filter_on:
        if name not in known:
            yield "reward.filter_on", f"{name!r} is none of the reward functions ({', '.join(known) or 'none'})"
    if config.filter_on and set(config.filter_on) <= known:
        for path, fns in tables.items():
            # A set without one of them would show the filter the same number for every answer.
            if not any(fns.get(name) for name in config.filter_on):
                where = path if path == "reward_fn" else f"reward.{path}"
                yield (
                    "reward.filter_on",
                    f"{where} gives none of {', '.join(config.filter_on)} a weight other than 0, so all answers there "
                    "would look alike to the filter: name one of its functions too",
                )
    if config.on_error == "fail" and "math" in known and config.timeout_s < MATH_NEEDS_S:
        yield (
            "reward.timeout_s",
            f"{config.timeout_s:g} s is less than the {MATH_NEEDS_S:g} s that the reward math may need, and with "
            "on_error=fail an answer that is hard to compare would then fail its episode instead of scoring 0: raise "
            "it, or set reward.on_error=zero",
        )
    yield from _name_problems(known)


def _name_problems(known: set[str]) -> Problems:
    shown: dict[str, str] = {}
    for name, short in short_names(known).items():
        if short in shown:
            yield (
                "reward.fns",
                f"{name} and {shown[short]} would both be shown as {short} in the metrics: rename one of the functions",
            )
        shown[short] = name


def short_names(names: set[str]) -> dict[str, str]:
    """The name of each function in metrics: a registered name as it is, of a path the function's own name.

    Where several share that, the last part of their module or file stands before it, with a dot.
    """
    functions = {name: name.rpartition(":")[2] for name in sorted(names)}
    taken = list(functions.values())
    return {
        name: function if taken.count(function) == 1 or ":" not in name else f"{_place(name)}.{function}"
        for name, function in functions.items()
    }


def _place(name: str) -> str:
    where = name.rpartition(":")[0]
    return PurePath(where).stem if where.endswith(".py") else where.rpartition(".")[2]
