"""Checks what the reward of each source of a dataset pays for, before a run: for right, changed and wrong answers.

Functions run in the reward pool, environments in their worker, each with its time limit.
"""

import asyncio
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import orjson

from areal.agent.agent_run import first_messages
from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.api.data import row_json
from areal.api.errors import ArealError, ConfigError
from areal.api.registry import registered
from areal.api.workflow import RolloutWorkflow
from areal.data.chat import EncodedPrompt
from areal.data.dataset import load_rows
from areal.data.images import PromptImages
from areal.data.tokenizer import tokenizer_of
from areal.environments.process import EnvironmentFailed
from areal.environments.workflow import EnvironmentWorkflow
from areal.reward.pool import RewardPool, pool_size
from areal.reward.table import reward_table
from areal.trainer.first_row import Trial
from areal.workflow.registry import build_workflow

SLOW_S = 1.0  # Mean time of a call that is reported.
_REFUSAL = "I'm sorry, but I can't help with that."
_WRONG = {"empty": "", "yes": "yes", "zero": "0", "refusal": _REFUSAL}
_CHANCE = 0.05  # Share of rows in which a wrong answer may be right by chance: it is that of another row, or a prompt.
_FORM_ROWS = 4
_QUICK_SOURCE_S = 2.0  # A quick check of a source starts no further row after this time.
_FATAL = ("env.not_found", "env.server_died")
_REFERENCES = (
    "answer",
    "solution",
    "ground_truth",
    "reference",
    "reference_answer",
    "canonical_solution",
    "target",
    "label",
)
FORMS = {
    "text": "{}", "box": "\\boxed{{{}}}", "tags": "<answer>{}</answer>", "brackets": "[{}]", "hashes": "#### {}",
    "block": "```python\n{}\n```",
    "thought": "<think>\nThis follows from the question.\n</think>\n<answer>{}</answer>",
}  # fmt: skip
"""How an answer is written; the first one in which references score highest is that of a source."""


@dataclass(frozen=True, slots=True)
class Call:
    value: float  # 0.0 where `problem` is not empty.
    seconds: float
    problem: str = ""


class Scores(Protocol):
    """What scores the rows of a dataset."""

    parallel: int  # Rows at the same time.

    def source(self, row: Mapping[str, Any]) -> str: ...
    async def question(self, row: dict[str, Any]) -> str: ...
    async def reference(self, row: dict[str, Any]) -> str | None: ...
    async def score(self, row: dict[str, Any], texts: Sequence[str]) -> list[Call]: ...

    async def after_json(self, row: dict[str, Any], texts: Sequence[str]) -> list[Call] | list[str]:
        """The same after a JSON round trip; or what the round trip changes, where all scores are after one."""
        ...

    def full(self, row: Mapping[str, Any]) -> float:
        """The score of a right answer."""
        ...

    async def aclose(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class SourceReport:
    """What was found in one source. Counts are rows; examples are short texts."""

    source: str
    rows: int
    form: str = ""  # One of FORMS.
    without_reference: int = 0
    right_below: int = 0
    changed_below: dict[str, int] = field(default_factory=dict[str, int])  # How many of `changed`, by kind of change.
    changed: dict[str, int] = field(default_factory=dict[str, int])
    wrong_as_right: dict[str, int] = field(
        default_factory=dict[str, int]
    )  # How many of `wrong`, by kind of wrong answer.
    wrong: dict[str, int] = field(default_factory=dict[str, int])
    differs: int = 0  # The same call gave two scores.
    changed_by_json: int = 0
    raises: int = 0
    calls: int = 0
    seconds: float = 0.0  # Mean of a call.
    longest_s: float = 0.0
    examples: dict[str, str] = field(default_factory=dict[str, str])  # One for each fault.

    @property
    def faults(self) -> list[str]:
        conditions = {
            "no_reference": self.without_reference, "right_below": self.right_below, "differs": self.differs,
            "changed_by_json": self.changed_by_json, "raises": self.raises, "slow": self.seconds > SLOW_S,
            "wrong_as_right": any(self._is_fault(kind, count) for kind, count in self.wrong_as_right.items()),
        }  # fmt: skip
        return [name for name, is_fault in conditions.items() if is_fault]

    @property
    def notices(self) -> list[str]:
        """What a strict reward does on purpose: one that compares texts refuses 7.0 where 7 is right."""
        return ["changed_below"] if any(self.changed_below.values()) else []

    def _is_fault(self, kind: str, count: int) -> bool:
        by_chance = _CHANCE * self.wrong[kind] if kind in ("other", "prompt") else 0
        return count > max(by_chance, 1 if by_chance and self.wrong[kind] > 1 else 0)

    def note(self, fault: str, text: str) -> None:
        self.examples.setdefault(fault, " ".join(text.split())[:400])


def changes(reference: str) -> dict[str, Callable[[Callable[[str], str]], str]]:
    """Ways to write a right answer that change nothing, by name: each is called with the form."""
    if "\n" in reference or len(reference) > 100:
        return {"sentence": lambda form: _sentence(form(reference))}
    ways: dict[str, Callable[[Callable[[str], str]], str]] = {
        "spaces": lambda form: f"  {form(f' {reference} ')}\n",
        "sentence": lambda form: _sentence(form(reference)),
    }
    if re.fullmatch(r"-?\d+(\.\d+)?", reference):
        ways["latex"] = lambda form: form(f"${reference}$")
        ways["unit"] = lambda form: form(f"{reference} cm")
        if "." not in reference:
            ways["decimal"] = lambda form: form(f"{reference}.0")
        if abs(float(reference)) >= 1000 and "." not in reference:
            ways["commas"] = lambda form: form(f"{int(reference):,}")
    return ways


def _sentence(answer: str) -> str:
    return f"I worked it out step by step.{chr(10) * 2 if chr(10) in answer else ' The answer is '}{answer}"


def reference_of(row: Mapping[str, Any]) -> str | None:
    """The reference answer among the columns of a row, as text."""
    inner = row.get("reward_model")
    for values in (row, inner if isinstance(inner, Mapping) else {}):
        for name in _REFERENCES:
            value = values.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, str | int | float) and str(value).strip():
                return str(value)
    return None


