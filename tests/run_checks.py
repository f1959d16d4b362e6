"""What the commands of the day and the metrics must say about the folder of a real run."""

import json
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import InputError
from areal.cli.main import run_command


def check_evaluations(steps: list[dict[str, Any]]) -> None:
    """Several answers to each row of two sets, before training and at the end."""
    for row in (steps[0], steps[-1]):
        assert (row["eval/greedy/num"], row["eval/sampled/num"]) == (8.0, 16.0)
        assert (row["eval/greedy/more/num"], row["eval/sampled/more/num"]) == (4.0, 8.0)
        assert row["eval/sampled/more/mean@2"] == pytest.approx(row["eval/sampled/more/reward"])
        assert 0.0 <= row["eval/sampled/pass@1"] <= row["eval/sampled/pass@2"] <= 1.0


def check_exports(root: Path, output: Path, *, step: int, role: str = "actor") -> None:
    """An export, and one of the recovery checkpoint of the same step, have bitwise the saved weights."""
    saved = root / "checkpoints" / role / f"step-{step:06}"
    for words in ([], ["--recover"]):
        folder = output / f"exported{len(words)}"
        assert run_command(["export", str(root), "--role", role, *words, "-o", str(folder)]) == 0
        assert (folder / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
        assert {path.name for path in folder.iterdir()} == {path.name for path in saved.iterdir()}
    with pytest.raises(InputError) as error:
        run_command(["export", str(root), "--step", "99"])
    assert error.value.code == "export.no_checkpoint"


def check_samples(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`areal show` finds accepted, rejected and failed answers; some of a step are in a table."""
    assert run_command(["show", str(root), "--best", "3", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["samples"]
    assert [sample["reward"] for sample in best] == pytest.approx([s["answer"].count("1") / 8 for s in best])
    assert run_command(["show", str(root), "--rejected", "--limit", "200", "--json"]) == 0
    lost = json.loads(capsys.readouterr().out)["samples"]
    assert {sample["state"] for sample in lost} == {"rejected", "failed"}
    kept = [sample for sample in lost if "answer" in sample]
    assert kept
    assert all((sample["reward"] is None) == (sample["state"] == "failed") for sample in kept)
    assert all(sample["prompt"].endswith("=") and sample["num_generated"] for sample in [*best, *kept])
    tables = {path.name: path.read_text().splitlines() for path in (root / "samples").iterdir()}
    assert {name: len(lines) for name, lines in tables.items()} == {"step-000001.jsonl": 4, "step-000010.jsonl": 4}
    assert all(json.loads(line)["prompt"].endswith("=") for lines in tables.values() for line in lines)
