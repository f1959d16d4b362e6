"""benchmark/short_answers.py measures groups and single answers."""

import json

from benchmark import short_answers


def test_the_benchmark_reports_both_kinds(capsys):
    short_answers.main(["--prompts", "4", "--group", "2", "--repeats", "1"])
    result = json.loads(capsys.readouterr().out)
    assert (result["prompts"], result["group_size"]) == (4, 2)
    for kind in ("groups", "single"):
        assert result[f"us_per_answer_{kind}"] > result[f"json_us_per_answer_{kind}"] > 0