def _same(first: str, other: str) -> bool:
    first, other = ("".join(text.split()).casefold() for text in (first, other))
    try:
        return first == other or math.isclose(float(first), float(other))
    except ValueError:
        return False


class FunctionScores:
    """The reward functions of a configuration. Implements Scores."""

    def __init__(self, config: PPOConfig, trial_of: Callable[[dict[str, Any]], Trial]) -> None:
        self._table = reward_table(config.reward_fn, config.reward)
        self._pool = RewardPool(config.reward)
        self.parallel = 2 * pool_size(config.reward)
        self._config, self._trial_of = config, trial_of
        self._prompts: dict[int, EncodedPrompt] = {}

    def source(self, row: Mapping[str, Any]) -> str:
        return self._table.source(row)

    async def question(self, row: dict[str, Any]) -> str:
        messages = row.get("messages")
        content = messages[-1].get("content") if isinstance(messages, list) and messages else row.get("prompt")
        return content if isinstance(content, str) else self._prompt(row).text

    def _prompt(self, row: dict[str, Any]) -> EncodedPrompt:
        if id(row) not in self._prompts:
            self._prompts[id(row)] = self._trial_of(row).prompt() or EncodedPrompt("", [])
        return self._prompts[id(row)]

    async def reference(self, row: dict[str, Any]) -> str | None:
        return reference_of(row)

    def _columns(self, row: dict[str, Any]) -> dict[str, Any]:
        columns = self._trial_of(row).scored_row()
        if self._config.workflow != "agent":
            return columns
        messages = first_messages(row) if "messages" in row or "prompt" in row else []
        return columns | {"messages": messages, "format_errors": 0}

    async def score(self, row: dict[str, Any], texts: Sequence[str]) -> list[Call]:
        trial, prompt, columns = self._trial_of(row), self._prompt(row), self._columns(row)
        answers = [(text, trial.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        sums = [Call(0.0, 0.0)] * len(texts)
        for term in self._table.of(row):
            results = await self._pool.score_many(term.function, prompt.text, prompt.token_ids, answers, columns)
            sums = [
                Call(
                    before.value + term.weight * result.value,
                    before.seconds + result.seconds,
                    before.problem or ("" if result.status == "ok" else f"{term.metric} {result.message}"),
                )
                for before, result in zip(sums, results, strict=True)
            ]
        return sums

    async def after_json(self, row: dict[str, Any], texts: Sequence[str]) -> list[str]:
        columns = self._columns(row)
        again = orjson.loads(row_json(columns))
        return [name for name, value in columns.items() if not _is_kept(value, again.get(name))]

    def full(self, row: Mapping[str, Any]) -> float:
        weights = [term.weight for term in self._table.of(row)]
        return sum(weight for weight in weights if weight > 0)

    def is_scored(self, row: Mapping[str, Any]) -> bool:
        """False where every function is `none`, and the trainer gives the reward."""
        return any(term.function != registered("rewards", "none").target for term in self._table.of(row))

    async def aclose(self) -> None:
        await self._pool.aclose()


def _is_kept(value: Any, again: Any) -> bool:
    """Whether JSON keeps a value: not a tuple, a key that is no text, or a number that is not finite."""
    if isinstance(value, dict):
        return (
            isinstance(again, dict)
            and value.keys() == again.keys()
            and all(_is_kept(item, again[key]) for key, item in value.items())
        )
    if isinstance(value, list | tuple):
        return type(value) is type(again) and all(map(_is_kept, value, again))
    return not isinstance(value, str | int | float | None) or value == again


class EnvironmentScores:
    """The worker of an adapter with `reference`, `question`, `extracted` and `score`. Implements Scores."""

    parallel = 1

    def __init__(self, workflow: EnvironmentWorkflow, env: str) -> None:
        self._workflow, self._env = workflow, env

    def source(self, row: Mapping[str, Any]) -> str:
        return str(row.get("env") or self._env)

    async def _call(self, name: str, **arguments: Any) -> Any:
        return await self._workflow.worker.call(name, arguments, limit_s=self._workflow.timeout_s)

    async def question(self, row: dict[str, Any]) -> str:
        return await self._call("question", row=row)

    async def reference(self, row: dict[str, Any]) -> str | None:
        return await self._call("reference", row=row)

    async def score(self, row: dict[str, Any], texts: Sequence[str]) -> list[Call]:
        return [await self._scored(row, text, through_json=False) for text in texts]

    async def after_json(self, row: dict[str, Any], texts: Sequence[str]) -> list[Call]:
        return [await self._scored(row, text, through_json=True) for text in texts]

    async def _scored(self, row: dict[str, Any], text: str, *, through_json: bool) -> Call:
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        try:
            if (answer := await self._call("extracted", text=text)) is None:
                return Call(0.0, now_s() - began_s)
            value = await self._call("score", row=row, answer=answer, through_json=through_json)
        except EnvironmentFailed as error:
            if error.code in _FATAL:
                raise
            return Call(0.0, now_s() - began_s, f"raised {error}")
        return Call(float(value), now_s() - began_s)

    def full(self, row: Mapping[str, Any]) -> float:
        return 1.0

    async def aclose(self) -> None:
        await self._workflow.aclose()


async def check_source(scores: Scores, name: str, rows: Sequence[dict[str, Any]], *, is_quick: bool) -> SourceReport:
    """Check one source. `is_quick`: references and wrong answers only."""
    report = SourceReport(source=name, rows=len(rows))
    asked: list[_Asked] = []
    for row in rows:
        try:
            asked.append(_Asked(row, await scores.question(row), await scores.reference(row)))
        except EnvironmentFailed as error:
            if error.code in _FATAL:
                raise
            report.raises += 1
            report.note("raises", f"the question of {row}: {error}")
    report.without_reference = sum(asked_row.reference is None for asked_row in asked)
    report.form = await _best_form(scores, asked)
    check = _SourceCheck(scores, report, asked, is_quick)
    limit = asyncio.Semaphore(scores.parallel)

    now_s = asyncio.get_running_loop().time
    end_s = now_s() + _QUICK_SOURCE_S if is_quick else math.inf

    async def bounded(number: int) -> None:
        async with limit:
            if now_s() < end_s:
                await check.row(number)

    async with asyncio.TaskGroup() as group:
        for number in range(len(asked)):
            group.create_task(bounded(number))
    report.seconds /= max(report.calls, 1)
    if report.without_reference:
        report.note("no_reference", f"{report.without_reference} rows of {len(rows)} have none")
    shares = [f"{kind}: {paid} of {report.wrong[kind]}" for kind, paid in report.wrong_as_right.items() if paid]
    report.note("wrong_as_right", ", ".join(shares))
    if report.seconds > SLOW_S:
        report.note("slow", f"{report.seconds:.2f} s a call, the longest {report.longest_s:.2f} s")
    return report


class _Asked(NamedTuple):
    row: dict[str, Any]
    question: str
    reference: str | None


async def _best_form(scores: Scores, asked: Sequence[_Asked]) -> str:
    """The first of FORMS in which the references of some rows score highest; without one, in which `yes` does."""
    sums = dict.fromkeys(FORMS, 0.0)
    texts = [(asked_row.row, asked_row.reference) for asked_row in asked if asked_row.reference is not None] or [
        (asked_row.row, "yes") for asked_row in asked
    ]
    for row, text in texts[:_FORM_ROWS]:
        calls = await scores.score(row, [form.format(text) for form in FORMS.values()])
        for name, call in zip(FORMS, calls, strict=True):
            sums[name] += call.value
    return max(sums, key=lambda name: sums[name])


class _SourceCheck:
    def __init__(self, scores: Scores, report: SourceReport, asked: Sequence[_Asked], is_quick: bool) -> None:
        self._scores, self._report, self._asked, self._is_quick = scores, report, asked, is_quick

    def _form(self, text: str) -> str:
        return FORMS[self._report.form].format(text)

    async def row(self, number: int) -> None:
        """Score all texts of one row in one call, and count what is found."""
        row, _, reference = self._asked[number]
        wrong = self._wrong(number)
        changed = {} if reference is None or self._is_quick else changes(reference.strip())
        right = [] if reference is None else [self._form(reference)]
        again = [] if self._is_quick else [*right, *[text for kind, text in wrong if kind in ("yes", "zero")][-1:]]
        texts = [*right, *(text for _, text in wrong), *(way(self._form) for way in changed.values()), *again]
        calls = await self._scores.score(row, texts)
        self._count_calls(texts, calls)
        least = self._scores.full(row)
        if right and not calls[0].problem:
            if calls[0].value < least - 1e-6:
                self._report.right_below += 1
                self._report.note("right_below", f"{right[0]!r} scores {calls[0].value:g}")
            least = calls[0].value if calls[0].value > 0 else least
        at = len(right)
        self._count_wrong(wrong, calls[at : at + len(wrong)], least)
        at += len(wrong)
        self._count_changed(texts[at:], changed, calls[at : at + len(changed)], least)
        at += len(changed)
        if again:
            before = [calls[texts.index(text)] for text in again]
            self._report.differs += self._differ("differs", again, before, calls[at:])
            self._report.changed_by_json += await self._changes_by_json(row, again, calls[at:])

    def _wrong(self, number: int) -> list[tuple[str, str]]:
        """Wrong answers with their kind, as they are and in the form of the source."""
        _, question, reference = self._asked[number]
        others = [
            other
            for other in (self._asked[(number + step) % len(self._asked)].reference for step in (1, 2, 3))
            if other is not None and reference is not None and not _same(other, reference)
        ]
        plain = _WRONG | {"prompt": question}
        plain = {kind: text for kind, text in plain.items() if reference is None or not _same(text, reference)}
        candidates = list(plain.items())
        candidates += [(kind, self._form(text)) for kind, text in plain.items() if self._form(text) != text]
        return [*candidates, *(("other", self._form(other)) for other in others[:2])]

    def _count_calls(self, texts: Sequence[str], calls: Sequence[Call]) -> None:
        report = self._report
        report.calls += len(calls)
        report.seconds += sum(call.seconds for call in calls)
        report.longest_s = max(report.longest_s, *(call.seconds for call in calls))
        failed = [(text, call) for text, call in zip(texts, calls, strict=True) if call.problem]
        report.raises += bool(failed)
        for text, call in failed[:1]:
            report.note("raises", f"{text[:60]!r}: {call.problem}")

    def _count_wrong(self, wrong: Sequence[tuple[str, str]], calls: Sequence[Call], least: float) -> None:
        report, paid = self._report, dict[str, bool]()
        for (kind, text), call in zip(wrong, calls, strict=True):
            is_paid = not call.problem and call.value >= least - 1e-6
            paid[kind] = paid.get(kind, False) or is_paid
            if is_paid and kind not in ("other", "prompt"):
                report.note("wrong_as_right", f"{text[:80]!r} scores {call.value:g}")
        for kind, is_paid in paid.items():
            report.wrong[kind] = report.wrong.get(kind, 0) + 1
            report.wrong_as_right[kind] = report.wrong_as_right.get(kind, 0) + is_paid

    def _count_changed(
        self, texts: Sequence[str], kinds: Mapping[str, Any], calls: Sequence[Call], least: float
    ) -> None:
        report = self._report
        for kind, text, call in zip(kinds, texts, calls, strict=False):
            report.changed[kind] = report.changed.get(kind, 0) + 1
            is_below = not call.problem and call.value < least - 1e-6
            report.changed_below[kind] = report.changed_below.get(kind, 0) + is_below
            if is_below:
                report.note("changed_below", f"{text[:100]!r} scores {call.value:g}, not {least:g}")

    async def _changes_by_json(self, row: dict[str, Any], texts: Sequence[str], before: Sequence[Call]) -> bool:
        results = await self._scores.after_json(row, texts)
        calls = [result for result in results if isinstance(result, Call)]
        names = [result for result in results if isinstance(result, str)]
        if names:
            self._report.note("changed_by_json", f"the columns {', '.join(names)}")
        return bool(names) or self._differ("changed_by_json", texts[: len(calls)], before[: len(calls)], calls)

    def _differ(self, fault: str, texts: Sequence[str], before: Sequence[Call], after: Sequence[Call]) -> bool:
        for text, first, other in zip(texts, before, after, strict=True):
            if (first.value, bool(first.problem)) != (other.value, bool(other.problem)):
                seen = other.problem or f"{other.value:g}"
                self._report.note(fault, f"{text[:60]!r} scores {first.value:g}, then {seen}")
                return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCheck:
    """The rows of each source that are checked, and what scores them."""

    workflow: RolloutWorkflow
    scores: Scores
    rows: Mapping[str, Sequence[dict[str, Any]]]  # Keys are sources.

    @classmethod
    def of(cls, config: PPOConfig, *, num_rows: int, first: int | None = None) -> Self:
        """At most `num_rows` rows of each source of train_dataset. `first`: of about this number of rows that are read.

        ConfigError when the configuration has no rewards to check.
        """
        tokenizer = tokenizer_of(config, config.actor.path)
        images = PromptImages.of(config, tokenizer)
        workflow = build_workflow(config, tokenizer)
        rows = load_rows(config.train_dataset, default_split="train", tokenizer=tokenizer, first=first, images=images)

        def trial_of(row: dict[str, Any]) -> Trial:
            return Trial(config=config, tokenizer=tokenizer, workflow=workflow, images=images, row=row)

        if isinstance(workflow, EnvironmentWorkflow):
            if not workflow.scores_answers:
                text = f"workflow={workflow.adapter} scores episodes, not answers, so there is nothing to check here"
                raise ConfigError(text, code="reward.none_given")
            scores = EnvironmentScores(workflow, str(config.workflow_args.get("env", "")))
        elif config.reward_fn or config.reward.names_functions:
            scores = FunctionScores(config, trial_of)
            rows = [row for row in rows if scores.is_scored(row)]
        else:
            message = "no reward function is named, so there is nothing to check: set reward_fn or reward.fns"
            raise ConfigError(message, code="reward.none_given")
        rows_by_source: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            rows_by_source.setdefault(scores.source(row), []).append(row)
        chosen = {
            name: [group[at * len(group) // num_rows] for at in range(num_rows)] if len(group) > num_rows else group
            for name, group in rows_by_source.items()
        }
        return cls(workflow=workflow, scores=scores, rows=chosen)

    async def reports(self, *, is_quick: bool, say: Callable[[str], None] = lambda text: None) -> list[SourceReport]:
        """Check all sources; once."""
        try:
            reports: list[SourceReport] = []
            for number, (name, rows) in enumerate(self.rows.items(), 1):
                say(f"{number} of {len(self.rows)} sources: {name or 'all rows'}, {len(rows)} rows")
                reports.append(await check_source(self.scores, name, rows, is_quick=is_quick))
            return reports
        finally:
            await self.scores.aclose()
            await self.workflow.aclose()


_QUICK_ROWS, _QUICK_FIRST = 20, 500


def notice_of(reports: Sequence[SourceReport]) -> str:
    """One line on what a quick check has found; empty = nothing."""
    shown_faults = [
        (report, fault) for report in reports for fault in report.faults if fault not in ("no_reference", "slow")
    ]
    if not shown_faults:
        return ""
    shown = [
        f"{report.source or 'rows'}: {FAULTS[fault]}: {report.examples.get(fault, '')}"
        for report, fault in shown_faults
    ]
    more = f"; and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"the reward may pay for the wrong answers ({'; '.join(shown[:3])}{more}): see areal check-reward"


FAULTS = {
    "no_reference": "rows without a reference answer", "right_below": "a reference answer scores below a right one",
    "changed_below": "a harmless change of a right answer scores below it",
    "wrong_as_right": "a wrong answer scores like a right one", "differs": "the same call gives two scores",
    "changed_by_json": "JSON changes the row or its score", "raises": "a call fails", "slow": "a call is slow",
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Check a few rows of each source and print the notice, or nothing. Started by the launcher for a dry run."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what the user's code prints
    config = load_experiment(list(argv), allow_unknown_top_level=True)
    assert isinstance(config, PPOConfig)
    notice = ""
    with suppress(ArealError):  # the trial of the first row reports it, or nothing is named that could be checked
        check = RewardCheck.of(config, num_rows=_QUICK_ROWS, first=_QUICK_FIRST)
        notice = notice_of(asyncio.run(check.reports(is_quick=True)))
    os.write(answer, notice.encode())


if __name__ == "__main__":
    main(sys.argv[1:])
