"""vLLM as a backend: its command, its flags, and the sampling settings that it does not apply exactly.

vLLM reports one kind of log-probability for all requests of a server (--logprobs-mode): of the softmax of the model's
logits, or of the distribution that was sampled from, after temperature, penalties and truncation. Training needs the
log-probabilities of logits / temperature, so only some settings can be used together.
"""

from __future__ import annotations

from typing import Any

from areal.api.config import GenerationHyperparameters, PPOConfig
from areal.fleet.replica import Replica
from areal.fleet.server_backend import ServerBackend, ServerCommand
from areal.fleet.server_command import CPU_REQUESTS, SERVER_SIDE, cpu_cache_tokens, element_bytes, foreign_command
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
from areal.system.model_shape import ModelShape
from areal.system.network import Host

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
_ALL_TOKENS = 100_000_000
"""The default of top_k, which means no limit."""
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature and refuses a higher one."""
MAX_BIASED_TOKENS = 1024
"""A request with more entries in its logit bias ends a server on GPU."""
_MAX_STOP_IDS = 100
"""On GPU a request can have 128, including the model's own end tokens."""
_CPU_CACHE_BYTES = 2**30
"""KV cache on the CPU for a model that is not on this machine."""


def logprobs_mode(gconfig: GenerationHyperparameters) -> str:
    """The --logprobs-mode under which a server reports the log-probabilities that training needs."""
    return RAW if gconfig.temperature == 1 or gconfig.greedy else PROCESSED


def sampling_problems(gconfig: GenerationHyperparameters, flags: Flags, *, needs_logprobs: bool = True) -> Problems:
    """See `SamplingLimits`."""
    if not gconfig.greedy and not _LOWEST_TEMPERATURE <= gconfig.temperature <= _HIGHEST_TEMPERATURE:
        yield (
            "temperature",
            f"{gconfig.temperature:g} is outside the range of vLLM, {_LOWEST_TEMPERATURE:g} to "
            f"{_HIGHEST_TEMPERATURE:g}: use a temperature in this range, or set greedy: true for the likeliest tokens",
        )
    if needs_logprobs:
        yield from _logprob_problems(gconfig)
    yield from _penalty_problems(gconfig, flags)
    yield from _stop_problems(gconfig, flags)


def _logprob_problems(gconfig: GenerationHyperparameters) -> Problems:
    if gconfig.greedy and gconfig.temperature != 1:
        yield (
            "temperature",
            f"{gconfig.temperature:g} has no effect on greedy answers of vLLM, and their log-probabilities would be "
            "those of temperature 1: set temperature: 1, or greedy: false",
        )
        return
    changed = _changes(gconfig)
    if logprobs_mode(gconfig) == PROCESSED and changed:
        yield (
            "temperature",
            f"{gconfig.temperature:g} cannot be used with {' and '.join(changed)} on vLLM servers, which then report "
            "no log-probability that training can use: set temperature: 1, set the others to their defaults, or use "
            "native servers",
        )


def _changes(gconfig: GenerationHyperparameters) -> list[str]:
    """Settings other than the temperature that change the distribution that tokens are sampled from."""
    facts = {
        "top_p": gconfig.top_p < 1,
        "top_k": gconfig.top_k < _ALL_TOKENS,
        "frequency_penalty": gconfig.frequency_penalty != 0,
        "repetition_penalty": gconfig.repetition_penalty != 1,
        "min_new_tokens": gconfig.min_new_tokens > 0 and not gconfig.ignore_eos,  # end tokens are masked until then
    }
    return [name for name, is_used in facts.items() if is_used]


def _penalty_problems(gconfig: GenerationHyperparameters, flags: Flags) -> Problems:
    if not gconfig.frequency_penalty:
        return
    if gconfig.repetition_penalty != 1:
        yield (
            "frequency_penalty",
            f"{gconfig.frequency_penalty:g} cannot be used with repetition_penalty={gconfig.repetition_penalty:g} on "
            "vLLM servers: an answer that continues after an interruption would be penalised differently; use one of "
            "them, or native servers",
        )
    if gconfig.max_new_tokens > MAX_BIASED_TOKENS + 1:  # the last token has none after it
        yield (
            "frequency_penalty",
            f"{gconfig.frequency_penalty:g} can be continued after an interruption only for up to {MAX_BIASED_TOKENS} "
            f"different tokens on vLLM servers, and max_new_tokens is {gconfig.max_new_tokens}: set it to 0, or "
            f"max_new_tokens to at most {MAX_BIASED_TOKENS + 1}, or use native servers",
        )
    if flags.get("speculative_config"):
        yield (
            "frequency_penalty",
            f"{gconfig.frequency_penalty:g} cannot be continued after an interruption when vLLM decodes speculatively: "
            "set it to 0, or remove vllm.speculative_config",
        )


