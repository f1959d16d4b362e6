"""`areal plan`: what a configuration would do, before devices are rented for it."""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from areal.api.config import PPOConfig
from areal.api.config.experiment import LengthRule
from areal.api.config.load import load_experiment
from areal.api.errors import ConfigError
from areal.launcher.job import num_threads
from areal.observe.log import get_logger
from areal.planner.calibration import calibrate
from areal.planner.cards import card_times, known_card
from areal.planner.measured import MeasuredRun, measured_run
from areal.planner.report import Point, bound_line, figure_lines, gains, simulated, steps_for
from areal.planner.search import BEST, STALENESS, Ranked, Search
from areal.planner.service import ServiceTimes, Workload, mean_tokens
from areal.planner.simulation import Setting, part_of
from areal.system.device import cpu_count, gpu_memory_bytes
from areal.system.durable import write_atomic
from areal.system.run_paths import existing_run

SEEDS = 3
"""Simulations of one setting."""
MEASURED_ERROR = "the intervals are over seeds only; plans of nine runs on two cores were off by up to 14%, one by 19%"
SIMULATED_TOKENS = 4_000_000
"""Generated tokens of one simulation from which on one simulated token stands for several."""
_ASSUMED_PROMPT, _ASSUMED_SHARE, _ASSUMED_SIGMA = 256, 0.25, 0.9


