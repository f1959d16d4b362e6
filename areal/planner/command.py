"""`areal plan`: what a configuration would do, before devices are rented for it."""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areal.api.config import PPOConfig
from areal.api.config.experiment import LengthRule
from areal.api.config.load import load_experiment
from areal.api.errors import ConfigError
from areal.launcher.job import num_threads
from areal.observe.log import get_logger
from areal.planner.calibration import calibrate
from areal.planner.cards import card_times, known_card
from areal.planner.figures import SEEDS, Figures, figure_lines, simulated, steps_for
from areal.planner.measured import MeasuredRun, measured_run
from areal.planner.search import BEST, STALENESS, Gain, Point, Ranked, Search, bound_line, gains, text_of
from areal.planner.service import ServiceTimes, Workload
from areal.planner.simulation import Setting, part_of
from areal.system.device import cpu_count, gpu_memory_bytes
from areal.system.durable import write_atomic
from areal.system.run_paths import existing_run

MEASURED_ERROR = "the intervals are over seeds only; plans of nine runs on two cores were off by up to 24%"
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
    args = parser.parse_intermixed_args(words)
    config = _config(args)
    logger = get_logger("areal")
    level = logger.level
    logger.setLevel("ERROR")  # the fleet of a simulation logs what that of a run does
    try:
        plan = _planned(args, config)
    finally:
        logger.setLevel(level)
    if args.write is not None:
        tree = OmegaConf.create()
        for key, value in plan.ranked[0].point.options(Point.of(config)).items():
            OmegaConf.update(tree, key, value, force_add=True)
        write_atomic(args.write, OmegaConf.to_yaml(tree).encode())
    text = json.dumps(plan.facts()) if args.json else "\n".join(plan.lines())
    sys.stdout.write(f"{text}\n")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _config(args: argparse.Namespace) -> PPOConfig:
    """What the command line asks to simulate. ConfigError where a plan does not exist."""
    if args.write is not None and not (args.search or args.devices):
        raise ConfigError("--write: there is a choice to write only with --devices or --search", code="plan.no_choice")
    if args.config is None and args.run is None:
        raise ConfigError("areal plan needs --config FILE, or --from RUN with its own", code="plan.no_config")
    files = args.config or [str(args.run / "config.yaml")]
    config_words = [word for path in files for word in ("--config", path)] + args.overrides
    config = load_experiment(config_words, allow_unknown_top_level=args.config is None, is_quiet=True)
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
    if args.search and target.mean is not None:
        text = "rollout.target_staleness.mean: --search compares values of max_head_offpolicyness: remove it"
        raise ConfigError(text, code="plan.set_point")
    return config


def _planned(args: argparse.Namespace, config: PPOConfig) -> "_Plan":
    seen, bound = _measured(args, config), config.rollout.max_head_offpolicyness

    def settings(config: PPOConfig) -> Setting:
        if seen is not None:
            return setting_of(config, *adapted(seen, config))
        work = assumed_work(config)
        tokens = config.train_dataset.batch_size * (work.mean_tokens + work.prompt * work.answers)
        return setting_of(config, card_times(args.card, config, tokens=tokens), work)

    ranked: list[Ranked] = []
    if args.search or args.devices:
        search = Search(
            config,
            settings,
            devices=args.devices or config.allocation.world_size,
            card_bytes=known_card(args.card).memory_bytes if args.card else gpu_memory_bytes(),
            varies=bool(args.card and args.search),
            say=_say,
        )
        ranked = search.best(sorted({*STALENESS, bound}) if args.search else [bound])
        config = ranked[0].point.on(config)
    setting = settings(config)
    return _Plan(
        setting=setting,
        figures=ranked[0].figures if ranked else simulated(setting, SEEDS),
        gains=gains(config, settings, _say),
        ranked=ranked,
        seen=seen,
        steps=args.steps or config.total_train_steps,
        written=args.write,
    )


def _measured(args: argparse.Namespace, config: PPOConfig) -> MeasuredRun | None:
    if args.run is not None:
        return measured_run(args.run, cores=cpu_count())
    if not args.calibrate:
        return None
    with tempfile.TemporaryDirectory(prefix="areal-plan-") as folder:
        _say("calibrates: runs the configuration for at most 60 s")
        return measured_run(calibrate(config, Path(folder)), cores=cpu_count())


def _say(text: str) -> None:
    sys.stderr.write(f"areal plan: {text}\n")
    sys.stderr.flush()


def setting_of(config: PPOConfig, times: ServiceTimes, work: Workload) -> Setting:
    """Long enough for a steady state."""
    return Setting(config=config, times=times, work=work, steps=steps_for(config))


