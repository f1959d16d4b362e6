"""The commands `areal eval`, `areal generate` and `areal score`: held-out rows answered, and answers scored.

`eval` and `generate` start servers. Their answers are kept in a run folder whose name contains a checksum of everything
that they depend on. The same command therefore continues after a kill, and prints the results at once when all answers
exist.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.api.config import PPOConfig
from areal.api.config.validate import raise_problems
from areal.api.errors import ArealError, InputError, LaunchError, RewardError
from areal.data.tokenizer import Tokenizer, tokenizer_of
from areal.evaluate.samples import (
    Report,
    Sample,
    make_report,
    read_generations,
    read_samples,
    rows_of,
    source_of,
    table,
    write_samples,
)
from areal.evaluate.settings import Requested, add_config_arguments, evaluation_config, load_settings, parsed_ks
from areal.launcher.attach import with_attached_servers
from areal.launcher.local import Launch, LocalCluster, launch, this_machine
from areal.launcher.preflight import function_problems, run_lock
from areal.launcher.status import StatusLine
from areal.reward.text import AnswerFn, answer_function
from areal.rollout.evaluation import MAX_FIRST_FAILURES
from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths
from areal.workflow.scoring import Scorer

_OPTIONS = """[--config FILE.yaml] [--model PATH|RUN [--step N]] [--data [NAME=]FILE ...]
       [-n SAMPLES] [--greedy] [--servers native:d2] [key.sub=value ...] [--fresh] [--dry-run]"""


def run_eval(words: Sequence[str]) -> int:
    """`areal eval`: answers and scores held-out rows, prints the metrics, and returns the exit status."""
    parser = _parser("eval", f"{_OPTIONS} [-k 1,4] [--json]", "Evaluate a model on held-out rows, without training.")
    parser.add_argument("-k", type=parsed_ks, default=[], metavar="1,4", help="the k of pass@k; default: powers of two")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_intermixed_args(words)
    config = evaluation_config(_requested(args), scores=True)
    if status := _make_answers(config, fresh=args.fresh, dry_run=args.dry_run):
        return status
    if args.dry_run:
        return 0
    report = _report(config, args.k)
    sys.stdout.write(json.dumps(report.as_json(), indent=1) + "\n" if args.json else table(report))
    return int(0 < report.num_failed == report.num_answers)


def run_generate(words: Sequence[str]) -> int:
    """`areal generate`: answers rows and writes the answers to a file, which `areal score` reads."""
    parser = _parser("generate", f"{_OPTIONS} -o OUT.jsonl [--json]", "Generate answers to rows, without scores.")
    parser.add_argument("-o", dest="output", type=Path, required=True, metavar="OUT", help="file to write, JSONL")
    parser.add_argument("--json", action="store_true", help="print the numbers of answers as JSON")
    args = parser.parse_intermixed_args(words)
    config = evaluation_config(_requested(args), scores=False)
    if status := _make_answers(config, fresh=args.fresh, dry_run=args.dry_run):
        return status
    if not args.dry_run:
        shutil.copyfile(RunPaths.of(config).answers, args.output)
        facts = {"output": str(args.output), "answers": len(read_samples(args.output))}
        sys.stdout.write(f"{json.dumps(facts)}\n" if args.json else f"{facts['answers']} answers: {args.output}\n")
    return 0


def _parser(name: str, usage: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"areal {name}", usage=f"%(prog)s {usage}", description=description)
    add_config_arguments(parser)
    parser.add_argument("--model", default="", metavar="PATH|RUN", help="checkpoint folder, hub name, or a run")
    parser.add_argument(
        "--step", type=int, metavar="N", help="of a run: its export after N train steps; default: newest"
    )
    parser.add_argument("--data", action="append", default=[], metavar="[NAME=]FILE", help="a held-out set; repeatable")
    parser.add_argument(
        "-n", "--n-samples", dest="num_samples", type=int, metavar="N", help="answers to each row (evaluator.n_samples)"
    )
    parser.add_argument("--greedy", action="store_true", help="greedy decoding, one answer to each row")
    parser.add_argument("--servers", default="", metavar="native:d2", help="servers to start; default: allocation_mode")
    parser.add_argument("--fresh", action="store_true", help="make all answers again")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    return parser


def _requested(args: argparse.Namespace) -> Requested:
    return Requested(**{option.name: getattr(args, option.name) for option in dataclasses.fields(Requested)})


def answered_samples(requested: Requested) -> list[Sample]:
    """The scored answers of an evaluation, which runs unless they exist. LaunchError when it fails."""
    config = evaluation_config(requested, scores=True)
    if status := _make_answers(config, fresh=False, dry_run=False):
        raise LaunchError(f"the evaluation ended with exit code {status}", code="launch.cannot_start")
    return list(read_samples(RunPaths.of(config).answers).values())


def _make_answers(config: PPOConfig, *, fresh: bool, dry_run: bool) -> int:
    launched = with_attached_servers(config, os.environ)
    raise_problems(list(function_problems(launched, has_script=False)))
    paths, line = RunPaths.of(config), StatusLine()
    if fresh and paths.root.is_dir() and not dry_run:
        with run_lock(paths):
            paths.answers.unlink(missing_ok=True)
            paths.results.unlink(missing_ok=True)
    if paths.results.is_file() and not dry_run:
        line.say(f"areal: all answers exist in {paths.answers}; --fresh makes them again")
        return 0
    if num_before := len(read_samples(paths.answers)):
        line.say(f"areal: continues with {num_before} answers in {paths.answers}")
    request = Launch(config=launched, extras={}, script=None, dry_run=dry_run)
    status = launch(request, LocalCluster(this_machine(), preloads=not dry_run))
    if status == 0 and not dry_run:
        report = _report(config, [])
        if not report.num_failed:  # a later start makes the failed ones again
            write_atomic(paths.results, json.dumps(report.as_json(), indent=1).encode())
    return status


def _report(config: PPOConfig, ks: Sequence[int]) -> Report:
    samples = read_samples(RunPaths.of(config).answers, with_failed=True).values()
    evaluator = config.evaluator
    missing = evaluator.missing_reward
    return make_report(samples, correct_reward=evaluator.correct_reward, ks=ks, missing_reward=missing)


# Scores of generations that were made elsewhere.

_MAX_ROWS_AT_ONCE = 64


def run_score(words: Sequence[str]) -> int:
    """`areal score FILE [--config FILE] [key=value ...]`: prints the metrics and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="areal score",
        usage="%(prog)s FILE.jsonl [--config FILE.yaml] [key=value ...] [--column NAME] [-k 1,4] [-o OUT] [--json]",
        description="Score generations with the reward functions of a configuration: reward_fn=gsm8k, or any other.",
    )
    parser.add_argument("file", type=Path, help="one JSON object a line: the answer or answers, and the row")
    add_config_arguments(parser)
    parser.add_argument("--column", default="", help="where the answers are; without it: output, completion, response")
    parser.add_argument("-k", type=parsed_ks, default=[], metavar="1,4", help="the k of pass@k; default: powers of two")
    parser.add_argument("-o", dest="output", type=Path, metavar="OUT", help="write each answer with its score, JSONL")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_intermixed_args(words)
    config = load_settings(args.files, args.overrides)
    samples = read_generations(args.file, args.column)
    has_tokenizer = config.tokenizer_path or config.actor.path != "none"
    tokenizer = tokenizer_of(config, config.actor.path) if has_tokenizer else None
    scored = asyncio.run(score(samples, config, answer_function(config), tokenizer))
    if args.output is not None:
        write_samples(args.output, scored)
    report = make_report(scored, correct_reward=config.evaluator.correct_reward, ks=args.k)
    sys.stdout.write(json.dumps(report.as_json(), indent=1) + "\n" if args.json else table(report))
    return 0


