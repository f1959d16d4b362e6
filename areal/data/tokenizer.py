"""Tokenizers: the protocol that areal uses, and loading from a folder or the hub without importing torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from areal.api.config import BaseExperimentConfig
from areal.api.errors import InputError
from areal.models.checkpoint_files import hub_file
from areal.models.vision_layout import read_vision_layout

_TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_PATTERNS = ("*token*", "vocab*", "*.model", "*.tiktoken")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that areal uses."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def chat_template(self) -> Any: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Tokens that are found in text before it is cut into others, with their `content` and whether `special`."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of tokens. Give a list on an event loop: for another column transformers imports torch."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


def tokenizer_of(config: BaseExperimentConfig, model_path: str) -> Tokenizer:
    """The tokenizer of a run, with its chat template. Raises InputError.

    The variables of `chat_template.args` are assignments at the start of the template, so they have their value in
    every rendering. For an image the template writes what the processor of the model makes of its mark, with one
    placeholder: before the text is cut into tokens, since a token may have line breaks of both.
    """
    tokenizer: Any = load_tokenizer(config.tokenizer_path or model_path)
    options = config.chat_template
    if options.path:
        try:
            tokenizer.chat_template = Path(options.path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"chat_template.path: {options.path} cannot be read: {error}"
            raise InputError(message, code="data.chat_template_file") from error
    if options.args and tokenizer.chat_template:
        first = "".join(f"{{%- set {name} = {_literal(value)} -%}}" for name, value in options.args.items())
        tokenizer.chat_template = _changed(tokenizer.chat_template, lambda text: first + text)
    layout = read_vision_layout(model_path, downloads=not config.tokenizer_path)
    if layout is not None and layout.mark != layout.written and tokenizer.chat_template:
        end = f"{{{{ areal_text | replace({json.dumps(layout.mark)}, {json.dumps(layout.written)}) }}}}"
        # Jinja drops the line end of a template
        start, middle = "{% set areal_text +%}", "{%+ endset %}"
        tokenizer.chat_template = _changed(
            tokenizer.chat_template, lambda text: start + text.removesuffix("\n") + middle + end
        )
    return tokenizer


def _changed(template: str | dict[str, str], change: Callable[[str], str]) -> str | dict[str, str]:
    """A template, or several by name, after `change`."""
    return change(template) if isinstance(template, str) else {name: change(text) for name, text in template.items()}


def _literal(value: Any) -> str:
    """A value of JSON as an expression of Jinja, which reads the escapes of JSON, but no pairs of surrogates."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer in a folder or of a hub name. Raises InputError.

    A `tokenizer.json` is loaded by the class that needs no torch, because torch would cost the rollout controller
    200 MiB. Only folders in older formats use AutoTokenizer.
    """
    name = str(path)
    if not name:
        raise InputError("no tokenizer is named: set tokenizer_path, or the model's path", code="data.no_tokenizer")
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any(file for pattern in _TOKENIZER_PATTERNS for file in folder.glob(pattern)):
            # transformers would build an empty tokenizer
            message = f"{name} contains no tokenizer files: copy the model's files there, or set tokenizer_path"
            raise InputError(message, code="data.no_tokenizer")
        return _load(str(folder), folder / _TOKENIZER_FILE, folder / "tokenizer_config.json")
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        message = f"there is no tokenizer folder {name}: correct tokenizer_path, or the model's path"
        message += "; if a run makes this folder, such as a warm-up, start that run first"
        raise InputError(message, code="data.no_tokenizer")
    return _load(name, hub_file(name, _TOKENIZER_FILE), hub_file(name, "tokenizer_config.json"))


def _load(name: str, tokenizer_file: Path | None, config_file: Path | None) -> Tokenizer:
    try:
        if tokenizer_file is not None and tokenizer_file.is_file() and not _has_own_code(config_file):
            from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

            loaded = PreTrainedTokenizerFast.from_pretrained(name)
            # Prompts and answers have limits of the configuration: no warning about that of the tokenizer.
            loaded.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
            return loaded
        from transformers.models.auto.tokenization_auto import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the tokenizer libraries raise bare exceptions for unreadable files
        first_line = str(error).strip().partition("\n")[0]
        message = f"no tokenizer can be loaded from {name}: {first_line or type(error).__name__}"
        raise InputError(message, code="data.no_tokenizer") from error


def _has_own_code(config_file: Path | None) -> bool:
    if config_file is None or not config_file.is_file():
        return False
    return "AutoTokenizer" in json.loads(config_file.read_text(encoding="utf-8")).get("auto_map", {})
