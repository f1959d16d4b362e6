"""The command that the launcher starts a server with, and bad flags, as the installed server's own parser sees them."""

from __future__ import annotations

from typing import Any

from areal.api.config import (
    GenerationHyperparameters,
    GRPOConfig,
    OptimizerConfig,
    PPOActorConfig,
    TrainDatasetConfig,
)
from areal.launcher.job import Machine, make_plan
from areal.launcher.server_check import foreign_server_problems
from tests.servers.real_server import Backend, environment_python


def problems(backend: Backend, flags: dict[str, Any]) -> list[str]:
    """What the launcher would say of these flags before a start."""
    config = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode=f"{backend}:d1t2+fsdp:d1",
        train_dataset=TrainDatasetConfig(path="rows.jsonl", batch_size=8),
        gconfig=GenerationHyperparameters(max_new_tokens=8),
        actor=PPOActorConfig(path="org/model", init_from_scratch=True, optimizer=OptimizerConfig()),
        server_python=str(environment_python(backend)),
        sglang=flags if backend == "sglang" else {},
        vllm=flags if backend == "vllm" else {},
    )
    told: list[str] = []
    return foreign_server_problems(config, make_plan(config, Machine(cores=2)), told.append)


GOOD: dict[Backend, dict[str, Any]] = {
    # What AReaL's files hold, and one flag of each kind.
    "sglang": {
        "model_path": "org/model",
        "random_seed": 1,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_running_requests": None,
        "context_length": 32768,
        "mem_fraction_static": 0.8,
        "enable-mixed-chunk": False,
        "chunked_prefill_size": -1,
        "lora_paths": ["a", {"lora_name": "b", "lora_path": "/b"}],
        "enable_multithread_load": True,
    },
    "vllm": {
        "model": "org/model",
        "seed": 1,
        "skip_tokenizer_init": False,
        "dtype": "bfloat16",
        "max_model_len": 32768,
        "gpu_memory_utilization": 0.9,
        "enable-prefix-caching": False,
        "compilation_config": {"mode": 0},
        "allowed_origins": '["*"]',
        "lora_modules": "",
        "swap_space": 4,
    },
}
BAD: dict[Backend, dict[str, Any]] = {
    "sglang": {"context_lenght": 8, "dtype": "float7", "enable_lora": 3, "dllm-fdfo": False},
    "vllm": {"max_modle_len": 8, "dtype": "float7", "enable_lora": 3, "max-num-seqs": 2.5},
}


def test_the_installed_server_takes_the_command(backend: Backend) -> None:
    assert problems(backend, GOOD[backend]) == []


def test_the_installed_server_names_every_bad_flag(backend: Backend) -> None:
    told = problems(backend, BAD[backend])
    assert [text.partition(": ")[0] for text in told] == [f"{backend}.{key}" for key in BAD[backend]]
    nearest = {"sglang": "context_length", "vllm": "max_model_len"}[backend]
    assert f"unknown flag; did you mean {nearest}?" in told[0]
    assert "float7" in told[1]
    assert "use true or false instead of 3" in told[2]
