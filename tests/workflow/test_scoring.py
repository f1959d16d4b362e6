"""Several reward functions make one reward: weights, sources, what filters look at, and what a failed call means."""

import asyncio
import logging
import math
from pathlib import Path

import pytest

from areal.api.config import RewardConfig
from areal.api.errors import ConfigError, InputError, RewardError
from areal.workflow.scoring import Scorer
from tests.expect import raises_code

FILE = str(Path(__file__).parent / "rewards_for_scoring.py")
LENGTH, BANGS, DETAILED = f"{FILE}:length", f"{FILE}:bangs", f"{FILE}:detailed"


@pytest.fixture
async def scorer_of():
    made = []

    def make(reward_fn="", **options):
        made.append(Scorer(reward_fn, RewardConfig(**({"workers": 1, "timeout_s": 200.0} | options))))
        return made[-1]

    yield make
    for scorer in made:
        await scorer.aclose()


async def score(scorer, *answers, **row):
    return await scorer.score("2+2=", [1, 2], [(answer, [3]) for answer in answers], row)


async def test_the_reward_is_the_weighted_sum_and_every_function_is_a_metric(scorer_of):
    """The rewards are those of cosmos-rl 0.4.7, cosmos_rl/dispatcher/algo/reward.py Reward.compute_reward."""
    scorer = scorer_of(fns={LENGTH: 0.5, BANGS: -2.0})
    scores = await score(scorer, "ab", "abc!", "!!a")
    assert [actual.reward for actual in scores] == [1.0, 0.0, -2.5]
    lengths, bangs = (2.0, 4.0, 3.0), (0.0, 1.0, 2.0)
    expected = [{"length": length, "bangs": count} for length, count in zip(lengths, bangs, strict=True)]
    assert [actual.metrics for actual in scores] == expected
    assert scorer.stats({}, scores, reward=-0.5) == {"reward/length": 3.0, "reward/bangs": 1.0}


async def test_the_short_form_is_one_function_of_weight_one_without_metrics_of_its_own(scorer_of):
    scorer = scorer_of(LENGTH)
    scores = await score(scorer, "abc")
    assert (scores[0].reward, scores[0].filter_reward, scores[0].metrics) == (3.0, 3.0, {})
    assert scorer.stats({"data_source": "a"}, scores, reward=3.0) == {}


async def test_a_mapping_gives_the_score_and_further_numbers(scorer_of):
    scorer = scorer_of(fns={DETAILED: 2.0})
    scores = await score(scorer, "HO!", "a!b")
    assert [item.reward for item in scores] == [6.0, 6.0]
    assert scores[0].metrics == {"detailed": 3.0, "detailed/bangs": 1.0, "detailed/loud": 1.0}  # pred is no number
    assert scorer.stats({}, scores, reward=6.0)["reward/detailed/loud"] == 0.5
    short = scorer_of(DETAILED)
    assert (await score(short, "HO!"))[0].metrics == {"detailed/bangs": 1.0, "detailed/loud": 1.0}


async def test_what_a_function_logs_is_a_metric(scorer_of):
    (result,) = await score(scorer_of(f"{FILE}:logging"), "a b c")
    assert (result.reward, result.metrics) == (5.0, {"logging/spaces": 2.0})


async def test_filters_look_at_the_functions_named_for_them(scorer_of):
    filtered = await score(scorer_of(fns={LENGTH: 0.5, BANGS: 2.0}, filter_on=[BANGS]), "ab", "abc!")
    assert [item.reward for item in filtered] == [1.0, 4.0]
    assert [item.filter_reward for item in filtered] == [0.0, 2.0]
    everything = await score(scorer_of(fns={LENGTH: 0.5, BANGS: 2.0}), "ab", "abc!")
    assert [item.filter_reward for item in everything] == [1.0, 4.0]


