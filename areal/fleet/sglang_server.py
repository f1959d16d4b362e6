"""SGLang as a backend: its command and its flags."""

from collections.abc import Sequence
from typing import Any

from areal.api.config import PPOConfig
from areal.api.config.lora import ALL_LINEAR
from areal.fleet.server_backend import QWEN_VL, ServerBackend, ServerCommand
from areal.fleet.server_command import ADAPTERS, CPU_REQUESTS, cpu_cache_tokens, foreign_command
from areal.fleet.server_flags import (
    ALLOCATED,
    COMMON_FIXED,
    COMMON_OWNED,
    GETS_ADAPTERS,
    LISTENS,
    NO_KEY,
    ONE_GROUP,
    ONE_PROCESS,
    OWN_GPUS,
    FlagRules,
)  # fmt: skip
from areal.fleet.sglang import SGLangReplica
from areal.fleet.sglang_wire import sampling_problems
from areal.system.vision_layout import read_vision_layout

_KEEP_SIZE: dict[str, Any] = {"image": {"do_resize": False}}
"""--mm-process-config."""


def _command(config: PPOConfig, on_gpu: bool) -> ServerCommand:
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
        **{name: value for name, (value, _) in run_flags(config).items()},
    }
    env = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # otherwise a paused server is soon reported as unhealthy
    if read_vision_layout(SGLANG.model(config)) is not None:
        env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"  # otherwise it keeps image features of the old weights after an update
    if config.publishes_adapters and config.actor.lora is not None:
        lora = config.actor.lora
        targets = lora.target_modules if isinstance(lora.target_modules, list) else ["all"]
        targets = ["all"] if ALL_LINEAR in targets else targets
        defaults |= {"max_lora_rank": lora.served_rank, "lora_target_modules": targets}
        defaults |= {"max_loras_per_batch": ADAPTERS + 1}  # and the base model
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
    return foreign_command(config, SGLANG, program=program, defaults=defaults, owned=owned, env=env)


def run_flags(config: PPOConfig) -> dict[str, tuple[Any, str]]:
    """See `ServerBackend`."""
    needed: dict[str, tuple[Any, str]] = {}
    if config.publishes_adapters:
        needed["enable_lora"] = True, GETS_ADAPTERS
    if config.rollout.weight_update == "keep_cache":
        # A pause leaves the step in flight alone: its token of the old weights would be reported as one of the new.
        needed["disable_overlap_schedule"] = True, "rollout.weight_update=keep_cache needs exact versions"
    if config.actor.router_replay:
        needed["enable_return_routed_experts"] = True, "actor.router_replay needs the chosen experts"
    if read_vision_layout(SGLANG.model(config)) is not None:
        # Of Qwen2-VL, SGLang replaces the limits of preprocessor_config.json by its own.
        needed["mm_process_config"] = _KEEP_SIZE, "areal sends images in their final size"
    return needed


def core_bindings(index: int, size: int, threads: int, cores: Sequence[int]) -> dict[str, str]:
    """See `ServerBackend.core_bindings`. SGLang requires this variable when a server has several ranks."""
    if size == 1:
        return {}
    first = index * size * threads
    ranks = [[cores[(first + rank * threads + k) % len(cores)] for k in range(threads)] for rank in range(size)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, own)) for own in ranks)}


def part_words(part: int, num_parts: int) -> tuple[str, ...]:
    """See `ServerBackend`. The other parts serve only a health check, on their own loopback."""
    return (f"--nnodes={num_parts}", f"--node-rank={part}", "--dist-init-addr={first}")


SGLANG = ServerBackend(
    name="sglang",
    title="SGLang",
    client=SGLangReplica,
    command=_command,
    model_key="model_path",
    context_key="context_length",
    sampling_problems=sampling_problems,
    image_families=QWEN_VL,
    run_flags=run_flags,
    returns_experts=True,
    areal_defaults={
        "random_seed": 1,
        "context_length": 32768,
        "mem_fraction_static": 0.9,
        "chunked_prefill_size": -1,
        "max_prefill_tokens": 32768,
        "schedule_policy": "lpm",
        "disable_radix_cache": True,
        "log_level": "warning",
        "log_level_http": "warning",
        "log_requests_level": 0,
        "decode_log_interval": 1,
    },
    minimum_version="0.5.10",  # --incremental-streaming-output
    tested_version="0.5.23",
    core_bindings=core_bindings,
    part_words=part_words,
    address_variable="SGLANG_HOST_IP",
    nccl_defaults={"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"},  # SGLang sets them to 0 when they are unset
    flags=FlagRules(
        seed="random_seed",
        tokenizer="tokenizer_path",
        owned={
            **COMMON_OWNED,
            **dict.fromkeys(("nccl_port", "dist_init_addr", "nccl_init_addr"), LISTENS),
            **dict.fromkeys(("grpc_mode", "smg_grpc_mode"), ONE_PROCESS),
            **dict.fromkeys(("device", "base_gpu_id", "gpu_id_step"), OWN_GPUS),
            **dict.fromkeys(("stream_output", "incremental_streaming_output"), "areal sets how answers are streamed"),
            "tp_size": ALLOCATED,
            "admin_api_key": NO_KEY,
            "weight_version": "areal counts the versions of the weights",
        },
        fixed={
            **COMMON_FIXED,
            **dict.fromkeys(("dp_size", "pp_size"), (1, ALLOCATED)),
            "enable_metrics": (True, "areal reads them"),
            "tokenizer_worker_num": (1, ONE_PROCESS),
            "allow_auto_truncate": (False, "areal refuses a prompt that does not fit"),
            "use_ray": (False, ONE_GROUP),
            "disaggregation_mode": ("null", "each server computes both prompts and answers"),
        },
        negatable=False,
        ignored={
            "enable_multithread_load": (),  # AReaL's patches of SGLang 0.5.2
            "enable_fast_load": (),
            "enable_ep_moe": (False,),
            "enable_nan_detection": (False,),
            # AReaL unloads an adapter before it loads the next; here requests continue with the adapter they began with
            **dict.fromkeys(("max_loaded_loras", "max_loras_per_batch"), (1,)),
        },
        renamed={"lora_target_modules": {ALL_LINEAR: "all"}},
    ),
)
