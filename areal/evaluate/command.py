"""The commands `areal eval` and `areal generate`: answers to held-out rows, made by servers that the launcher starts.

Answers are kept in a run folder whose name contains a checksum of everything that they depend on. The same command
therefore continues after a kill, and prints the results at once when all answers exist.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.api.config import PPOConfig
from areal.api.config.validate import raise_problems
from areal.evaluate.samples import Report, make_report, read_samples, table
from areal.evaluate.settings import Requested, add_config_arguments, evaluation_config, parsed_ks
from areal.launcher.attach import with_attached_servers
from areal.launcher.local import Launch, LocalCluster, launch, this_machine
from areal.launcher.preflight import function_problems, run_lock
from areal.launcher.status import StatusLine
from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths

_OPTIONS = """[--config FILE.yaml] [--model PATH|RUN [--step N]] [--data [NAME=]FILE ...]
       [-n SAMPLES] [--greedy] [--servers native:d2] [key.sub=value ...] [--fresh] [--dry-run]"""


def run_eval(words: Sequence[str]) -> int:
    """`areal eval`: answers and scores held-out rows, prints the metrics, and returns the exit status."""
    parser = _parser("eval", f"{_OPTIONS} [-k 1,4] [--json]", "Evaluate a model on held-out rows, without training.")
    parser.add_argument("-k", type=parsed_ks, default=[], metavar="1,4", help="the k of pass@k; default: powers of two")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_intermixed_args(words)
    config = evaluation_config(_requested(given), scores=True)
    if status := _make_answers(config, given):
        return status
    if given.dry_run:
        return 0
    report = _report(config, given.k)
    sys.stdout.write(json.dumps(report.as_json(), indent=1) + "\n" if given.json else table(report))
    return int(0 < report.num_failed == report.num_answers)


def run_generate(words: Sequence[str]) -> int:
    """`areal generate`: answers rows and writes the answers to a file, which `areal score` reads."""
    parser = _parser("generate", f"{_OPTIONS} -o OUT.jsonl [--json]", "Generate answers to rows, without scores.")
    parser.add_argument("-o", dest="output", type=Path, required=True, metavar="OUT", help="file to write, JSONL")
    parser.add_argument("--json", action="store_true", help="print the numbers of answers as JSON")
    given = parser.parse_intermixed_args(words)
    config = evaluation_config(_requested(given), scores=False)
    if status := _make_answers(config, given):
        return status
    if not given.dry_run:
        shutil.copyfile(RunPaths.of(config).answers, given.output)
        facts = {"output": str(given.output), "answers": len(read_samples(given.output))}
        sys.stdout.write(f"{json.dumps(facts)}\n" if given.json else f"{facts['answers']} answers: {given.output}\n")
    return 0


def _parser(name: str, usage: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"areal {name}", usage=f"%(prog)s {usage}", description=description)
    add_config_arguments(parser)
    parser.add_argument("--model", default="", metavar="PATH|RUN", help="checkpoint folder, hub name, or a run")
    parser.add_argument(
        "--step", type=int, metavar="N", help="of a run: its export after N train steps; default: newest"
    )
    parser.add_argument("--data", action="append", default=[], metavar="[NAME=]FILE", help="a held-out set; repeatable")
    parser.add_argument("-n", "--n-samples", type=int, metavar="N", help="answers to each row (evaluator.n_samples)")
    parser.add_argument("--greedy", action="store_true", help="greedy decoding, one answer to each row")
    parser.add_argument("--servers", default="", metavar="native:d2", help="servers to start; default: allocation_mode")
    parser.add_argument("--fresh", action="store_true", help="make all answers again")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    return parser


def _requested(given: argparse.Namespace) -> Requested:
    return Requested(
        files=given.config,
        overrides=given.overrides,
        model=given.model,
        step=given.step,
        data=given.data,
        num_samples=given.n_samples,
        greedy=given.greedy,
        servers=given.servers,
    )


def _make_answers(config: PPOConfig, given: argparse.Namespace) -> int:
    launched = with_attached_servers(config, os.environ)
    raise_problems(list(function_problems(launched, has_script=False)))
    paths, line = RunPaths.of(config), StatusLine()
    if given.fresh and paths.root.is_dir() and not given.dry_run:
        with run_lock(paths):
            paths.answers.unlink(missing_ok=True)
            paths.results.unlink(missing_ok=True)
    if paths.results.is_file() and not given.dry_run:
        line.say(f"areal: all answers exist in {paths.answers}; --fresh makes them again")
        return 0
    if num_before := len(read_samples(paths.answers)):
        line.say(f"areal: continues with {num_before} answers in {paths.answers}")
    status = launch(
        Launch(config=launched, extras={}, script=None, dry_run=given.dry_run), LocalCluster(this_machine())
    )
    if status == 0 and not given.dry_run:
        report = _report(config, [])
        if not report.num_failed:  # a later start makes the failed ones again
            write_atomic(paths.results, json.dumps(report.as_json(), indent=1).encode())
    return status


def _report(config: PPOConfig, ks: Sequence[int]) -> Report:
    samples = read_samples(RunPaths.of(config).answers, with_failed=True).values()
    return make_report(samples, correct_reward=config.evaluator.correct_reward, ks=ks)