async def test_the_source_of_a_row_chooses_its_functions(scorer_of):
    scorer = scorer_of(fns={LENGTH: 1.0}, by_source={"loud": {BANGS: 3.0}, "7": {BANGS: 1.0}}, source_key="origin")
    assert (await score(scorer, "ab!", origin="loud"))[0].reward == 3.0
    assert (await score(scorer, "ab!", origin=7))[0].reward == 1.0
    other = await score(scorer, "ab!", origin="quiet")
    assert (other[0].reward, other[0].metrics) == (3.0, {"length": 3.0})
    assert scorer.stats({"origin": "quiet"}, other, reward=3.0) == {"reward/length": 3.0, "reward_by_source/quiet": 3.0}


async def test_the_numbers_of_a_mapping_are_parts_of_each_answer(scorer_of, tmp_path):
    file = tmp_path / "mapped.py"
    file.write_text("def graded(prompt, completion, *ids, **row): return {'score': 1.0, 'form': len(completion)}")
    short = await score(scorer_of(f"{file}:graded"), "a", "bcd")
    assert [item.parts for item in short] == [{"graded/form": 1.0}, {"graded/form": 3.0}]
    (weighted,) = await score(scorer_of(fns={f"{file}:graded": 2.0}), "a")
    assert weighted.parts == weighted.metrics == {"graded": 1.0, "graded/form": 1.0}


async def test_a_row_whose_source_has_no_function_is_named(scorer_of):
    scorer = scorer_of(by_source={"a": {LENGTH: 1.0}, "b": {BANGS: 1.0}})
    with raises_code("reward.unknown_source", "'c'", "(a, b)"):
        await score(scorer, "x", data_source="c")
    with raises_code("reward.unknown_source", "['answer', 'prompt']"):
        scorer.check_row({"prompt": "?", "answer": "!"})
    rows = [{"data_source": "a"}, {"data_source": "b"}, {"data_source": "c"}]
    scorer.check_rows(rows[:2])
    with raises_code("reward.unknown_source", "row 2 ", "'c'"):
        scorer.check_rows(rows)
    scorer_of(LENGTH).check_row({"prompt": "no source, and none needed"})
    scorer_of(LENGTH).check_rows(1 / 0 for _ in "not looked at where sources do not matter: it may be long")
    with raises_code("reward.unknown_source"):  # a typing error in source_key must not mean the default
        scorer_of(LENGTH, by_source={"a": {BANGS: 1.0}}).check_row({"source": "a"})


async def test_a_null_source_counts_as_none(scorer_of):
    with raises_code("reward.unknown_source"):
        scorer_of(LENGTH, by_source={"a": {BANGS: 1.0}}).check_row({"data_source": None})


async def test_code_whose_tests_may_outlast_the_time_limit_is_refused_before_anything_starts(scorer_of):
    def refuse(values, row, timeout_s, fns):
        with pytest.raises(InputError, match=values) as error:
            scorer_of(timeout_s=timeout_s, **fns).check_row(row)
        assert error.value.code == "workflow.reward_timeout"

    code = {"reward_fn": "code"}
    refuse(r"reward.timeout_s=12 .*\(10 s.*\(5 s", {"tests": []}, 12.0, code)
    refuse(r"30 s", {"data_source": "a", "total_time_limit_s": 30}, 15.0, {"by_source": {"a": {"code": 1.0}}})
    refuse(r"10 s", {"tests": [], "total_time_limit_s": None}, 12.0, code)
    scorer_of("code", timeout_s=15.0).check_row({"tests": []})
    scorer_of("code", timeout_s=8.0).check_row({"tests": [], "total_time_limit_s": 3})
    scorer_of("code", timeout_s=8.0, on_error="zero").check_row({"tests": []})
    scorer_of("exact", timeout_s=1.0).check_row({"total_time_limit_s": 30})


async def test_a_function_that_cannot_be_loaded_ends_the_episode_whatever_on_error_says(scorer_of, tmp_path):
    """Nothing could ever be scored: a run of zeros would look like a policy that learns nothing."""
    file = tmp_path / "needs_more.py"
    for text, value in (("import a_library_that_is_not_here\n", "a_library_that_is_not_here"), ("\n", "needs_more.py")):
        file.write_text(f"{text}async def f(*answer): return 1.0")
        scorer = scorer_of(fns={LENGTH: 1.0, f"{file}:f": 1.0}, on_error="zero")
        with pytest.raises(RewardError, match=value) as error:
            await score(scorer, "a")
        assert error.value.code == "workflow.reward_failed"


