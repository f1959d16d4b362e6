"""Files of hub repositories, in the local cache or downloaded."""

from pathlib import Path

from areal.api.errors import InputError


def hub_file(name: str, file: str, *, key: str = "tokenizer_path") -> Path | None:
    """A file of a hub repository, from the local cache if possible; None when the repository has no such file.

    InputError about the option `key` when the repository does not exist or the hub does not answer.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file))
    except (HFValidationError, EntryNotFoundError, OSError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        # a LocalEntryNotFoundError: nothing is cached, and the hub does not answer
        message = f"{name} is neither a folder nor available from the hub: correct {key}"
        code = "data.no_tokenizer" if key == "tokenizer_path" else "model.not_found"
        raise InputError(message, code=code) from error


def cached_hub_file(name: str, file: str) -> Path | None:
    """A file of a hub repository in the local cache; None when it is not there, or `name` is no repository."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
