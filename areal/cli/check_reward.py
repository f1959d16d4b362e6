"""`areal check-reward`: what the reward of each source pays for, found out before a run."""

import argparse
import asyncio
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev

from areal.api.config import PPOConfig
from areal.api.data import row_json
from areal.api.errors import ConfigError
from areal.cli.try_workflow import config_without_optimizer
from areal.evaluate.command import answered_samples
from areal.evaluate.samples import rows_of
from areal.evaluate.settings import Requested
from areal.launcher.status import StatusLine
from areal.system.durable import write_atomic
from areal.trainer.reward_check import FAULTS, RewardCheck, SourceReport


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal check-reward",
        usage="%(prog)s --config FILE.yaml [key.sub=value ...] [--rows N] [--model PATH] [--strict] [--json]",
        description="Score reference answers, the same in other words, and wrong answers of train_dataset, before a "
        "run, and show for each source what its reward pays for.",
        epilog="Exit status: 0, or with --strict 1 when a source has a fault; 2 it could not start.",
    )
    parser.add_argument("--config", metavar="FILE", required=True)
    parser.add_argument("--rows", type=int, default=50, metavar="N", help="rows of each source (default: 50)")
    parser.add_argument(
        "--model", default="", metavar="PATH", help="also answer the rows, gconfig.n_samples times each"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 when there is a fault, not for a notice")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


def check_reward(words: Sequence[str]) -> int:
    args = _parser().parse_intermixed_args(words)
    if args.rows < 1:
        raise ConfigError(f"--rows {args.rows} must be at least 1", code="config.conflict")
    config = config_without_optimizer(["--config", args.config, *args.overrides])
    if not isinstance(config, PPOConfig):
        raise ConfigError(f"{args.config}: this kind of training has no reward", code="config.conflict")
    line, check = StatusLine(), RewardCheck.of(config, num_rows=args.rows)
    reports = asyncio.run(check.reports(is_quick=False, say=lambda text: line.say(f"areal: {text}")))
    shares = gradient_shares(config, check, args) if args.model else {}
    additions = [
        {"faults": report.faults, "notices": report.notices} | shares.get(report.source, {}) for report in reports
    ]
    facts = [asdict(report) | other for report, other in zip(reports, additions, strict=True)]
    sys.stdout.write(json.dumps({"sources": facts}, indent=1) + "\n" if args.json else text_of(reports, shares))
    return int(args.strict and any(report.faults for report in reports))


def text_of(reports: Sequence[SourceReport], shares: dict[str, dict[str, float]]) -> str:
    """The table, then an example of each fault and notice."""
    names = ["rows", "form", "no ref", "right<1", "changed", "wrong=right", "differs", "json", "raises", "s/call"]
    lines = [[*names[:-1], names[-1], *(["equal groups", "gradient"] if shares else []), "source"]]
    for report in reports:
        wrong = sorted(kind for kind, count in report.wrong_as_right.items() if count)
        cells = [
            report.rows, report.form, report.without_reference, report.right_below, sum(report.changed_below.values()),
            f"{max(report.wrong_as_right.values(), default=0)} {','.join(wrong)}".strip(), report.differs,
            report.changed_by_json, report.raises, f"{report.seconds:.3f}",
        ]  # fmt: skip
        if shares:
            share = shares.get(report.source, {})
            cells += [f"{share.get(name, math.nan):.0%}" for name in ("equal_groups", "gradient_share")]
        lines.append([*map(str, cells), report.source or "all rows"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines]
    faults = [_example(report, fault) for report in reports for fault in report.faults]
    notices = [f"notice: {_example(report, notice)}" for report in reports for notice in report.notices]
    return "\n".join([*rows, "", *(faults or ["no fault was found"]), *notices, ""])


def _example(report: SourceReport, fault: str) -> str:
    return f"{report.source or 'all rows'}: {FAULTS[fault]}: {report.examples.get(fault, '')}"


def gradient_shares(config: PPOConfig, check: RewardCheck, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By source, with answers of the model: the share of groups with equal rewards, which teach nothing, and the part
    of the sum of advantages, each divided by the deviation of its group."""
    lines = b"".join(row_json(row) + b"\n" for rows in check.rows.values() for row in rows)
    file = Path(config.cluster.fileroot, "check-reward", f"{hashlib.sha256(lines).hexdigest()[:16]}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, lines)
    modes = ",".join(sorted({"sampled", *config.evaluator.stop_at}))  # goals of other modes need these too
    mapped = [  # the rows of the file are converted
        f"train_dataset.path={file}", "train_dataset.map_fn=", "train_dataset.columns={}", "valid_dataset=null",
        f"evaluator.modes=[{modes}]",
    ]  # fmt: skip
    wanted = Requested(
        files=[args.config],
        overrides=[*args.overrides, *mapped],
        model=args.model,
        data=[str(file)],
        num_samples=config.gconfig.n_samples,
    )
    groups: dict[str, list[list[float]]] = {}
    answered = [answered for answered in answered_samples(wanted) if answered.key.mode == "sampled"]
    for samples in rows_of(answered):
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        if len(rewards) > 1:
            groups.setdefault(check.scores.source(samples[0].data), []).append(rewards)
    return shares_of(groups)


def shares_of(groups: dict[str, list[list[float]]]) -> dict[str, dict[str, float]]:
    """The shares of each source, from the rewards of its groups."""
    sizes = {source: sum(map(_advantages, rewards)) for source, rewards in groups.items()}
    total = sum(sizes.values()) or 1.0
    return {
        source: {"equal_groups": fmean(not pstdev(group) for group in rewards), "gradient_share": sizes[source] / total}
        for source, rewards in groups.items()
    }


def _advantages(rewards: Sequence[float]) -> float:
    """The sum of absolute advantages of one group."""
    spread, mean = pstdev(rewards), fmean(rewards)
    return sum(abs(reward - mean) for reward in rewards) / spread if spread else 0.0
