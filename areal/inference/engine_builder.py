"""Builds a native engine from its options: model, cache size, end tokens, tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from areal.api.config import NativeServerConfig
from areal.api.errors import ConfigError
from areal.api.routed_experts import ExpertShape
from areal.inference.cache import BlockPool
from areal.inference.engine import Delivery, Detokenizer, Engine
from areal.inference.model_runner import BLOCK_SIZE, ModelRunner
from areal.inference.request_parser import RequestLimits
from areal.inference.scheduler import Scheduler
from areal.inference.served_model import load_model, vocabulary_size
from areal.inference.weight_update import ServedWeights, weight_bytes
from areal.system.model_shape import ModelShape
from areal.system.vision_layout import read_vision_layout
from areal.weights.routers import routers_of

NO_VERSION = "-1"
"""The version of a server before its first weight update, when it has only initial weights."""
_CPU_TOKENS_PER_REQUEST = 512
_CUDA_CACHE_SHARE = 0.85
"""Share of the free memory after the model and its second copy are loaded; the rest is for activations."""
_CUDA_BUFFER_SHARE = 1 / 3
"""Largest share of the free memory that the second copy of the weights takes with native.weight_buffer=auto."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def build_engine(
    config: NativeServerConfig,
    model_path: Path,
    device: str,
    *,
    deliver: Delivery,
    on_failure: Callable[[BaseException], None],
    detokenizer: Detokenizer | None = None,
    from_scratch: bool = False,
    records_experts: bool = False,
) -> Engine:
    """An engine for the model in `model_path`, not started. Its weights are policy version 0.

    `from_scratch`: the weights are random and have no version until the first weight update. `records_experts`:
    requests may ask for the chosen experts. Raises ConfigError for a model without experts.
    """
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    model = load_model(model_path, dtype, device, from_scratch=from_scratch)
    shape = ModelShape.read(str(model_path)) if records_experts else None
    if records_experts and not (shape and shape.experts and routers_of(model)):
        raise ConfigError(f"actor.router_replay: {model_path} has no known experts: remove it", code="model.no_router")
    experts = None if shape is None else ExpertShape(shape.layers, shape.experts_per_token, shape.experts)
    layout = read_vision_layout(str(model_path))
    runner = ModelRunner(model, head_dtype=config.head_dtype, experts=experts, layout=layout)
    weights = ServedWeights(model, in_host_memory=not _fits_on_device(config, runner))
    if runner.device.type == "cuda":
        weights.allocate()  # before the cache takes the free memory
    capacity = _cache_tokens(config, runner, context_length(config, runner.model))
    num_blocks = -(-capacity // BLOCK_SIZE)
    runner.allocate_cache(num_blocks)
    scheduler = Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_running=config.max_running_requests,
        max_prefill_tokens=config.chunked_prefill_size,
        whole_images=layout is not None and layout.is_bidirectional,
    )
    return Engine(
        runner,
        scheduler,
        version=NO_VERSION if from_scratch else "0",
        deliver=deliver,
        on_failure=on_failure,
        detokenizer=detokenizer,
        weights=weights,
    )


def _fits_on_device(config: NativeServerConfig, runner: ModelRunner) -> bool:
    """Whether the second copy of the weights is on the device of the model: native.weight_buffer."""
    if config.weight_buffer != "auto" or runner.device.type == "cpu":
        return config.weight_buffer != "host"
    free_bytes, _ = torch.cuda.mem_get_info(runner.device)
    return weight_bytes(runner.model) <= free_bytes * _CUDA_BUFFER_SHARE


def context_length(config: NativeServerConfig, model: PreTrainedModel) -> int:
    """Maximum tokens of prompt and answer together: native.context_length, or the limit of the model."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # not every model has it
    wanted = config.context_length
    if wanted and limit and wanted > limit:
        message = f"native.context_length={wanted} exceeds the limit of the model, {limit}: lower it"
        raise ConfigError(message, code="model.context_length")
    if not (wanted or limit):
        message = "the model configuration has no maximum context length: set native.context_length"
        raise ConfigError(message, code="model.context_length")
    return int(wanted or limit or 0)


def _cache_tokens(config: NativeServerConfig, runner: ModelRunner, longest: int) -> int:
    if config.max_total_tokens:
        if config.max_total_tokens < longest:
            raise ConfigError(
                f"native.max_total_tokens={config.max_total_tokens} is below the context length of {longest}, so a "
                "request of full length cannot run: increase it, or lower native.context_length",
                code="model.cache_too_small",
            )
        return config.max_total_tokens
    if runner.device.type == "cpu":
        return max(longest, config.max_running_requests * min(longest, _CPU_TOKENS_PER_REQUEST))
    free_bytes, _ = torch.cuda.mem_get_info(runner.device)
    tokens = int(free_bytes * _CUDA_CACHE_SHARE) // runner.bytes_per_token
    if tokens < longest:
        message = f"the GPU has memory for {tokens} cached tokens, less than the context length of {longest}"
        raise ConfigError(f"{message}: lower native.context_length", code="model.cache_too_small")
    return min(tokens, config.max_running_requests * longest)


def request_limits(
    config: NativeServerConfig, runner: ModelRunner, detokenizer: FolderTokenizer | None
) -> RequestLimits:
    """What requests may contain. End tokens are the union of those in generation config, config and tokenizer."""
    model = runner.model
    stop_ids: set[int] = set()
    sources = [model.config.get_text_config().eos_token_id, detokenizer.eos_token_id if detokenizer else None]
    if model.generation_config is not None:
        sources.append(model.generation_config.eos_token_id)
    for source in sources:
        if source is not None:
            stop_ids.update(source if isinstance(source, list) else [source])
    vocab_size = vocabulary_size(model)
    return RequestLimits(
        vocab_size=vocab_size,
        context_length=context_length(config, model),
        default_stop_ids=frozenset(stop for stop in stop_ids if 0 <= stop < vocab_size),
        has_tokenizer=detokenizer is not None,
        layout=None if runner.vision is None else runner.vision.layout,
    )


class FolderTokenizer:
    """A Hugging Face tokenizer behind the Detokenizer protocol."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self.eos_token_id = end if isinstance(end, int) else None

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


def load_detokenizer(path: Path) -> FolderTokenizer | None:
    """The tokenizer in the folder of the model; None when it has none."""
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        if (path / "tokenizer.json").exists():
            return FolderTokenizer(PreTrainedTokenizerFast.from_pretrained(path))
        return FolderTokenizer(AutoTokenizer.from_pretrained(path))
    except (ValueError, OSError) as error:
        raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}", code="model.not_loadable") from error


def resolve_model_path(name: str) -> Path:
    """The folder of a model: `name` itself, or a download of the hub repository `name`."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigError(f"model_path={name}: there is no such folder", code="model.not_found")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_MODEL_FILES))
    except Exception as error:
        message = f"model_path={name}: there is no such folder, and the download from the hub failed ({error})"
        raise ConfigError(message, code="model.not_found") from error
