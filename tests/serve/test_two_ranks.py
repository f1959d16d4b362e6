"""Two trainer ranks compute what one computes: losses, log-probabilities, updates, exports; a share may be empty."""

import numpy as np
import pytest
from safetensors.torch import load_file

from areal.engine.optimizer import StepSettings
from areal.serve.wire import AdapterSettings, LossRequest
from areal.serve.worker import computed_loss
from tests.rank_processes import run_ranks
from tests.serve.adapters import make_slots, random_data, write_model

STEP = StepSettings(1e-2, 0.9, 0.95, 1e-8, 0.0, 1.0)
SIZES = ([5, 9, 3], [7], [4, 6])
"""One step with a share that is empty."""


def scenario(mesh, folder):
    slots = make_slots(folder / "tiny", mesh=mesh)
    facts = []
    for name in ("a", "b"):
        slots.create(name, AdapterSettings(rank=4, seed=ord(name)))
    for number, lengths in enumerate(SIZES):
        for name in ("a", "b"):
            slots.activate(name)
            result = computed_loss(slots, LossRequest(data=random_data(number, lengths), loss_fn="ppo"))
            norm = slots.step(STEP)["grad_norm"].value
            facts.append([result.loss, norm, [logprob.tolist() for logprob in result.logprobs]])
    data = random_data(9, [5], ("logprobs", "advantages", "sequence_ratio_mask"))
    limits = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    result = computed_loss(slots, LossRequest(data=data, loss_fn="gspo", config=limits, forward_only=True))
    facts.append([result.loss, 0.0, [logprob.tolist() for logprob in result.logprobs]])
    slots.save(folder / f"state-{mesh.world_size}")
    slots.export(folder / f"adapter-{mesh.world_size}")
    return facts


def test_two_ranks_equal_one(tmp_path):
    write_model(tmp_path / "tiny")
    expected = scenario_of_one(tmp_path)
    for facts in run_ranks(scenario, tmp_path, imported=["areal.serve.worker"]):
        for (loss, norm, logprobs), (other_loss, other_norm, other) in zip(facts, expected, strict=True):
            assert loss == pytest.approx(other_loss, abs=1e-3)
            assert norm == pytest.approx(other_norm, rel=1e-3)
            for first, second in zip(logprobs, other, strict=True):
                np.testing.assert_allclose(first, second, atol=1e-4)  # AdamW divides small gradients by their size
    first, second = (load_file(tmp_path / f"adapter-{count}" / "adapter_model.safetensors") for count in (1, 2))
    assert first.keys() == second.keys()
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-3


def scenario_of_one(folder):
    from areal.engine.mesh import TrainerMesh

    return scenario(TrainerMesh.open(None), folder)
