"""`areal show`: what the model answered in the episodes of a run, how it was scored, and what became of it."""

import argparse
import itertools
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.api.errors import ArealError, InputError
from areal.data.image_files import ImageFiles
from areal.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of
from areal.ledger.audit import ledger_folder
from areal.ledger.show import EpisodeRecord, Sample, Samples, show_episode, show_step
from areal.observe.causes import causes_text
from areal.replay.recorded import read_metrics
from areal.system.run_paths import RunPaths, existing_run

# One answer of a run as facts for JSON, and as lines for people.

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REPEATED = re.compile(r"(<[^<>\s]+>)\1+")  # The placeholders of an image.
LEVELS = (-0.1, -0.7, -2.3)
_COLORS = tuple(zip((*LEVELS, -math.inf), (32, 36, 33, 31), strict=True))
"""Lowest log-probability and terminal colour: probabilities above 0.9, 0.5, 0.1, and the rest."""
_VERSION = "; <vN> = from here policy version N"
_LEGEND = f"log-probability: green > -0.1, cyan > -0.7, yellow > -2.3, red below; grey = not in the loss{_VERSION}"
_PLAIN_LEGEND = f"a token in the loss is followed by {{log-probability}}{_VERSION}"
MAX_COLUMN = 500  # Maximum characters of a dataset column in text; JSON has all.


def facts_of(
    record: EpisodeRecord, sample: Sample | None, tokenizer: Tokenizer | None, *, tokens: bool
) -> dict[str, Any]:
    """What is known of an answer, JSON-ready. `sample` None: its tokens are not recorded."""
    facts: dict[str, Any] = {
        "episode": record.episode, "state": record.state, "reason": record.reason, "step": record.step,
        "row": record.row, "epoch": record.epoch, "stats": record.stats,
    }  # fmt: skip
    if sample is None:
        return facts
    made = [version for version in sample.versions if version >= 0]
    spans = [
        {"generated": generated, "text": _text(sample.token_ids[first:end], tokenizer)}
        | ({"turn": sample.turns[first]} if sample.turns and sample.turns[first] >= 0 else {})
        for generated, first, end in sample.spans()
    ]
    answers = [ids for generated, *edges in sample.spans() if generated for ids in [sample.token_ids[slice(*edges)]]]
    facts |= {
        "trajectory": sample.number,
        "reward": None if math.isnan(sample.reward) else sample.reward,
        "reward_parts": sample.parts,
        "values": dict(sample.columns),
        "versions": [min(made), max(made)] if made else None,
        "stop_reason": "stop" if sample.finished else "length",
        "num_tokens": len(sample.token_ids),
        "num_generated": len(made),
        "num_in_loss": sum(sample.in_loss),
        "prompt": "" if spans[0]["generated"] else spans[0]["text"],
        "answer": _text(answers[-1], tokenizer, plain=True) if answers else "",
        "spans": spans,
        "images": [{"sha256": image.sha256, "grid": image.grid} for image in sample.images],
    }
    if sample.session is not None:
        facts["session"] = _session(sample.session)
        facts["without_reward"] = [_session(session) for session in sample.without_reward]
    if tokens:
        columns = zip(sample.token_ids, sample.in_loss, sample.logprobs, sample.versions, strict=True)
        facts["tokens"] = [
            {
                "id": token,
                "text": _text([token], tokenizer),
                "in_loss": bool(mask),
                "logprob": logprob,
                "version": version,
            }
            for token, mask, logprob, version in columns
        ]
    return facts


