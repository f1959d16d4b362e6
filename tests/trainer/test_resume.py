"""Resumed equals unbroken, bit for bit: losses, gradient norms, rates, weights and random numbers, with dropout."""

import importlib.util
import json
import multiprocessing
import runpy
from pathlib import Path

import pytest

from areal.engine.mesh import TrainerMesh

CASES = Path(__file__).with_name("resume_cases.py")


@pytest.fixture(scope="module")
def cases():
    spec = importlib.util.spec_from_file_location("resume_cases", CASES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(found: dict[str, list[dict]], num_steps: int) -> None:
    assert len(found["unbroken"]) == num_steps
    for unbroken, resumed in zip(found["unbroken"], found["resumed"], strict=True):
        assert resumed["metrics"] == unbroken["metrics"]
        assert resumed["weights"] == unbroken["weights"]
        assert resumed["draws"] == unbroken["draws"]
    first, last = found["unbroken"][0], found["unbroken"][-1]
    assert first["weights"] != last["weights"]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_one_rank(cases, tmp_path, kind, dropout):
    cases.write_model(tmp_path / "model", dropout=dropout)
    found = cases.run(kind, tmp_path / "model", tmp_path / "recover", TrainerMesh.open(None))
    check(found, cases.NUM_STEPS - cases.CUT)


def test_two_ranks(cases, tmp_path):
    cases.write_model(tmp_path / "model", dropout=0.2)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "areal.engine.build"])
    ranks = [
        context.Process(
            target=runpy.run_path, args=(str(CASES), {"RANK": rank, "FOLDER": str(tmp_path)}, "areal_two_ranks")
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=250)
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    both = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2)]
    for kind in ("sft", "ppo"):
        for found in both:
            check(found[kind], cases.NUM_STEPS - cases.CUT)
        draws = [found[kind]["resumed"][0]["draws"] for found in both]
        assert draws[0] != draws[1]  # each rank went on with its own
