"""vLLM as a backend: its command, its flags, and the sampling settings that it does not apply exactly.

vLLM reports one kind of log-probability for all requests of a server (--logprobs-mode): of the softmax of the model's
logits, or of the distribution that was sampled from, after temperature, penalties and truncation. Training needs the
log-probabilities of logits / temperature, so only some settings can be used together.
"""

from typing import Any

from areal.api.config import GenerationHyperparameters, PPOConfig
from areal.fleet.replica import ALL_TOKENS
from areal.fleet.server_backend import QWEN_VL, ServerBackend, ServerCommand
from areal.fleet.server_command import (
    ADAPTERS,
    CPU_REQUESTS,
    SERVER_SIDE,
    cpu_cache_tokens,
    element_bytes,
    foreign_command,
)
from areal.fleet.server_flags import (
    ALLOCATED,
    COMMON_FIXED,
    COMMON_OWNED,
    GETS_ADAPTERS,
    LISTENS,
    ONE_GROUP,
    ONE_PROCESS,
    OWN_GPUS,
    FlagRules,
    Flags,
    Problems,
)  # fmt: skip
from areal.fleet.vllm import VLLMReplica
from areal.fleet.vllm_wire import MAX_BIASED_TOKENS
from areal.system.model_shape import ModelShape
from areal.system.network import LOOPBACK
from areal.system.vision_layout import read_vision_layout

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature and refuses a higher one."""
_MAX_STOP_IDS = 100
"""On GPU a request can have 128, including the model's own end tokens."""
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank."""
_UNCUT = {"do_image_splitting": False, "do_resize": False}
_PROCESSOR_SETTINGS: dict[str, dict[str, Any]] = {
    "internvl": {"use_fast": False},  # torchvision makes another tile of the whole image
    "idefics3": _UNCUT,
    "smolvlm": _UNCUT,
}
"""--mm-processor-kwargs of the families that need them, so that the numbers of the colours are those of the trainer."""
_CPU_CACHE_BYTES = 2**30
"""KV cache on the CPU for a model that is not on this machine."""


def logprobs_mode(gconfig: GenerationHyperparameters, *, has_bans: bool = False) -> str:
    """The --logprobs-mode under which a server reports the log-probabilities that training needs.

    `has_bans`: tokens are banned, which raw log-probabilities ignore.
    """
    if has_bans:
        return PROCESSED
    is_raw = (gconfig.temperature == 1 and not gconfig.temperature_key) or gconfig.greedy
    return RAW if is_raw else PROCESSED


def sampling_problems(gconfig: GenerationHyperparameters, flags: Flags, needs_logprobs: bool = True) -> Problems:
    """See `SamplingLimits`."""
    if not gconfig.greedy and not _LOWEST_TEMPERATURE <= gconfig.temperature <= _HIGHEST_TEMPERATURE:
        accepted = f"{_LOWEST_TEMPERATURE:g} to {_HIGHEST_TEMPERATURE:g}"
        yield (
            "temperature",
            f"{gconfig.temperature:g} is outside the range of vLLM, {accepted}: change it, or set greedy",
        )
    if needs_logprobs:
        yield from _logprob_problems(gconfig)
    yield from _penalty_problems(gconfig, flags)
    if gconfig.stop and flags.get("skip_tokenizer_init"):
        yield "stop", "needs the server's tokenizer: remove vllm.skip_tokenizer_init, or use stop_token_ids"
    if gconfig.stop and gconfig.ignore_eos and gconfig.min_new_tokens:
        yield (
            "min_new_tokens",
            f"{gconfig.min_new_tokens} with ignore_eos and stop masks the end token in vLLM: remove one of the three",
        )
    if len(gconfig.stop_token_ids) > _MAX_STOP_IDS:
        yield "stop_token_ids", f"has {len(gconfig.stop_token_ids)} ids, and vLLM accepts {_MAX_STOP_IDS}: remove some"


def run_flags(config: PPOConfig) -> dict[str, tuple[Any, str]]:
    """See `ServerBackend`."""
    needed: dict[str, tuple[Any, str]] = {"enable_lora": (True, GETS_ADAPTERS)} if config.publishes_adapters else {}
    layout = read_vision_layout(VLLM.model(config))
    settings = None if layout is None else _PROCESSOR_SETTINGS.get(layout.family)
    if settings:
        why = "areal sends images in their final size, and this server must not cut or resize them otherwise"
        needed["mm_processor_kwargs"] = settings, why
    return needed


def image_problems(config: PPOConfig) -> Problems:
    """See `ServerBackend`."""
    if config.rollout.weight_update == "keep_cache":
        text = "keep_cache would keep image features of old weights on vLLM: use keep or interrupt, or native servers"
        yield "rollout.weight_update", text
    if changed := _changed_distribution(config.gconfig):
        text = "makes vLLM report log-probabilities that training cannot use, because image tokens are banned: set it "
        yield f"gconfig.{changed[0]}", f"{text}to its default, or use native servers"


def _changed_distribution(gconfig: GenerationHyperparameters) -> list[str]:
    """The settings that sample from another distribution than the softmax of logits / temperature."""
    changes_distribution = {
        "top_p": gconfig.top_p < 1,
        "top_k": gconfig.top_k < ALL_TOKENS,
        "frequency_penalty": gconfig.frequency_penalty != 0,
        "repetition_penalty": gconfig.repetition_penalty != 1,
        "min_new_tokens": gconfig.min_new_tokens > 0 and not gconfig.ignore_eos,  # end tokens are masked until then
    }
    return [name for name, is_used in changes_distribution.items() if is_used]


def _logprob_problems(gconfig: GenerationHyperparameters) -> Problems:
    changed = _changed_distribution(gconfig)
    if gconfig.greedy and gconfig.temperature != 1:
        yield (
            "temperature",
            f"{gconfig.temperature:g} has no effect on greedy answers of vLLM, nor on their log-probabilities: set it "
            "to 1, or greedy to false",
        )
    elif logprobs_mode(gconfig) == PROCESSED and changed:
        yield (
            "temperature",
            f"{gconfig.temperature:g} with {' and '.join(changed)} makes vLLM report log-probabilities that training "
            "cannot use: set it to 1, set the others to their defaults, or use native servers",
        )


def _penalty_problems(gconfig: GenerationHyperparameters, flags: Flags) -> Problems:
    """An answer that continues after an interruption must be penalised like one that was not interrupted."""
    if not gconfig.frequency_penalty:
        return
    given = f"{gconfig.frequency_penalty:g} cannot be continued exactly on vLLM after an interruption"
    if gconfig.repetition_penalty != 1:
        other = f"repetition_penalty={gconfig.repetition_penalty:g}"
        yield "frequency_penalty", f"{given} together with {other}: use one of them, or native servers"
    if gconfig.max_new_tokens > MAX_BIASED_TOKENS + 1:  # the last token has none after it
        yield (
            "frequency_penalty",
            f"{given} with max_new_tokens={gconfig.max_new_tokens}: set it to 0, max_new_tokens to at most "
            f"{MAX_BIASED_TOKENS + 1}, or use native servers",
        )
    if flags.get("speculative_config"):
        yield "frequency_penalty", f"{given} with speculation: set it to 0, or remove vllm.speculative_config"


def _command(config: PPOConfig, on_gpu: bool) -> ServerCommand:
    """Whether vLLM computes on a GPU is decided when it is built, so no flag says it."""
    servers = config.allocation.inference
    assert servers is not None, "a run that starts servers allocates them"
    given, model = VLLM.given(config), VLLM.model(config)
    defaults: dict[str, Any] = {"uvicorn_log_level": "warning"}  # without a log line per health check
    env = {
        "PYTHONPATH": str(SERVER_SIDE),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK,
    }
    if config.publishes_adapters and config.actor.lora is not None:
        rank = config.actor.lora.served_rank
        fitting = (size for size in _LORA_RANKS if size >= rank)
        defaults |= {"max_lora_rank": next(fitting, rank), "max_loras": ADAPTERS}
    if config.publishes_adapters or given.get("enable_lora"):
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not on_gpu:
        shape, cache_bytes = ModelShape.read(model), _CPU_CACHE_BYTES
        if shape is not None:
            element = element_bytes(given.get("dtype", config.actor.dtype))
            cache_bytes = cpu_cache_tokens(config, VLLM) * shape.kv_values_per_token * element
        defaults |= {"enforce_eager": True, "max_num_seqs": CPU_REQUESTS, "kv_cache_memory_bytes": cache_bytes}
        # Bound threads of two servers would share one core.
        env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    layout = read_vision_layout(model)
    extension = "llava" if layout is not None and layout.family == "llava" else "extension"
    owned: dict[str, Any] = {
        "tensor_parallel_size": servers.instance_size,
        "enable_scale_out": True,
        "worker_extension_cls": f"areal_vllm.{extension}.WorkerExtension",
        "weight_transfer_config": {"backend": "areal"},
        "logprobs_mode": logprobs_mode(config.gconfig, has_bans=layout is not None),
        **{name: value for name, (value, _) in run_flags(config).items()},
    }
    program = ("-m", "vllm.entrypoints.cli.main", "serve", model)
    return foreign_command(config, VLLM, program=program, defaults=defaults, owned=owned, env=env)


def part_words(part: int, num_parts: int) -> tuple[str, ...]:
    """See `ServerBackend`. The other parts have no HTTP server."""
    words = (
        f"--nnodes={num_parts}",
        f"--node-rank={part}",
        "--master-addr={first_address}",
        "--master-port={first_port}",
    )
    return (*words, "--headless") if part else words


VLLM = ServerBackend(
    name="vllm",
    title="vLLM",
    client=VLLMReplica,
    command=_command,
    model_key="model",
    context_key="max_model_len",
    sampling_problems=sampling_problems,
    image_problems=image_problems,
    image_families=(*QWEN_VL, "llava", *_PROCESSOR_SETTINGS),
    run_flags=run_flags,
    areal_defaults={
        "seed": 1,
        "max_model_len": 32768,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.9,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "uvicorn_log_level": "warning",
    },
    minimum_version="0.30.0",  # --enable-scale-out
    tested_version="0.32.0",
    part_words=part_words,
    address_variable="VLLM_HOST_IP",
    flags=FlagRules(
        seed="seed",
        tokenizer="tokenizer",
        owned={
            **COMMON_OWNED,
            **dict.fromkeys(("uds", "master_addr", "master_port"), LISTENS),
            **dict.fromkeys(("grpc", "headless"), ONE_PROCESS),
            "enable_scale_out": "areal needs it",
            "tokens_only": "areal needs the other endpoints too",
            "weight_transfer_config": "areal sets its own",
            "logprobs_mode": "areal derives it from gconfig",
            "device_ids": OWN_GPUS,
            "root_path": "areal calls the server directly",
        },
        fixed={
            **COMMON_FIXED,
            "prefill_context_parallel_size": (1, ALLOCATED),
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
