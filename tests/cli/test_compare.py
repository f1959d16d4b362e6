"""`areal compare`: differences of options and curves of several runs."""

import builtins
import json
import re
from pathlib import Path

import pytest

from areal.cli.compare import Curve, bars_by_step, sparkline
from areal.cli.main import run_command
from tests.expect import raises_code
from tests.ledger.forge import Forge

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "grpo.yaml"


@pytest.fixture
def runs(tmp_path):
    """Two runs with other learning rates; the second was evaluated."""
    folders = []
    for name, rate, rewards in (("slow", "4.0e-4", [0.1, 0.2, None]), ("fast", "8.0e-4", [0.1, 0.5, 0.9])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(re.sub(r"\blr: \S+", f"lr: {rate}", QUICKSTART.read_text()))
        rows = [{"step": step, "time": 1.0, "rollout/reward": value} for step, value in enumerate(rewards, start=1)]
        if name == "fast":
            rows[2] |= {"eval/greedy/reward": 0.75, "eval/greedy/missing": 4, "eval/greedy/answers": 16}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(str(folder))
    return folders


def test_options_that_differ_and_curves(runs, json_of):
    result = json_of("compare", *runs)
    assert result["runs"] == ["slow", "fast"]
    assert result["config"] == {"actor.optimizer.lr": [4e-4, 8e-4]}
    slow, fast = result["curves"]["rollout/reward"]
    assert slow == {"steps": [1, 2], "values": [0.1, 0.2], "note": ""}
    assert fast["values"] == [0.1, 0.5, 0.9]
    note = "0.750, 4 of 16 without a reward"
    assert result["curves"]["eval/greedy/reward"] == [None, {"steps": [3], "values": [0.75], "note": note}]
    assert list(json_of("compare", *runs, "--metric", "eval/*/reward")["curves"]) == ["eval/greedy/reward"]


def test_the_text_has_a_line_per_run_and_metric(runs, text_of):
    lines = text_of("compare", *runs).splitlines()
    assert "  actor.optimizer.lr: 0.0004 | 0.0008" in lines
    assert lines[lines.index("rollout/reward (0.1 to 0.9), steps 1 to 3") + 2].split()[:2] == ["fast", "▁▅█"]
    assert lines[-2].split() == ["slow", "not", "recorded"]


def test_the_bars_of_all_runs_have_one_axis_of_steps(runs, text_of):
    assert bars_by_step(Curve([1, 2], [0.0, 1.0]), (0, 4), 0.0, 1.0) == " ▁█  "
    assert bars_by_step(Curve([0, 3], [0.0, 1.0]), (0, 4), 0.0, 1.0) == "▁▁▁█ "
    assert len(bars_by_step(Curve([1000], [2.0]), (1, 1000), 2.0, 2.0)) == 40
    assert "  slow  ▁▂   last 0.2" in text_of("compare", *runs)


def test_options_that_changed_during_a_run_are_marked(runs, text_of):
    Path(runs[0], "option_changes.jsonl").write_text('{"step": 2, "changes": ["seed: 1 -> 2"]}\n')
    assert "  slow: changed after step 2: seed: 1 -> 2" in text_of("compare", *runs).splitlines()


def test_a_long_curve_fits_the_line():
    bars = sparkline(list(range(1000)), 0, 999)
    assert len(bars) == 40
    assert sorted(bars) == list(bars)
    assert sparkline([2.0, 2.0], 2.0, 2.0) == "▁▁"


def page_data(path):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)
    return json.loads(text)


def test_the_page_needs_nothing_else(runs, tmp_path, text_of):
    path = tmp_path / "page.html"
    assert text_of("compare", *runs, "--html", path).splitlines() == [f"wrote {path}"]
    assert "connect-src 'none'" in path.read_text()
    data = page_data(path)
    assert data["found"]["config"] == {"actor.optimizer.lr": [4e-4, 8e-4]}
    assert data["found"]["curves"]["rollout/reward"][1]["values"] == [0.1, 0.5, 0.9]
    reward = data["charts"][0]
    assert (reward["title"], reward["unit"]) == ("rollout/reward", "reward")
    assert [sery["label"] for sery in reward["series"]] == ["slow", "fast"]


def test_curves_have_a_time_axis_and_end_values(runs, json_of):
    rows = [{"step": step, "seconds/elapsed": 2.0 * step, "loss": 1.0 / step} for step in range(1, 21)]
    Path(runs[0], "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = json_of("compare", *runs, "--metric", "loss")
    assert result["elapsed_s"][0]["values"][:2] == [2.0, 4.0]
    (ends, missing) = result["ends"]["loss"]
    assert ends == {"last": 0.05, "last_tenth": pytest.approx((1 / 19 + 1 / 20) / 2), "num_values": 20}
    assert missing is None


def evaluated(folder, step, rewards):
    """A ledger with the rewards of one evaluation by row."""
    forge = Forge(Path(folder) / "ledger")
    forge.started()
    forge.evaluated(step, "greedy", {"": list(enumerate(rewards))})
    forge.write()


def test_differences_of_evaluations_have_an_interval_and_a_verdict(runs, json_of, text_of):
    evaluated(runs[0], 2, [0.0, 0.0, 1.0, 1.0] * 10)
    evaluated(runs[1], 3, [0.0, 1.0, 1.0, 1.0] * 10)
    (result,) = json_of("compare", *runs)["differences"]
    assert (result["evaluation"], result["run"], result["base"], result["steps"]) == (
        "eval/greedy",
        "fast",
        "slow",
        [3, 2],
    )
    assert result["interval"]["difference"] == 0.25
    assert result["interval"]["is_paired"]
    line = "eval/greedy/reward of fast after step 3, against slow after step 2: difference +0.250 ["
    (shown,) = [item for item in text_of("compare", *runs).splitlines() if item.startswith(line)]
    assert shown.endswith("(40 rows, paired): higher")


def test_the_picture_is_written_or_the_missing_package_is_named(runs, tmp_path, monkeypatch):
    picture = tmp_path / "curves.png"
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        with raises_code("launch.package_missing"):
            run_command(["compare", *runs, "--png", str(picture)])
    pytest.importorskip("matplotlib")
    assert run_command(["compare", *runs, "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_runs_that_cannot_be_compared_have_codes(runs, tmp_path):
    with pytest.raises(SystemExit) as ended:
        run_command(["compare", runs[0]])
    assert ended.value.code == 2
    with raises_code("replay.no_run"):
        run_command(["compare", runs[0], str(tmp_path)])
    with raises_code("command.no_metric"):
        run_command(["compare", *runs, "--metric", "rewards"])
