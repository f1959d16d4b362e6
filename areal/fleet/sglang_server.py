"""SGLang as a backend: its command, its flags, and the sampling settings that it does not apply exactly.

Measured with SGLang 0.5.23. Its log-probabilities are those of the logits it samples from, at the request's temperature
and before top-k and top-p. That is what training needs, as long as nothing else changes the logits. Its penalties count
the last token of the prompt instead of the newest token of the answer; penalties and the minimum length start again
when a request is put back into the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal.api.config import GenerationHyperparameters, PPOConfig
from areal.fleet.replica import Replica
from areal.fleet.server_backend import ServerBackend, ServerCommand
from areal.fleet.server_command import CPU_REQUESTS, cpu_cache_tokens, foreign_command
from areal.fleet.server_flags import (
    ALLOCATED,
    LISTENS,
    NO_FILE,
    NO_KEY,
    NO_TLS,
    ONE_GROUP,
    ONE_PROCESS,
    OWN_GPUS,
    FlagRules,
    Flags,
    Problems,
)
from areal.system.network import Host

_LOWEST_TEMPERATURE = 1e-6
"""SGLang treats a lower temperature as greedy and reports log-probabilities of temperature 1."""
_MAX_STOP_STRINGS = 32
_STREAMS = "areal sets how answers are streamed"


def sampling_problems(gconfig: GenerationHyperparameters, flags: Flags, *, needs_logprobs: bool = True) -> Problems:
    """See `SamplingLimits`."""
    if not gconfig.greedy and gconfig.temperature < _LOWEST_TEMPERATURE:
        yield (
            "temperature",
            f"{gconfig.temperature:g} is too low for SGLang: set it to at least {_LOWEST_TEMPERATURE:g}, or set "
            "greedy: true for the likeliest tokens",
        )
    if gconfig.frequency_penalty:
        yield (
            "frequency_penalty",
            f"{gconfig.frequency_penalty:g} would be applied one token late by SGLang: set it to 0, or use native or "
            "vllm servers",
        )
    if gconfig.repetition_penalty != 1:
        yield (
            "repetition_penalty",
            f"{gconfig.repetition_penalty:g} would skip the prompt and the newest token on SGLang: set it to 1, or use "
            "native or vllm servers",
        )
    if gconfig.min_new_tokens and not (gconfig.ignore_eos and not gconfig.stop):
        yield (
            "min_new_tokens",
            f"{gconfig.min_new_tokens} would change SGLang's log-probabilities, and is counted from zero again after a "
            "pause: set it to 0, or use native servers",
        )
    if gconfig.stop and flags.get("skip_tokenizer_init"):
        yield "stop", "needs the server's tokenizer: remove sglang.skip_tokenizer_init, or use stop_token_ids"
    if gconfig.stop and len(gconfig.stop) > _MAX_STOP_STRINGS:
        yield "stop", f"has {len(gconfig.stop)} strings, and SGLang accepts {_MAX_STOP_STRINGS}: remove some"
    if needs_logprobs and flags.get("rl_on_policy_target"):
        yield (
            "temperature",
            "is applied in bfloat16 under sglang.rl_on_policy_target, and so are the log-probabilities: remove that "
            "flag",
        )


def _command(config: PPOConfig, on_gpu: bool, host: Host) -> ServerCommand:
    servers = config.allocation.inference
    assert servers is not None, "a run that starts servers allocates them"
    defaults: dict[str, Any] = {
        "log_level_http": "warning",  # without a log line per health check
        "skip_server_warmup": True,  # the warm-up text kills a server whose small tokenizer has no token for it
    }
    owned: dict[str, Any] = {
        "tp_size": servers.instance_size,
        "nccl_port": "{port_nccl}",  # SGLang draws one at random, which two servers may both choose
        "enable_metrics": True,
        "incremental_streaming_output": True,
    }
    env = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # otherwise a paused server is soon reported as unhealthy
    if not on_gpu:
        defaults |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "lora_backend": "torch_native",
            "disable_cuda_graph": True,
            "sleep_on_idle": True,  # otherwise the idle scheduler keeps a core busy
            "max_running_requests": CPU_REQUESTS,
            "max_total_tokens": cpu_cache_tokens(config, SGLANG),
        }
        owned["device"] = "cpu"
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    program = ("-m", "sglang.launch_server", f"--model-path={SGLANG.model(config)}")
    return foreign_command(config, host, SGLANG, program=program, defaults=defaults, owned=owned, env=env)


def core_bindings(index: int, size: int, threads: int, cores: Sequence[int]) -> dict[str, str]:
    """See `ServerBackend.core_bindings`. SGLang requires this variable when a server has several ranks."""
    if size == 1:
        return {}
    first = index * size * threads
    ranks = [[cores[(first + rank * threads + k) % len(cores)] for k in range(threads)] for rank in range(size)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, own)) for own in ranks)}


def _client(name: str, address: str, token: str) -> Replica:
    from areal.fleet.sglang import SGLangReplica  # the launcher reads this record and needs no client

    return SGLangReplica(name, address, token=token)


SGLANG = ServerBackend(
    name="sglang",
    title="SGLang",
    client=_client,
    command=_command,
    model_key="model_path",
    context_key="context_length",
    sampling_problems=sampling_problems,
    package="sglang",
    minimum_version="0.5.10",  # --incremental-streaming-output
    tested_version="0.5.23",
    core_bindings=core_bindings,
    nccl_defaults={"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"},  # SGLang sets them to 0 when they are unset
    flags=FlagRules(
        seed="random_seed",
        tokenizer="tokenizer_path",
        owned={
            **dict.fromkeys(("host", "port", "nccl_port", "dist_init_addr", "nccl_init_addr"), LISTENS),
            **dict.fromkeys(("grpc_port", "grpc_mode", "smg_grpc_mode"), ONE_PROCESS),
            **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size", "node_rank"), ALLOCATED),
            **dict.fromkeys(("device", "base_gpu_id", "gpu_id_step"), OWN_GPUS),
            **dict.fromkeys(("stream_output", "incremental_streaming_output"), _STREAMS),
            **dict.fromkeys(("api_key", "admin_api_key"), NO_KEY),
            **dict.fromkeys(("ssl_keyfile", "ssl_certfile"), NO_TLS),
            "weight_version": "areal counts the versions of the weights",
            "config": NO_FILE,
        },
        fixed={
            "enable_metrics": (True, "areal reads them"),
            **dict.fromkeys(("dp_size", "data_parallel_size", "pp_size", "pipeline_parallel_size"), (1, ALLOCATED)),
            "nnodes": (1, "a server runs on one machine"),
            "tokenizer_worker_num": (1, ONE_PROCESS),
            "use_ray": (False, ONE_GROUP),
            "disaggregation_mode": ("null", "each server computes both prompts and answers"),
        },
        negatable=False,
        ignored={
            "enable_multithread_load": (),  # AReaL's patches of SGLang 0.5.2
            "enable_fast_load": (),
            "enable_ep_moe": (False,),
            "enable_nan_detection": (False,),
        },
    ),
)