def adapted(seen: MeasuredRun, config: PPOConfig) -> tuple[ServiceTimes, Workload]:
    """Times and work of a measured run for another configuration: more trainers divide the time by tokens."""
    before, after = (each.allocation.train[0].parallel for each in (seen.config, config))
    times = replace(seen.times, trainer=seen.times.trainer.divided(after.dp / before.dp))
    work = replace(seen.work, answers=config.gconfig.n_samples, max_tokens=config.gconfig.max_new_tokens)
    if config.benchmark.length:
        work = assumed_work(config)
    if not config.rollout.should_accept_fn:
        work = replace(work, rejected=tuple(reason for reason in work.rejected if reason[0] != "filter"))
    sizes, others = (_sizes(each, times.cores) for each in (seen.config, config))
    if changed := [name for name, size in sizes.items() if size != others[name]]:
        source = f"{times.source}, with another {' and '.join(changed)}, which is assumed to be as fast"
        times = replace(times, source=source, is_extrapolated=True)
    return times, work


def _sizes(config: PPOConfig, cores: float) -> dict[str, object]:
    """What service times depend on, and nothing converts. `cores`: that processes share, infinite without."""
    inference, trainer = config.allocation.inference, config.allocation.train[0].parallel
    assert inference is not None
    computing, shared = config.allocation.world_size, int(min(cores, 2**31))
    return {
        "actor.path": config.actor.path,
        "server backend": config.server_backend,
        "size of a server": inference.instance_size,
        "model-parallel size of the trainer": (config.train_backend, trainer.world_size // trainer.dp),
        "number of threads": [num_threads(config, role, shared, computing) for role in ("server", "trainer")],
    }


def assumed_work(config: PPOConfig) -> Workload:
    """Lengths of `benchmark.length`, else a long-tailed distribution below gconfig.max_new_tokens."""
    options, longest = config.benchmark, config.gconfig.max_new_tokens
    if options.length:
        rule, prompt = LengthRule.parse(options.length), options.prompt_length
    else:
        median = max(1.0, longest * _ASSUMED_SHARE)
        rule, prompt = LengthRule("lognormal", (median, _ASSUMED_SIGMA, float(longest))), _ASSUMED_PROMPT
    return Workload(prompt=prompt, answers=config.gconfig.n_samples, rule=rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What a plan says."""

    setting: Setting
    figures: Figures
    gains: Sequence[Gain]
    ranked: Sequence[Ranked]
    """What a search simulated; empty without one."""
    seen: MeasuredRun | None
    steps: int | None
    written: Path | None

    def lines(self) -> list[str]:
        times, seen, setting, part = self.setting.times, self.seen, self.setting, part_of(self.setting)
        note = " (extrapolated)" if times.is_extrapolated else ""
        head = f"{setting.config.allocation_mode}, staleness {setting.config.rollout.max_head_offpolicyness}"
        lines = [f"plan of {head}: {times.source}; [95% interval over {SEEDS} seeds]", MEASURED_ERROR]
        if part is not setting:
            episodes = f"{part.config.train_dataset.batch_size} of {setting.config.train_dataset.batch_size} episodes"
            text = f"simulated: {part.servers} of {setting.servers} servers, {episodes} of a batch"
            lines.append(f"{text}; stragglers among the others are left out")
        if seen is not None:
            lines.append(f"the measured run: {seen.step_s:.3g} s a step, staleness {seen.staleness:.2f}")
        devices = setting.config.allocation.world_size
        lines += figure_lines(self.figures, devices=devices, steps=self.steps, note=note)
        lines.append(bound_line(self.figures.bound, self.gains) + note)
        for place, ranked in enumerate(self.ranked[:BEST], start=1):
            per_hour = f"{ranked.figures.steps_per_hour} steps per hour"
            lines.append(f"{place}. {text_of(ranked.point.options())}: {per_hour}; {ranked.reason}{note}")
        if self.written is not None:
            lines.append(f"{self.written}: the first of these; give it as a further --config")
        return lines

    def facts(self) -> dict[str, Any]:
        times, config = self.setting.times, self.setting.config
        return {
            **Point.of(config)._asdict(),
            "source": times.source,
            "extrapolated": times.is_extrapolated,
            "devices": config.allocation.world_size,
            "steps": self.steps,
            "bound": self.figures.bound,
            "figures": dataclasses.asdict(self.figures),
            "gains": [{"gain": gain.gain, **gain.options} for gain in self.gains],
            "ranked": [
                {**ranked.point._asdict(), "reason": ranked.reason, "figures": dataclasses.asdict(ranked.figures)}
                for ranked in self.ranked
            ],
        }
