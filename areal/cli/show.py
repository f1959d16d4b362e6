"""`areal show`: what the model answered in the episodes of a run, how it was scored, and what became of it."""

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.api.errors import ArealError, InputError
from areal.cli.sample_text import facts_of, sample_lines
from areal.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of
from areal.ledger.audit import ledger_folder
from areal.ledger.samples import EpisodeRecord, Sample, Samples
from areal.ledger.show import show_episode, show_step
from areal.system.image_files import ImageFiles
from areal.system.run_paths import RunPaths, existing_run

_LIMIT = 10
Found = tuple[EpisodeRecord, Sample | None]
"""An episode with one of its trajectories; None when none is recorded."""


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="areal show",
        description="Print prompts, answers and rewards of a run, the newest first; without a choice the last ones.",
    )
    parser.add_argument("run", metavar="RUN", type=existing_run, help="folder of the run, or experiment/trial")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--episode", type=int, metavar="N", help="one episode with its history")
    what.add_argument("--step", type=int, metavar="N", help="the batch of a train step, counted from 0")
    what.add_argument(
        "--best", type=_count, metavar="K", help="K accepted answers with the highest rewards, one per episode"
    )
    what.add_argument(
        "--worst", type=_count, metavar="K", help="K accepted answers with the lowest rewards, one per episode"
    )
    what.add_argument("--rejected", action="store_true", help="rejected and failed episodes")
    parser.add_argument("--reason", metavar="TEXT", help="only rejected and failed ones whose reason has TEXT")
    parser.add_argument("--grep", metavar="TEXT", help="only those whose prompt or answer has TEXT")
    parser.add_argument("--limit", type=_count, metavar="N", help=f"at most N answers (default {_LIMIT})")
    parser.add_argument("--tokens", action="store_true", help="every token: log-probability, mask, version")
    parser.add_argument("--row", action="store_true", help="the other columns of the dataset row, such as the solution")
    parser.add_argument("--images", type=Path, metavar="DIR", help="write the images of these answers to this folder")
    parser.add_argument("--tokenizer", metavar="PATH", help="default: the tokenizer in the configuration of the run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    found = parser.parse_args(words)
    if found.reason is not None and {found.episode, found.step, found.best, found.worst} != {None}:
        parser.error("--reason selects rejected and failed episodes: not with --episode, --step, --best or --worst")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


@dataclass(frozen=True)
class _Run:
    """The parts of a run that are read when they are needed."""

    question: argparse.Namespace

    @cached_property
    def config(self) -> PPOConfig:
        folder = self.question.run
        path = RunPaths(folder.parent if folder.name == "ledger" else folder).config
        config = load_experiment(["--config", str(path)], allow_unknown_top_level=True)
        assert isinstance(config, PPOConfig)  # only such runs have a ledger
        return config

    @cached_property
    def tokenizer(self) -> Tokenizer:
        named = self.question.tokenizer
        return load_tokenizer(named) if named else tokenizer_of(self.config, self.config.actor.path)

    @cached_property
    def rows(self) -> Sequence[dict[str, Any]]:
        from areal.data.dataset import load_rows
        from areal.data.images import PromptImages

        images = PromptImages.of(self.config, self.tokenizer)
        return load_rows(self.config.train_dataset, default_split="train", tokenizer=self.tokenizer, images=images)

    def columns(self, record: EpisodeRecord, num_rows: int) -> dict[str, Any]:
        """The row of an episode without its prompt and images. InputError when the dataset is not that of the run."""
        if len(self.rows) != num_rows:
            message = f"train_dataset has {len(self.rows)} rows, the run had {num_rows}: --row needs the same data"
            raise InputError(message, code="data.other_rows")
        row = {} if record.row is None else self.rows[record.row]
        left_out = ("messages", "prompt", "input_ids", self.config.vision.image_key)
        return {name: value for name, value in row.items() if name not in left_out}


def _select(samples: Samples, question: argparse.Namespace) -> Iterable[Found]:
    if question.episode is not None:
        return _trajectories(samples, [samples.episode(question.episode)])
    if question.step is not None:
        return _trajectories(samples, samples.of_step(question.step))
    if question.best or question.worst:
        return ((sample.record, sample) for sample in samples.ranked(best=bool(question.best)))
    if question.rejected or question.reason is not None:
        return _trajectories(samples, samples.not_trained(question.reason or ""))
    return _trajectories(samples, (record for record in samples.newest() if record.payload is not None))


def _trajectories(samples: Samples, records: Iterable[EpisodeRecord]) -> Iterator[Found]:
    for record in records:
        found = samples.trajectories(record)
        yield from ((record, sample) for sample in found or [None])


def _first_of_each_episode(found: Iterable[Found]) -> Iterator[Found]:
    """One answer of each episode: the answers to one row are often alike."""
    seen = set[int]()
    for record, sample in found:
        if record.episode not in seen:
            seen.add(record.episode)
            yield record, sample


def _limit(question: argparse.Namespace) -> int | None:
    chosen = question.limit or question.best or question.worst
    return chosen or (None if question.episode is not None else _LIMIT)


def show(words: Sequence[str]) -> int:
    """Print the answers that the words choose; returns the exit status."""
    question = _parse(words)
    run, folder = _Run(question), ledger_folder(question.run)
    samples = Samples.read(folder)
    found = _select(samples, question)
    if question.grep is not None:
        found = (
            entry for entry in found if entry[1] and question.grep in run.tokenizer.decode(list(entry[1].token_ids))
        )
    if question.best or question.worst:
        found = _first_of_each_episode(found)
    limit = _limit(question)
    chosen = list(itertools.islice(found, None if limit is None else limit + 1))
    is_more, chosen = limit is not None and len(chosen) > limit, chosen[:limit]
    tokenizer, notice = _tokenizer_of(run) if any(sample for _, sample in chosen) else (None, "")
    if notice:
        sys.stderr.write(f"areal: {notice}\n")
    shown = [
        facts_of(record, sample, tokenizer, tokens=question.tokens)
        | ({"columns": run.columns(record, samples.num_rows)} if question.row else {})
        for record, sample in chosen
    ]
    if question.images is not None:
        _write_images(shown, ImageFiles(folder.parent / "images"), question.images)
    history = _history(folder, question)
    if question.json:
        result = {"run": str(question.run), "samples": shown, "more": is_more} | (
            {"history": history} if history else {}
        )
        sys.stdout.write(orjson.dumps(result, option=orjson.OPT_INDENT_2, default=repr).decode() + "\n")
        return 0
    lines = [*history, *itertools.chain.from_iterable(sample_lines(facts) for facts in shown)]
    if not chosen:
        lines.append("no episode matches")
    elif is_more and not (question.best or question.worst):
        lines.append(f"there are more: --limit N prints more than {limit}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _write_images(shown: list[dict[str, Any]], files: ImageFiles, target: Path) -> None:
    """Write the images of the answers to `target`, each once, and add their files to the facts. Raises InputError."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        for image in itertools.chain.from_iterable(facts.get("images", ()) for facts in shown):
            path = target / f"{image['sha256']}.png"
            path.write_bytes(files.read(image["sha256"]))
            image["file"] = str(path)
    except OSError as error:
        message = f"--images {target} cannot be written: {error.strerror or error}"
        raise InputError(message, code="command.not_written") from error


def _history(folder: Any, question: argparse.Namespace) -> list[str]:
    """What happened to the episode or the batch."""
    if question.episode is not None:
        return show_episode(folder, question.episode)
    return show_step(folder, question.step) if question.step is not None else []


def _tokenizer_of(run: _Run) -> tuple[Tokenizer | None, str]:
    """The tokenizer, or None and why there is none: token ids are shown in its place."""
    try:
        return run.tokenizer, ""
    except ArealError as error:
        return None, f"{error}; showing token ids (--tokenizer PATH names another tokenizer)"
