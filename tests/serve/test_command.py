"""The configuration of the service: what it cannot run on is refused in one line before anything starts."""

import pytest

from areal.serve.command import LoraLimits, serving_config
from tests.expect import raises_code
from tests.serve.adapters import write_model


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("allocation_mode=sglang:d1+fsdp:d1", "native servers and fsdp trainers"),
        ("allocation_mode=vllm:d1+fsdp:d1", "native servers and fsdp trainers"),
        ("allocation_mode=native:d1+fsdp:d1t2", "data ranks only"),
        ("launcher.type=slurm", "on this machine only"),
        ("launcher.type=ray", "on this machine only"),
        ("launcher.type=ssh", "on this machine only"),
    ],
)
def test_what_the_service_cannot_run_on_is_refused(tmp_path, word, text):
    with raises_code("config.conflict", text):
        serving_config([], [word], model=str(write_model(tmp_path / "tiny")), lora=LoraLimits(8, 2))
