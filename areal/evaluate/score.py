"""The command `areal score`: scores generations that were made elsewhere with any reward function."""

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.api.config import PPOConfig
from areal.api.errors import ArealError, InputError, RewardError
from areal.data.tokenizer import Tokenizer, tokenizer_of
from areal.evaluate.samples import Sample, make_report, read_generations, rows_of, source_of, table, write_samples
from areal.evaluate.settings import add_config_arguments, load_settings, parsed_ks
from areal.reward.text import AnswerFn, answer_function
from areal.rollout.evaluation import MAX_FIRST_FAILURES
from areal.workflow.scoring import Scorer

_MAX_ROWS_AT_ONCE = 64


def run_command(words: Sequence[str]) -> int:
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
    given = parser.parse_intermixed_args(words)
    config = load_settings(given.config, given.overrides)
    samples = read_generations(given.file, given.column)
    has_tokenizer = config.tokenizer_path or config.actor.path != "none"
    tokenizer = tokenizer_of(config, config.actor.path) if has_tokenizer else None
    scored = asyncio.run(score(samples, config, answer_function(config), tokenizer))
    if given.output is not None:
        write_samples(given.output, scored)
    report = make_report(scored, correct_reward=config.evaluator.correct_reward, ks=given.k)
    sys.stdout.write(json.dumps(report.as_json(), indent=1) + "\n" if given.json else table(report))
    return 0


async def score(
    samples: Sequence[Sample], config: PPOConfig, answer_of: AnswerFn, tokenizer: Tokenizer | None = None
) -> list[Sample]:
    """The samples with rewards; a row that cannot be scored gets the error. Without a tokenizer the reward functions
    get no token ids. Raises the last error when the first rows all fail."""
    scorer = Scorer(config.reward_fn, config.reward)
    found: list[Sample] = []
    num_failed = 0
    rows = iter(list(rows_of(samples)))

    async def work() -> None:
        nonlocal num_failed
        for row in rows:
            try:
                found.extend(await _score_row(scorer, row, answer_of, tokenizer, config.reward.source_key))
            except (InputError, RewardError) as error:
                num_failed += 1
                if num_failed >= MAX_FIRST_FAILURES and len(found) == 0:
                    raise
                failures.append(error)
                failed.extend(dataclasses.replace(one, error=f"{error} [{error.code}]") for one in row)

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
    if not found:
        raise failures[-1]
    return found + failed


async def _score_row(
    scorer: Scorer, row: Sequence[Sample], answer_of: AnswerFn, tokenizer: Tokenizer | None, source_key: str
) -> list[Sample]:
    first = row[0]
    prompt_ids = [] if tokenizer is None else tokenizer.encode(first.prompt, add_special_tokens=False)
    answers = [
        (one.output, [] if tokenizer is None else tokenizer.encode(one.output, add_special_tokens=False)) for one in row
    ]
    scores = await scorer.score(first.prompt, prompt_ids, answers, first.data)
    return [
        dataclasses.replace(
            one,
            source=one.source or source_of(one.data, source_key),
            reward=found.reward,
            answer=answer_of(one.output),
            metrics={f"reward/{name}": value for name, value in found.metrics.items()},
            error="",
        )
        for one, found in zip(row, scores, strict=True)
    ]
