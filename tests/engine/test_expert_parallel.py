"""What cannot be split over expert ranks. Results are compared in `test_meshes.py` and `test_fsdp_two_ranks.py`."""

import pytest
import torch
from torch import nn

from areal.api.allocation import ParallelDims
from areal.engine.mesh import TrainerMesh
from areal.engine.parallel_plan import apply_expert_plan, expert_modules
from tests.expect import raises_code


class Joint(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.zeros(count, 2, 2))


@pytest.mark.parametrize(
    "model",
    [
        nn.ModuleDict({"mlp": nn.Linear(2, 2)}),
        nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}),
        nn.ModuleDict({"experts": Joint(3)}),
    ],
)
def test_a_model_whose_experts_are_not_rows_of_its_parameters_is_refused(model):
    class TwoRanks:
        def size(self) -> int:
            return 2

    with raises_code("model.cannot_split"):
        apply_expert_plan(model, TwoRanks())


def test_the_experts_of_every_layer_are_found():
    layers = nn.ModuleList([nn.ModuleDict({"experts": Joint(2)}), nn.ModuleDict({"shared_experts": Joint(2)})])
    assert expert_modules(layers) == [layers[0]["experts"]]


def test_copies_of_the_weights_have_whole_sets_of_experts():
    mesh = TrainerMesh(0, 6, torch.device("cpu"), dims=ParallelDims(dp=6, ep=2))
    with raises_code("model.cannot_split"):
        mesh.expert_mesh(3)
