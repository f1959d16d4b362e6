"""Part 1: the device of a mesh, attention kernels, the head, checksums."""

import pytest
import torch

from areal.engine.mesh import TrainerMesh
from areal.engine.packed_attention import _sdpa_per_sequence, _varlen
from tests.gpu import bodies

pytestmark = pytest.mark.gpu


def test_a_mesh_without_a_launcher_uses_one_gpu():
    mesh = TrainerMesh.open(None)
    assert mesh.device.type == "cuda"
    assert mesh.device.index is not None
    mesh.close()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (28, 4)])
@pytest.mark.parametrize("size", [64, 128])
def test_the_variable_length_kernel_is_causal_attention(gpu, heads, kv_heads, size):
    shape = {"lengths": [1, 2, 17, 4096], "size": size, "heads": heads, "kv_heads": kv_heads}
    forward, gradients = bodies.attention_error(_varlen, _sdpa_per_sequence, gpu, torch.bfloat16, **shape)
    print(f"heads {heads}/{kv_heads} of {size}: output {forward:.2e}, gradients {gradients:.2e}")  # noqa: T201
    assert forward < 2e-2
    assert gradients < 2e-2


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 3.0), (100, None)])
@pytest.mark.parametrize("size", [64, 128])
def test_attention_over_a_tree_is_that_of_a_mask(gpu, window, softcap, size):
    assert bodies.tree_attention_error(gpu, torch.bfloat16, window=window, softcap=softcap, size=size) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_is_exact_at_a_vocabulary_of_152000(gpu, dtype):
    assert bodies.head_error(gpu, dtype, vocabulary=152_064, tokens=256, float32_head=True) < 2e-3


def test_checksums_are_those_of_the_cpu(gpu):
    ours, reference = bodies.checksums(gpu, [1, 3, 70_000, 5_000_001])
    assert ours == reference
