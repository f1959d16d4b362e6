"""Each check of a reward, with a reward that it flags and one that it does not."""

import pytest

from areal.environments.reasoning_gym import ReasoningGymWorkflow
from areal.trainer.reward_check import Call, EnvironmentScores, changes, check_source, notice_of, reference_of
from tests.environments.environment_kit import FAKES, build

ROWS = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(1500, 1512)]


def careful(row, text, state):
    """1 for the last number of the text, whatever is around it."""
    words = text.replace("$", "").replace(",", "").replace("cm", "").split()
    try:
        return float(float(words[-1]) == float(row["answer"]))
    except (IndexError, ValueError):
        return 0.0


def alternating(row, text, state):
    state[text] = state.get(text, 0) + 1
    return careful(row, text, state) * (1.0 if state[text] % 2 else 0.5)


def raising(row, text, state):
    return float(float(text.split()[-1] if text else 0) == float(row["answer"]))


class Scores:
    """Scores of a function of (row, text, state); a call that raises is a problem. Implements Scores."""

    parallel = 1

    def __init__(self, reward, *, after_json=None, seconds=0.0):
        self._reward, self._after_json, self._seconds, self._state = reward, after_json, seconds, {}

    def source(self, row):
        return ""

    async def question(self, row):
        return row["question"]

    async def reference(self, row):
        return reference_of(row)

    def _call(self, reward, row, text):
        try:
            return Call(reward(row, text, self._state), self._seconds)
        except ValueError as error:
            return Call(0.0, self._seconds, f"raised {error}")

    async def score(self, row, texts):
        return [self._call(self._reward, row, text) for text in texts]

    async def after_json(self, row, texts):
        return [self._call(self._after_json or self._reward, row, text) for text in texts]

    def full(self, row):
        return 1.0

    async def aclose(self):
        pass


def broken(row, text, state):
    raise ValueError("no score")


def equal(row, text, state):
    return float(text == row["answer"])


async def checked(reward, rows=ROWS, *, is_quick=False, **options):
    return await check_source(Scores(reward, **options), "sums", rows, is_quick=is_quick)


@pytest.mark.parametrize(
    ("reward", "options", "faults"),
    [
        (careful, {}, []),
        (equal, {}, []),
        (lambda *_: 1.0, {}, ["wrong_as_right"]),
        (lambda row, text, _: careful(row, text, _) or float("yes" in text), {}, ["wrong_as_right"]),
        (lambda row, text, _: 0.9 * careful(row, text, _), {}, ["right_below"]),
        (raising, {}, ["raises"]),
        (broken, {}, ["raises"]),
        (careful, {"after_json": lambda *_: 0.05}, ["changed_by_json"]),
        (careful, {"seconds": 1.5}, ["slow"]),
        (careful, {"seconds": 0.5}, []),
    ],
)
async def test_only_the_fault_of_a_reward_is_reported(reward, options, faults) -> None:
    report = await checked(reward, **options)
    assert report.faults == faults
    assert set(faults) <= set(report.examples)
    assert not (report.notices and reward is broken), "a call that fails gives no score to compare"


async def test_two_scores_of_one_call_are_reported() -> None:
    assert "differs" in (await checked(alternating)).faults


@pytest.mark.parametrize(("answers", "missing"), [(["7", "8"], 0), (["7", None], 1), ([None, " "], 2)])
async def test_rows_without_a_reference_are_counted(answers, missing) -> None:
    report = await checked(lambda row, text, _: float(bool(row["answer"]) and text.split()[-1:] == [row["answer"]]),
        [{"question": "q", "answer": answer} for answer in answers])  # fmt: skip
    assert (report.without_reference, "no_reference" in report.faults) == (missing, missing > 0)


async def test_a_wrong_answer_that_is_right_in_some_row_is_no_fault() -> None:
    rows = [{"question": "Is it?", "answer": "no" if number % 2 else "yes"} for number in range(12)]
    report = await checked(lambda row, text, _: float(text.split()[-1:] == [row["answer"]]), rows)
    assert (report.wrong["yes"], report.wrong_as_right["yes"], report.faults) == (6, 0, [])


async def test_a_quick_check_makes_no_changes_and_no_second_call() -> None:
    report = await checked(alternating, is_quick=True)
    assert (report.changed, report.differs, report.changed_by_json) == ({}, 0, 0)


async def test_the_notice_names_the_source_the_fault_and_an_example() -> None:
    notice = notice_of([await checked(lambda *_: 1.0, is_quick=True)])
    assert "sums: a wrong answer scores like a right one" in notice
    assert "areal check-reward" in notice
    assert notice_of([await checked(careful, is_quick=True)]) == ""


@pytest.mark.parametrize(
    ("reference", "kinds"),
    [
        ("7", {"spaces", "sentence", "latex", "unit", "decimal"}),
        ("-2.5", {"spaces", "sentence", "latex", "unit"}),
        ("1500", {"spaces", "sentence", "latex", "unit", "decimal", "commas"}),
        ("Paris", {"spaces", "sentence"}),
        ("def f():\n    pass", {"sentence"}),
    ],
)
def test_changes_are_those_that_fit_the_answer(reference, kinds) -> None:
    assert set(changes(reference)) == kinds


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ({"answer": 7}, "7"),
        ({"answer": ["a", "b"]}, "a"),
        ({"reward_model": {"ground_truth": "9"}}, "9"),
        ({"answer": ""}, None),
        ({"prompt": "7"}, None),
    ],
)
def test_the_reference_is_found_in_the_usual_columns(row, reference) -> None:
    assert reference_of(row) == reference


@pytest.mark.parametrize(("env", "faults"), [("sums", []), ("raising", ["raises"])])
async def test_an_environment_scores_the_extracted_answer(monkeypatch, env, faults) -> None:
    monkeypatch.chdir(FAKES)
    workflow = build(ReasoningGymWorkflow)
    rows = [{"env": env, "config": {}, "seed": 3, "index": index} for index in range(3)]
    try:
        report = await check_source(EnvironmentScores(workflow, ""), env, rows, is_quick=False)
    finally:
        await workflow.aclose()
    assert (report.form, report.faults, report.notices) == ("tags", faults, [] if faults else ["changed_below"])