def _stop_problems(gconfig: GenerationHyperparameters, flags: Flags) -> Problems:
    if gconfig.stop and flags.get("skip_tokenizer_init"):
        yield "stop", "needs the server's tokenizer: remove vllm.skip_tokenizer_init, or use stop_token_ids"
    if gconfig.stop and gconfig.ignore_eos and gconfig.min_new_tokens:
        yield (
            "min_new_tokens",
            f"{gconfig.min_new_tokens} with ignore_eos and stop would mask the end token in vLLM until that length: "
            "remove one of the three",
        )
    if len(gconfig.stop_token_ids) > _MAX_STOP_IDS:
        yield (
            "stop_token_ids",
            f"has {len(gconfig.stop_token_ids)} ids, and vLLM accepts {_MAX_STOP_IDS}: remove some",
        )


def _command(config: PPOConfig, on_gpu: bool, host: Host) -> ServerCommand:
    """Whether vLLM computes on a GPU is decided when it is built, so no flag says it."""
    servers = config.allocation.inference
    assert servers is not None, "a run that starts servers allocates them"
    given, model = VLLM.given(config), VLLM.model(config)
    defaults: dict[str, Any] = {"uvicorn_log_level": "warning"}  # without a log line per health check
    env = {
        "PYTHONPATH": str(SERVER_SIDE),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": host.advertise,
    }
    if given.get("enable_lora"):
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not on_gpu:
        shape, cache_bytes = ModelShape.read(model), _CPU_CACHE_BYTES
        if shape is not None:
            element = element_bytes(given.get("dtype", config.actor.dtype))
            cache_bytes = cpu_cache_tokens(config, VLLM) * shape.kv_values_per_token * element
        defaults |= {"enforce_eager": True, "max_num_seqs": CPU_REQUESTS, "kv_cache_memory_bytes": cache_bytes}
        # Bound threads of two servers would share one core.
        env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    owned: dict[str, Any] = {
        "tensor_parallel_size": servers.instance_size,
        "enable_scale_out": True,
        "worker_extension_cls": "areal_vllm.extension.WorkerExtension",
        "weight_transfer_config": {"backend": "areal"},
        "logprobs_mode": logprobs_mode(config.gconfig),
    }
    program = ("-m", "vllm.entrypoints.cli.main", "serve", model)
    return foreign_command(config, host, VLLM, program=program, defaults=defaults, owned=owned, env=env)


def _client(name: str, address: str, token: str) -> Replica:
    from areal.fleet.vllm import VLLMReplica  # the launcher reads this record and needs no client

    return VLLMReplica(name, address, token=token)


VLLM = ServerBackend(
    name="vllm",
    title="vLLM",
    client=_client,
    command=_command,
    model_key="model",
    context_key="max_model_len",
    sampling_problems=sampling_problems,
    package="vllm",
    minimum_version="0.30.0",  # --enable-scale-out
    tested_version="0.32.0",
    flags=FlagRules(
        seed="seed",
        tokenizer="tokenizer",
        owned={
            **dict.fromkeys(("host", "port", "uds", "master_addr", "master_port"), LISTENS),
            **dict.fromkeys(("grpc", "grpc_port", "headless"), ONE_PROCESS),
            **dict.fromkeys(("tensor_parallel_size", "tp", "node_rank"), ALLOCATED),
            **dict.fromkeys(("ssl_keyfile", "ssl_certfile"), NO_TLS),
            "enable_scale_out": "areal needs it",
            "tokens_only": "areal needs the other endpoints too",
            "weight_transfer_config": "areal sets its own",
            "logprobs_mode": "areal derives it from gconfig",
            "device_ids": OWN_GPUS,
            "api_key": NO_KEY,
            "root_path": "areal calls the server directly",
            "config": NO_FILE,
        },
        fixed={
            **dict.fromkeys(
                ("data_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"), (1, ALLOCATED)
            ),
            "nnodes": (1, "a server runs on one machine"),
            "distributed_executor_backend": ("mp", ONE_GROUP),
            "api_server_count": (1, ONE_PROCESS),
            "disable_log_stats": (False, "areal reads the metrics"),
        },
        negatable=True,
        bare=frozenset({"disable_log_stats", "aggregate_engine_logging"}),
        ignored={
            "worker_extension_cls": (),  # AReaL files name AReaL's; areal sets its own
            "swap_space": (),  # removed together with vLLM's first engine
        },
    ),
)