def plan_command(words: Sequence[str]) -> int:
    """`areal plan --config FILE [key=value ...] [--from RUN | --calibrate | --card NAME]`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="areal plan",
        usage="%(prog)s --config FILE [key.sub=value ...] (--from RUN | --calibrate | --card NAME)\n"
        "                  [--devices N] [--search [--write FILE]] [--json]",
        description="Simulate a run: the real gate, executor, batches, router and weight updates on a virtual clock, "
        "against servers, rewards and trainers whose times come from a run, a calibration or a specification.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    parser.add_argument("--config", metavar="FILE", action="append", help="default: that of the run of --from")
    source.add_argument("--from", dest="run", metavar="RUN", type=existing_run, help="times of a recorded run")
    source.add_argument("--calibrate", action="store_true", help="times of a run of at most 60 s on this machine")
    source.add_argument("--card", metavar="NAME", help="times from a specification: a100, h100, h200, b200")
    parser.add_argument("--devices", metavar="N", type=_positive, help="use the best split of N devices")
    parser.add_argument("--search", action="store_true", help="rank allocations, staleness, concurrency, micro-batches")
    parser.add_argument("--write", metavar="FILE", type=Path, help="the best allocation, to be given as --config too")
    parser.add_argument("--steps", metavar="N", type=_positive, help="train steps for the device hours")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args(words)
    if given.write is not None and not (given.search or given.devices):
        raise ConfigError("--write: there is a choice to write only with --devices or --search", code="plan.no_choice")
    config, seen = _sources(given)
    plan = _Plan(given, config, seen)
    sys.stdout.write((json.dumps(plan.facts()) if given.json else "\n".join(plan.lines())) + "\n")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _sources(given: argparse.Namespace) -> tuple[PPOConfig, MeasuredRun | None]:
    """What the command line asks to simulate, and the run that its times come from."""
    if given.config is None and given.run is None:
        raise ConfigError("areal plan needs --config FILE, or --from RUN with its own", code="plan.no_config")
    files = given.config or [str(given.run / "config.yaml")]
    config_words = [word for path in files for word in ("--config", path)] + given.overrides
    config = load_experiment(config_words, allow_unknown_top_level=given.config is None, is_quiet=True)
    if not isinstance(config, PPOConfig):
        message = "areal plan simulates runs with rollouts: use a configuration with an actor"
        raise ConfigError(message, code="plan.no_rollouts")
    if config.allocation.inference is None:
        text = f"allocation_mode={config.allocation_mode} has no servers: a plan needs them"
        raise ConfigError(text, code="plan.no_servers")
    target = config.rollout.target_staleness
    if target.ess is not None:
        text = "rollout.target_staleness.ess: a plan has no importance weights: use mean, or remove it"
        raise ConfigError(text, code="plan.set_point")
    if given.search and target.mean is not None:
        text = "rollout.target_staleness.mean: --search compares values of max_head_offpolicyness: remove it"
        raise ConfigError(text, code="plan.set_point")
    return config, None if given.card else _measured(given, config)


def setting_of(config: PPOConfig, times: ServiceTimes, work: Workload) -> Setting:
    """Long enough for a steady state, and with as many tokens as a simulation can have."""
    inference = config.allocation.inference
    assert inference is not None
    setting = Setting(
        config=config,
        times=times,
        work=work,
        servers=inference.num_replicas,
        dp_size=config.allocation.train[0].parallel.dp,
        steps=steps_for(config.rollout.max_head_offpolicyness),
    )
    return replace(setting, unit=unit_of(setting))


def _measured(given: argparse.Namespace, config: PPOConfig) -> MeasuredRun:
    if given.run is not None:
        return measured_run(given.run, cores=cpu_count())
    with tempfile.TemporaryDirectory(prefix="areal-plan-") as folder:
        _say("calibrates: runs the configuration for at most 60 s")
        return measured_run(calibrate(config, Path(folder)), cores=cpu_count())


def adapted(seen: MeasuredRun, config: PPOConfig) -> tuple[ServiceTimes, Workload]:
    """Times and work of a measured run for another configuration: more trainers divide the time by tokens, and more
    threads divide that of a process as far as it is parallel."""
    before, after = (each.allocation.train[0].parallel for each in (seen.config, config))
    times = replace(seen.times, trainer=seen.times.trainer.divided(after.dp / before.dp))
    if seen.times.cores < math.inf:
        times = _on_threads(times, *(_threads(each, int(times.cores)) for each in (seen.config, config)))
    work = replace(seen.work, answers=config.gconfig.n_samples, max_tokens=config.gconfig.max_new_tokens)
    if config.benchmark.length:
        work = assumed_work(config)
    if not config.rollout.should_accept_fn:
        work = replace(work, rejected=tuple(one for one in work.rejected if one[0] != "filter"))
    if others := [name for name, one, other in _sizes(seen.config, config) if one != other]:
        source = f"{times.source}, with another {' and '.join(others)}, which is assumed to be as fast"
        times = replace(times, source=source, is_extrapolated=True)
    return times, work


def _threads(config: PPOConfig, cores: int) -> tuple[int, int]:
    """Of a server and of a trainer rank on one machine without GPUs."""
    computing = config.allocation.world_size
    return num_threads(config, "server", cores, computing), num_threads(config, "trainer", cores, computing)


def _on_threads(times: ServiceTimes, before: tuple[int, int], now: tuple[int, int]) -> ServiceTimes:
    if before == now:
        return times
    return replace(
        times,
        server=times.server.on_threads(before[0], now[0]),
        trainer=times.trainer.on_threads(before[1], now[1]),
        source=f"{times.source}, with another number of threads",
        is_extrapolated=True,
    )


def _sizes(one: PPOConfig, other: PPOConfig) -> list[tuple[str, object, object]]:
    """What service times depend on, and nothing here converts: name, and the value in both configurations."""
    servers, trainers = [], []
    for config in (one, other):
        assert config.allocation.inference is not None
        servers.append(config.allocation.inference.instance_size)
        parallel = config.allocation.train[0].parallel
        trainers.append((config.train_backend, parallel.world_size // parallel.dp))
    return [
        ("actor.path", one.actor.path, other.actor.path),
        ("server backend", one.server_backend, other.server_backend),
        ("size of a server", *servers),
        ("model-parallel size of the trainer", *trainers),
    ]


def assumed_work(config: PPOConfig) -> Workload:
    """Lengths of `benchmark.length`, else a long-tailed distribution below gconfig.max_new_tokens."""
    options, longest = config.benchmark, config.gconfig.max_new_tokens
    if options.length:
        rule, prompt = LengthRule.parse(options.length), options.prompt_length
    else:
        median = max(1.0, longest * _ASSUMED_SHARE)
        rule, prompt = LengthRule("lognormal", (median, _ASSUMED_SIGMA, float(longest))), _ASSUMED_PROMPT
    return Workload(prompt=prompt, answers=config.gconfig.n_samples, rule=rule)


def unit_of(setting: Setting) -> int:
    """How many tokens one simulated token stands for: memory and time of a simulation grow with its tokens."""
    part = part_of(setting)
    tokens = mean_tokens(setting.work) * part.config.train_dataset.batch_size * setting.steps
    return max(1, round(tokens / SIMULATED_TOKENS))


def _say(text: str) -> None:
    sys.stderr.write(f"areal plan: {text}\n")
    sys.stderr.flush()


class _Plan:
    """Simulates, and describes the result."""

    def __init__(self, given: argparse.Namespace, config: PPOConfig, seen: MeasuredRun | None) -> None:
        self._given, self._seen = given, seen
        logger = get_logger("areal")
        level = logger.level
        logger.setLevel("ERROR")  # the fleet of a simulation logs what that of a run does
        try:
            self._ranked = self._searched(config) if given.search or given.devices else list[Ranked]()
            self._config = self._ranked[0].point.on(config) if self._ranked else config
            self._setting = self._settings(self._config)
            self._figures = self._ranked[0].figures if self._ranked else simulated(self._setting, SEEDS)
            self._gains = gains(self._config, self._settings, _say)
        finally:
            logger.setLevel(level)
        if given.write is not None:
            options = self._ranked[0].point.options(Point.of(config))
            write_atomic(given.write, yaml.safe_dump(_nested(options)).encode())

    def _settings(self, config: PPOConfig) -> Setting:
        if self._seen is not None:
            return setting_of(config, *adapted(self._seen, config))
        work = assumed_work(config)
        tokens = config.train_dataset.batch_size * (mean_tokens(work) + work.prompt * work.answers)
        return setting_of(config, card_times(self._given.card, config, tokens=tokens), work)

    def _searched(self, config: PPOConfig) -> list[Ranked]:
        given, bound = self._given, config.rollout.max_head_offpolicyness
        search = Search(
            config,
            self._settings,
            devices=given.devices or config.allocation.world_size,
            card_bytes=known_card(given.card).memory_bytes if given.card else gpu_memory_bytes(),
            varies=bool(given.card and given.search),
            say=_say,
        )
        return search.best(sorted({*STALENESS, bound}) if given.search else [bound], SEEDS)

    @property
    def _steps(self) -> int | None:
        return self._given.steps or self._config.total_train_steps

    @property
    def _devices(self) -> int:
        return self._config.allocation.world_size

    def lines(self) -> list[str]:
        times, seen = self._setting.times, self._seen
        note = " (extrapolated)" if times.is_extrapolated else ""
        head = f"{self._config.allocation_mode}, staleness {self._config.rollout.max_head_offpolicyness}"
        lines = [f"plan of {head}: {times.source}; [95% interval over {SEEDS} seeds]", MEASURED_ERROR]
        setting, part = self._setting, part_of(self._setting)
        if part is not setting:
            episodes = f"{part.config.train_dataset.batch_size} of {setting.config.train_dataset.batch_size} episodes"
            text = f"simulated: {part.servers} of {setting.servers} servers, {episodes} of a batch"
            lines.append(f"{text}; stragglers among the others are left out")
        if seen is not None:
            lines.append(f"the measured run: {seen.step_s:.3g} s a step, staleness {seen.staleness:.2f}")
        lines += figure_lines(self._figures, devices=self._devices, steps=self._steps, note=note)
        lines.append(bound_line(self._figures.bound, self._gains) + note)
        for place, ranked in enumerate(self._ranked[:BEST], start=1):
            per_hour = f"{ranked.figures.steps_per_hour} steps per hour"
            lines.append(f"{place}. {ranked.title}: {per_hour}; {ranked.reason}{note}")
        if self._given.write is not None:
            lines.append(f"{self._given.write}: the first of these; give it as a further --config")
        return lines

    def facts(self) -> dict[str, Any]:
        return {
            **Point.of(self._config)._asdict(),
            "source": self._setting.times.source,
            "extrapolated": self._setting.times.is_extrapolated,
            "devices": self._devices,
            "steps": self._steps,
            "bound": self._figures.bound,
            "figures": dataclasses.asdict(self._figures),
            "gains": [{"change": one.title, "gain": one.gain, **one.options} for one in self._gains],
            "ranked": [
                {**one.point._asdict(), "reason": one.reason, "figures": dataclasses.asdict(one.figures)}
                for one in self._ranked
            ],
        }


def _nested(options: Any) -> dict[str, Any]:
    """Options by their dotted keys as a tree of sections."""
    tree: dict[str, Any] = {}
    for key, value in options.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree
