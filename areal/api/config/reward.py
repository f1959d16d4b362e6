"""Options of rewards: reward functions, their weights, and the process pool that runs them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from urllib.parse import urlsplit

from areal.api.config.fields import Problem, Problems, choice, number, option, section
from areal.api.config.relevance import given, when

SOURCE_KEY = "data_source"
MATH_NEEDS_S = 11.0
"""Maximum seconds of the reward `math` for one answer: 10 to compare and 1 to start."""
CODE_TESTS_S, CODE_STARTS_S = 10.0, 5.0
"""Default seconds for all tests of one answer in the reward `code`, and maximum seconds to start them."""


_REMOTE = when("backend", "remote")


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Where the reward `code` runs the programs of completions."""

    backend: str = choice("local", "local", "bubblewrap", "remote")
    """local = areal's own sandbox (x86-64); bubblewrap = the command bwrap; remote = a SandboxFusion service."""
    url: str = option("", relevant=_REMOTE, also="verl: reward.sandbox_fusion.url")
    """Address of the service, e.g. http://10.0.0.7:8080; the path /run_code is added."""
    max_requests: int = number(4, low=1, relevant=_REMOTE, also="verl: reward.sandbox_fusion.max_concurrent")
    """Maximum number of open requests of one reward worker (reward.workers)."""
    retries: int = number(3, low=0, relevant=_REMOTE)
    """Maximum number of repetitions of a request that the service did not answer or answered with an internal error."""

    def problems(self) -> Problems:
        parts = urlsplit(self.url)
        if self.backend == "remote" and not (parts.scheme in ("http", "https") and parts.hostname):
            yield Problem(
                "url", f"{self.url!r} is not an address such as http://10.0.0.7:8080", "config.missing_requirement"
            )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The reward of an answer: a weighted sum of functions, chosen by the source of the row, run in a process pool."""

    fns: dict[str, float] = section(dict[str, float], also="cosmos-rl: reward_function")
    """Reward functions and weights of their sum, e.g. {gsm8k: 1.0, format: 0.1}; {} = reward_fn."""
    by_source: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Reward functions and weights for the rows of each source; rows of other sources use fns."""
    source_key: str = option(SOURCE_KEY, relevant=given("by_source"))
    """Dataset column with the source of a row."""
    filter_on: list[str] = section(
        list[str], relevant=given("/rollout.should_accept_fn"), also="cosmos-rl: filter_reward_metric"
    )
    """Functions, named as in fns, whose weighted sum rollout.should_accept_fn uses; [] = the whole reward."""
    workers: int | None = number(None, low=1)
    """Number of worker processes; null = half of the CPU cores, at least one."""
    timeout_s: float = number(15.0, above=0)
    """Maximum seconds of one call; a worker that exceeds it is killed and replaced."""
    on_error: str = choice("fail", "fail", "zero")
    """After an exception, a time-out or a non-finite value: fail = the episode fails, zero = the value is 0."""

    sandbox: SandboxConfig = section(SandboxConfig)
    """Where the reward `code` runs the programs of completions."""

    def problems(self) -> Problems:
        for path, fns in self.tables():
            yield from _weight_problems(path, fns)
        if not self.source_key:
            text = f"is empty: set the column with the source of a row, for example {SOURCE_KEY}"
            yield Problem("source_key", text, "config.missing_requirement")

    def tables(self) -> Iterator[tuple[str, dict[str, float]]]:
        """(key, functions and weights) of every non-empty set of functions."""
        if self.fns:
            yield "fns", self.fns
        for source, fns in self.by_source.items():
            yield f"by_source.{source}", fns

    @property
    def names_functions(self) -> bool:
        """Whether fns or by_source names a reward function."""
        return bool(self.fns or self.by_source)


def _weight_problems(path: str, fns: Mapping[str, float]) -> Problems:
    if not fns:
        text = "contains no function: add at least one, for example {exact: 1.0}"
        yield Problem(path, text, "config.missing_requirement")
    for name, weight in fns.items():
        if not math.isfinite(weight):
            yield Problem(f"{path}.{name}", f"the weight {weight} is not a finite number", "config.out_of_range")
    if fns and not any(fns.values()):
        yield path, "gives every function the weight 0, so every reward is 0: raise one"


def _tables(config: RewardConfig, short_form: str) -> dict[str, dict[str, float]]:
    """Absolute path -> functions and weights, `reward_fn` included."""
    tables = {f"reward.{path}": fns for path, fns in config.tables()}
    return tables | ({"reward_fn": {short_form: 1.0}} if short_form and not config.fns else {})


def selection_problems(config: RewardConfig, *, short_form: str) -> Problems:
    """Contradictions between reward.* and reward_fn (`short_form`; empty = not set). Paths are absolute."""
    if short_form and config.fns:
        yield "reward_fn", "and reward.fns both select reward functions: remove one"
    tables = _tables(config, short_form)
    known = {name for fns in tables.values() for name in fns}
    for name in config.filter_on:
        if name not in known:
            text = f"{name!r} is not one of the reward functions ({', '.join(known) or 'none'}): add it there"
            yield "reward.filter_on", text
    if config.filter_on and set(config.filter_on) <= known:
        for path, fns in tables.items():
            # Without one of them the filter sees the same number for every answer.
            if not any(fns.get(name) for name in config.filter_on):
                text = (
                    f"{path} gives no weight to {', '.join(config.filter_on)}, so the filter value is constant: add one"
                )
                yield "reward.filter_on", text
    slow = sorted(known & {"math", "geometry3k", "virl39k"})
    if config.on_error == "fail" and slow and config.timeout_s < MATH_NEEDS_S:
        text = f"{config.timeout_s:g} s is below the {MATH_NEEDS_S:g} s that the reward {slow[0]} can need"
        yield "reward.timeout_s", f"{text}: raise it, or set reward.on_error=zero"
    users: dict[str, str] = {}
    for name, short in short_names(known).items():
        if short in users:
            text = f"{name} and {users[short]} have the same name {short} in the metrics: rename one of the functions"
            yield "reward.fns", text
        users[short] = name


def score_weight_problems(weights: Mapping[str, float], config: RewardConfig, *, short_form: str) -> Problems:
    """Names and values in actor.gdpo_weights (`weights`) that do not fit the reward functions. Paths are absolute."""
    path = "actor.gdpo_weights"
    for name, weight in weights.items():
        if not math.isfinite(weight):
            yield Problem(f"{path}.{name}", f"the weight {weight} is not a finite number", "config.out_of_range")
    if not weights or not (short_form or config.names_functions):
        return  # a script chooses the functions
    if not config.names_functions:
        yield path, "needs separate scores, and reward_fn is one function: name several in reward.fns, or remove it"
        return
    tables = _tables(config, short_form)
    shown = short_names({name for fns in tables.values() for name in fns})
    for name in sorted(set(weights) - set(shown.values())):
        yield f"{path}.{name}", f"is not one of the reward functions ({', '.join(sorted(shown.values()))}): correct it"
    for table, fns in tables.items():
        if not any(weights.get(shown[name]) for name in fns):
            yield path, f"gives no function of {table} a weight other than 0, so nothing is learned there: add one"


def short_names(names: set[str]) -> dict[str, str]:
    """Metric name of each function: the registered name, or the function name of a path.

    If several paths share it, the last part of their module or file is put before it, with a dot.
    """
    functions = {name: name.rpartition(":")[2] for name in sorted(names)}
    taken = list(functions.values())
    for name, function in functions.items():
        where = name.rpartition(":")[0]
        if where and taken.count(function) > 1:
            place = PurePath(where).stem if where.endswith(".py") else where.rpartition(".")[2]
            functions[name] = f"{place}.{function}"
    return functions
