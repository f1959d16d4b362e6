"""The figures of a plan beside those of its run."""

import orjson
import pytest

from areal.api.errors import InputError
from areal.cli.predicted import against_plan, figure_text, read_plan

NAMES = ("step_s", "staleness_mean", "generated_tokens_per_s", "trained_tokens_per_s", "waits_batch", "waits_servers")


def plan_of(**means):
    return {"figures": {name: {"mean": means.get(name, 1.0), "low": 0.5, "high": 1.5} for name in NAMES}}


def test_the_newest_steps_beside_the_plan(tmp_path):
    path = tmp_path / "predicted.json"
    path.write_bytes(orjson.dumps(plan_of(step_s=2.0, waits_batch=0.2)))
    rows = [
        {"step": 0, "eval/sampled/reward": 0.1},
        {"seconds/step": 1.0, "seconds/wait_batch": 0.1, "rollout/staleness_mean": 1.0},
        {"seconds/step": 3.0, "seconds/wait_batch": 0.9, "rollout/staleness_mean": None},
    ]
    result = {figure.name: figure for figure in against_plan(read_plan(path), rows)}
    assert {name: (figure.planned, figure.measured) for name, figure in result.items()} == {
        "seconds per step": (2.0, 2.0),
        "staleness": (1.0, 1.0),
        "share of time that trainers wait for a batch": (0.2, 0.25),
        "share of time that trainers wait for servers": (1.0, 0.0),
    }
    assert figure_text(result["seconds per step"]) == "seconds per step: planned 2 [0.5, 1.5], measured 2"


def test_without_a_plan_or_without_steps_there_is_nothing(tmp_path):
    assert read_plan(tmp_path / "predicted.json") == {}
    assert against_plan({}, [{"seconds/step": 1.0}]) == []
    assert against_plan(plan_of()["figures"], [{"step": 0}]) == []


@pytest.mark.parametrize("content", [b"text", b"[]", b'{"figures": {"step_s": 3}}', b'{"figures": {}}'])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "predicted.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as refusal:
        read_plan(path)
    assert refusal.value.code == "watch.bad_plan"
    assert "areal plan --json" in str(refusal.value)