async def score(
    samples: Sequence[Sample], config: PPOConfig, answer_of: AnswerFn, tokenizer: Tokenizer | None = None
) -> list[Sample]:
    """The samples with rewards; a row that cannot be scored gets the error. Without a tokenizer the reward functions
    get no token ids. Raises the last error when the first rows all fail."""
    scorer = Scorer(config.reward_fn, config.reward)
    scored: list[Sample] = []
    num_failed = 0
    rows = iter(list(rows_of(samples)))

    async def work() -> None:
        nonlocal num_failed
        for row in rows:
            try:
                scored.extend(await _score_row(scorer, row, answer_of, tokenizer, config.reward.source_key))
            except (InputError, RewardError) as error:
                num_failed += 1
                if num_failed >= MAX_FIRST_FAILURES and len(scored) == 0:
                    raise
                failures.append(error)
                failed.extend(dataclasses.replace(sample, error=f"{error} [{error.code}]") for sample in row)

    failures: list[ArealError] = []
    failed: list[Sample] = []
    try:
        scorer.check_rows([sample.data for sample in samples])
        async with asyncio.TaskGroup() as group:
            for index in range(_MAX_ROWS_AT_ONCE):
                group.create_task(work(), name=f"score-{index}")
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await scorer.aclose()
    if not scored:
        raise failures[-1]
    return scored + failed


async def _score_row(
    scorer: Scorer, row: Sequence[Sample], answer_of: AnswerFn, tokenizer: Tokenizer | None, source_key: str
) -> list[Sample]:
    first = row[0]
    prompt_ids = [] if tokenizer is None else tokenizer.encode(first.prompt, add_special_tokens=False)
    answers = [
        (sample.output, [] if tokenizer is None else tokenizer.encode(sample.output, add_special_tokens=False))
        for sample in row
    ]
    scores = await scorer.score(first.prompt, prompt_ids, answers, first.data)
    return [
        dataclasses.replace(
            sample,
            source=sample.source or source_of(sample.data, source_key),
            reward=score.reward,
            answer=answer_of(sample.output),
            metrics={f"reward/{name}": value for name, value in score.metrics.items()},
            error="",
        )
        for sample, score in zip(row, scores, strict=True)
    ]
