"""Owns how a native engine is put together from its options: model, sizes of the cache, end tokens, tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from areal.api.config import NativeServerConfig
from areal.api.errors import ConfigError
from areal.inference.cache import BlockPool
from areal.inference.engine import Delivery, Detokenizer, Engine
from areal.inference.model_runner import BLOCK_SIZE, ModelRunner, load_model, vocabulary_size
from areal.inference.request_parser import RequestLimits
from areal.inference.scheduler import Scheduler

NO_VERSION = "-1"
"""The version of a server that waits for its first weights."""
_CPU_TOKENS_PER_REQUEST = 512
_CUDA_CACHE_SHARE = 0.85
"""Of the memory that is free once the model is loaded; the rest is for activations."""
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
) -> Engine:
    """An engine on the model in `model_path`, not yet started.

    Its own weights are policy version 0; `from_scratch`: they are random, and no version until an update is in.
    """
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    runner = ModelRunner(load_model(model_path, dtype, device, from_scratch=from_scratch))
    capacity = _cache_tokens(config, runner, context_length(config, runner.model))
    num_blocks = -(-capacity // BLOCK_SIZE)
    runner.allocate_cache(num_blocks)
    scheduler = Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_running=config.max_running_requests,
        max_prefill_tokens=config.chunked_prefill_size,
    )
    return Engine(
        runner,
        scheduler,
        version=NO_VERSION if from_scratch else "0",
        deliver=deliver,
        on_failure=on_failure,
        detokenizer=detokenizer,
    )


def context_length(config: NativeServerConfig, model: PreTrainedModel) -> int:
    """Most tokens of prompt and answer together: what was asked for, at most what the model was made for."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # foreign: not every model has one
    asked = config.context_length
    if asked and own and asked > own:
        raise ConfigError(f"native.context_length={asked} exceeds the model's own limit of {own}: lower it")
    if not (asked or own):
        raise ConfigError("the model names no longest context: set native.context_length")
    return int(asked or own or 0)


def _cache_tokens(config: NativeServerConfig, runner: ModelRunner, longest: int) -> int:
    if config.max_total_tokens:
        if config.max_total_tokens < longest:
            raise ConfigError(
                f"native.max_total_tokens={config.max_total_tokens} is below the context length of {longest}: one "
                "request of full length would never fit; raise it or lower native.context_length"
            )
        return config.max_total_tokens
    if runner.device.type == "cpu":
        return max(longest, config.max_running_requests * min(longest, _CPU_TOKENS_PER_REQUEST))
    free_bytes, _ = torch.cuda.mem_get_info(runner.device)
    tokens = int(free_bytes * _CUDA_CACHE_SHARE) // runner.bytes_per_token
    if tokens < longest:
        raise ConfigError(f"the GPU has room for {tokens} cached tokens, less than the context length of {longest}")
    return min(tokens, config.max_running_requests * longest)


def request_limits(
    config: NativeServerConfig, model: PreTrainedModel, detokenizer: FolderTokenizer | None
) -> RequestLimits:
    """What the server accepts. End tokens are those of the generation config, the config and the tokenizer together."""
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
    )


class FolderTokenizer:
    """A Hugging Face tokenizer, as far as a server needs it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self.eos_token_id = end if isinstance(end, int) else None

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


def load_detokenizer(path: Path) -> FolderTokenizer | None:
    """The tokenizer in the model's folder, None when there is none."""
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        if (path / "tokenizer.json").exists():
            return FolderTokenizer(PreTrainedTokenizerFast.from_pretrained(path))
        return FolderTokenizer(AutoTokenizer.from_pretrained(path))
    except (ValueError, OSError) as error:
        raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}") from error


def resolve_model_path(name: str) -> Path:
    """The folder of a model: `name` itself, or what the hub has under that name."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigError(f"model_path={name}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_MODEL_FILES))
    except Exception as error:
        raise ConfigError(f"model_path={name}: no such folder here, and the hub did not give it ({error})") from error