async def test_a_failing_function_is_named_and_fails_the_episode_or_counts_zero(scorer_of, caplog):
    fns = {LENGTH: 1.0, f"{FILE}:fails_on_bad": 10.0, f"{FILE}:hangs_on_bad": 100.0}
    with raises_code("workflow.reward_failed", "rewards_for_scoring.py:fails_on_bad ", "ValueError: bad answer"):
        await score(scorer_of(fns=dict(list(fns.items())[:2])), "good", "bad")
    with caplog.at_level(logging.WARNING):
        scores = await score(scorer_of(fns=fns, on_error="zero", timeout_s=3.0), "good", "bad", "fine")
    assert [item.reward for item in scores] == [4.0 + 110.0, 3.0, 4.0 + 110.0]
    assert [item.num_errors for item in scores] == [0, 2, 0]
    assert scores[1].metrics == {"length": 3.0, "fails_on_bad": 0.0, "hangs_on_bad": 0.0}
    # verl 0.9.1, verl/workers/reward_manager/prime.py run_reward_scoring of a function that fails like fails_on_bad
    assert [item.metrics["fails_on_bad"] for item in scores] == [1.0, 0.0, 1.0]
    warnings = [text for text in caplog.messages if "count as 0" in text]
    assert sum("fails_on_bad" in text for text in warnings) == 1
    assert sum("hangs_on_bad" in text and "3 s" in text for text in warnings) == 1


async def test_a_failure_is_logged_once_for_each_function_and_way_to_fail(scorer_of, caplog):
    lenient = scorer_of(
        fns={f"{FILE}:{name}": 1.0 for name in ("fails_on_bad", "fails_too", "nan_on_bad")}, on_error="zero"
    )
    with caplog.at_level(logging.WARNING):
        assert [item.num_errors for item in await score(lenient, "bad", "bad", "bad")] == [3, 3, 3]
    warnings = [text for text in caplog.messages if "count as 0" in text]
    names = sorted(text.split()[2].rpartition(":")[2] for text in warnings)
    assert names == ["fails_on_bad", "fails_too", "nan_on_bad"]


async def test_a_failure_ends_the_calls_of_the_other_functions(scorer_of, tmp_path):
    """With one worker behind each: the episode must not wait for a function whose number nobody needs."""
    fns = {f"{FILE}:waits": 1.0, f"{FILE}:fails_after_the_other_began": 1.0}
    scorer = scorer_of(fns=fns, workers=2)
    with raises_code("workflow.reward_failed", "fails_after_the_other_began ", "too bad"):
        await asyncio.wait_for(score(scorer, "x", folder=str(tmp_path)), 200.0)
    (tmp_path / "go").touch()
    assert (await score(scorer_of(LENGTH), "abc"))[0].reward == 3.0


def test_a_configuration_without_reward_functions_is_refused():
    for reward_fn, config, path, code in [
        ("", RewardConfig(), "reward_fn", "reward.none_given"),
        ("exact", RewardConfig(fns={"gsm8k": 1.0}), "reward_fn: ", "reward.bad_section"),
        (math.log, RewardConfig(fns={"gsm8k": 1.0}), "reward_fn: ", "reward.bad_section"),
        ("", RewardConfig(fns={"exactt": 1.0}), "reward.fns: 'exactt'", "config.bad_reference"),
        ("", RewardConfig(by_source={"a": {"exactt": 1.0}}), "reward.by_source.a: 'exactt'", "config.bad_reference"),
        ("", RewardConfig(fns={"exact": 0.0}), "reward.fns: ", "reward.bad_section"),
        ("exact", RewardConfig(filter_on=["format"]), "reward.filter_on: 'format'", "reward.bad_section"),
    ]:
        with pytest.raises(ConfigError) as error:
            Scorer(reward_fn, config)
        assert str(error.value).startswith(path)
        assert error.value.code == code