def _session(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the session of an agent: each tool call with its result, where the dialogue has one."""
    results = {
        message["tool_call_id"]: message.get("content")
        for message in recorded["messages"]
        if message.get("role") == "tool"
    }
    turns = [
        {
            "reward": turn["reward"],
            "calls": [{**call["function"], "result": results.get(call["id"])} for call in turn["calls"]],
        }
        for turn in recorded["turns"]
    ]
    return {name: value for name, value in recorded.items() if name != "messages"} | {"turns": turns}


def _text(token_ids: Sequence[int], tokenizer: Tokenizer | None, *, plain: bool = False) -> str:
    """`plain`: without special tokens, as a reward function receives it."""
    if tokenizer is None:
        return " ".join(map(str, token_ids))
    return tokenizer.decode(list(token_ids), skip_special_tokens=plain)


def title_of(facts: dict[str, Any]) -> str:
    """The episode, what became of it, and its row."""
    where = f", step {facts['step']}" if facts["step"] is not None else ""
    row = f", row {facts['row']} of epoch {facts['epoch']}" if facts["row"] is not None else ""
    reason = f" ({facts['reason']})" if facts["reason"] else ""
    number = f", answer {facts['trajectory']}" if "trajectory" in facts else ""
    return f"episode {facts['episode']}{number}: {facts['state']}{reason}{where}{row}"


def sample_lines(facts: dict[str, Any]) -> Iterator[str]:
    yield _paint(f"== {title_of(facts)}", 1)
    for name, value in facts.get("columns", {}).items():
        yield f"   {name}: {safe(str(value))[:MAX_COLUMN]}"
    if "trajectory" not in facts:
        yield "   its tokens are not recorded (rollout.keep_rejected keeps those of the newest rejected episodes)"
        yield ""
        return
    yield f"   {scored(facts)}"
    for image in facts["images"]:
        time, height, width = image["grid"]
        yield f"   image {image.get('file', image['sha256'])} ({time} x {height} x {width} patches)"
    if session := facts.get("session"):
        yield f"   {safe(_session_text(session))}"
    if "tokens" in facts:
        yield from _token_lines(facts["tokens"])
    else:
        for place, span in enumerate(facts["spans"]):
            title = _turn_title(facts, span) if span["generated"] else "inserted" if place else "prompt"
            yield _paint(f"-- {safe(title)}", 2)
            yield safe(_REPEATED.sub(_counted, span["text"]) if facts["images"] else span["text"])
    for other in facts.get("without_reward", ()):
        yield f"   without a reward: {safe(_session_text(other))}"
    yield ""


def _counted(match: re.Match[str]) -> str:
    return f"{match[1]} x {len(match[0]) // len(match[1])}"


def _session_text(session: Mapping[str, Any]) -> str:
    num_calls = sum(len(turn["calls"]) for turn in session["turns"])
    counts = {
        "malformed tool calls": session["malformed_calls"],
        "retries": session["retries"],
        "forks": session["forks"],
        "drifts": session["drifts"],
        **{f"refused as {code}": count for code, count in session["refused"].items()},
    }
    counted = [f"turns {len(session['turns'])}", f"tool calls {num_calls}"]
    counted += [f"{name} {count}" for name, count in counts.items() if count]
    why = f"; {session['status']}: {session['message']}" if session["message"] else ""
    return f"session {session['session']}: {', '.join(counted)}{why}"


def _turn_title(facts: Mapping[str, Any], span: Mapping[str, Any]) -> str:
    """The heading of generated tokens. Of an agent: the number of the turn, its reward, its tool calls and results."""
    if "turn" not in span or "session" not in facts:
        return "answer"
    turn = facts["session"]["turns"][span["turn"]]
    reward = "" if turn["reward"] is None else f", reward {turn['reward']:g}"
    calls = "; ".join(f"{call['name']}({call['arguments']}) = {call['result']}"[:MAX_COLUMN] for call in turn["calls"])
    return f"turn {span['turn']}{reward}" + (f": {calls}" if calls else "")


def scored(facts: dict[str, Any]) -> str:
    """Reward, length, versions and end of an answer."""
    reward = "not scored" if facts["reward"] is None else f"reward {facts['reward']:g}"
    if parts := facts["reward_parts"]:
        reward += f" ({', '.join(f'{name} {value:g}' for name, value in parts.items())})"
    reward += "".join(f", {name} {'none' if v is None else f'{v:g}'}" for name, v in facts["values"].items())
    low, high = facts["versions"] or (None, None)
    versions = "no version" if low is None else f"version {low}" if low == high else f"versions {low} to {high}"
    return f"{reward}; {facts['num_generated']} generated tokens by {versions}; ended by {facts['stop_reason']}"


def _token_lines(tokens: Sequence[dict[str, Any]]) -> Iterator[str]:
    in_color = _uses_color()
    version, parts = -1, list[str]()
    for token in tokens:
        if token["version"] >= 0 and token["version"] != version:
            version = token["version"]
            parts.append(_paint(f"<v{version}>", 35))
        text = safe(token["text"])
        if not token["in_loss"]:
            parts.append(_paint(text, 90))
        elif in_color:
            parts.append(_paint(text, next(color for low, color in _COLORS if token["logprob"] >= low)))
        else:
            parts.append(f"{text}{{{token['logprob']:.2f}}}")
    yield "".join(parts)
    yield _paint(_LEGEND if in_color else _PLAIN_LEGEND, 2)


def _uses_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _paint(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text and _uses_color() else text


def safe(text: str) -> str:
    """Text of a model without characters that control a terminal."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


_LIMIT = 10
Found = tuple[EpisodeRecord, Sample | None]  # An episode with one of its trajectories; None when none is recorded.


def parse_question(words: Sequence[str]) -> argparse.Namespace:
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
    question = parser.parse_args(words)
    if question.reason is not None and {question.episode, question.step, question.best, question.worst} != {None}:
        parser.error("--reason selects rejected and failed episodes: not with --episode, --step, --best or --worst")
    return question


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


@dataclass(frozen=True)
class _Run:
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
        trajectories = samples.trajectories(record)
        yield from ((record, sample) for sample in trajectories or [None])


def _first_of_each_episode(entries: Iterable[Found]) -> Iterator[Found]:
    """One answer of each episode: the answers to one row are often alike."""
    seen = set[int]()
    for record, sample in entries:
        if record.episode not in seen:
            seen.add(record.episode)
            yield record, sample


def _limit(question: argparse.Namespace) -> int | None:
    chosen = question.limit or question.best or question.worst
    return chosen or (None if question.episode is not None else _LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers that a question selects."""

    samples: list[dict[str, Any]]
    """The facts of each, JSON-ready."""
    more: bool
    """There are more than the limit."""
    notice: str
    """Why token ids are shown in place of text; empty = text is shown."""


def answers_of(question: argparse.Namespace, folder: Path) -> Answers:
    """The answers in the ledger `folder` to a parsed command line of `areal show`. Raises LedgerError."""
    run, samples = _Run(question), Samples.read(folder)
    selected = _select(samples, question)
    if question.grep is not None:
        selected = (
            entry for entry in selected if entry[1] and question.grep in run.tokenizer.decode(list(entry[1].token_ids))
        )
    if question.best or question.worst:
        selected = _first_of_each_episode(selected)
    limit = _limit(question)
    chosen = list(itertools.islice(selected, None if limit is None else limit + 1))
    is_more, chosen = limit is not None and len(chosen) > limit, chosen[:limit]
    tokenizer, notice = _tokenizer_of(run) if any(sample for _, sample in chosen) else (None, "")
    shown = [
        facts_of(record, sample, tokenizer, tokens=question.tokens)
        | ({"columns": run.columns(record, samples.num_rows)} if question.row else {})
        for record, sample in chosen
    ]
    return Answers(samples=shown, more=is_more, notice=notice)


def show(words: Sequence[str]) -> int:
    question = parse_question(words)
    folder = ledger_folder(question.run)
    answers = answers_of(question, folder)
    if answers.notice:
        sys.stderr.write(f"areal: {answers.notice}\n")
    shown = answers.samples
    if question.images is not None:
        _write_images(shown, ImageFiles(folder.parent / "images"), question.images)
    history = _history(folder, question)
    if question.json:
        result = {"run": str(question.run), "samples": shown, "more": answers.more} | (
            {"history": history} if history else {}
        )
        sys.stdout.write(orjson.dumps(result, option=orjson.OPT_INDENT_2, default=repr).decode() + "\n")
        return 0
    lines = [*history, *itertools.chain.from_iterable(sample_lines(facts) for facts in shown)]
    if not shown:
        lines.append("no episode matches")
    elif answers.more and not (question.best or question.worst):
        lines.append(f"there are more: --limit N prints more than {_limit(question)}")
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
    if question.episode is not None:
        return show_episode(folder, question.episode)
    if question.step is None:
        return []
    metrics = read_metrics(RunPaths(folder.parent).metrics)
    causes = causes_text(row for step, row in sorted(metrics.items()) if step <= question.step + 1)
    return [*show_step(folder, question.step), *filter(None, [causes])]


def _tokenizer_of(run: _Run) -> tuple[Tokenizer | None, str]:
    """The tokenizer, or None and why there is none: token ids are shown in its place."""
    try:
        return run.tokenizer, ""
    except ArealError as error:
        return None, f"{error}; showing token ids (--tokenizer PATH names another tokenizer)"
