"""Resumed equals unbroken, bit for bit: losses, gradient norms, rates, weights, coefficients that adapt, a reference
that is reset, and random numbers, with dropout."""

import signal

import pytest

from areal.engine.mesh import TrainerMesh
from tests import rank_processes
from tests.trainer import resume_cases


def check(result: dict[str, list[dict]], num_steps: int) -> None:
    assert len(result["unbroken"]) == num_steps
    for unbroken, resumed in zip(result["unbroken"], result["resumed"], strict=True):
        assert resumed["metrics"] == unbroken["metrics"]
        assert resumed["weights"] == unbroken["weights"]
        assert resumed["draws"] == unbroken["draws"]
        assert resumed["coefficients"] == unbroken["coefficients"]
    first, last = result["unbroken"][0], result["unbroken"][-1]
    assert first["weights"] != last["weights"]


def of_roles(weights: dict[str, int]) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for key, checksum in weights.items():
        role, _, name = key.partition("/")
        result.setdefault(role, {})[name] = checksum
    return result


@pytest.mark.parametrize(("kind", "dropout"), [("sft", 0.2), ("ppo", 0.0), ("kl", 0.2)])
def test_one_rank(tmp_path, kind, dropout):
    resume_cases.write_model(tmp_path / "model", dropout=dropout)
    result = resume_cases.run(kind, tmp_path / "model", tmp_path / "recover", TrainerMesh.open(None))
    check(result, resume_cases.NUM_STEPS - resume_cases.CUT)
    if kind == "kl":
        coefficients = [facts["coefficients"] for facts in result["unbroken"]]
        assert all(len({at[name] for at in coefficients}) == len(coefficients) for name in ("kl_ctl", "entropy_coef"))
        fourth, fifth = (of_roles(facts["weights"]) for facts in result["unbroken"][1:])
        assert fourth["ref"] == fourth["actor"]  # reset after the fourth step, and not after the fifth
        assert fifth["ref"] == fourth["ref"] != fifth["actor"]


def test_a_killed_run_goes_on_as_one_that_was_not(tmp_path):
    """SIGKILL after the update of a step and before its checkpoint, with a reset of the reference behind it."""
    resume_cases.write_model(tmp_path / "model", dropout=0.2)
    arguments = ("kl", tmp_path / "model", tmp_path / "recover")
    process = rank_processes.start(resume_cases.run_until_killed, *arguments)
    process.join(timeout=250)
    assert process.exitcode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "recover").iterdir()) == ["step-000002", "step-000003"]
    result = resume_cases.run(*arguments[:2], tmp_path / "other", TrainerMesh.open(None))
    resume_cases.seed_everything(99)
    mesh = TrainerMesh.open(None)
    life = resume_cases.KINDS["kl"](tmp_path / "model", mesh)
    first = resume_cases.go_on(life, tmp_path / "recover", mesh)
    batches = {step: resume_cases.batch_of(step, 0) for step in range(first, resume_cases.NUM_STEPS)}
    resumed = [resume_cases.facts_of(life, life.train(batch, step)) for step, batch in batches.items()]
    assert first == 3
    check({"unbroken": result["unbroken"][1:], "resumed": resumed}, 2)


def test_two_ranks(tmp_path):
    resume_cases.write_model(tmp_path / "model", dropout=0.2)
    both = rank_processes.run_ranks(resume_cases.on_two_ranks, tmp_path)
    for kind in resume_cases.KINDS:
        for each in both:
            check(each[kind], resume_cases.NUM_STEPS - resume_cases.CUT)
        draws = [item[kind]["resumed"][0]["draws"] for item in both]
        assert draws[0] != draws[1]  # each rank went on with its own
