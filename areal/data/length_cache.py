"""Numbers of tokens of prompts, kept in a folder between runs: counting them takes most of the time of reading rows."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from areal.api.errors import InputError
from areal.data.row_files import Row
from areal.data.tokenizer import Tokenizer
from areal.system.durable import write_atomic


def cached_lengths(folder: str, rows: Sequence[Row], tokenizer: Tokenizer, count: Callable[[], list[int]]) -> list[int]:
    """The numbers of tokens of all prompts: those in `folder`, or the result of `count`, which is then kept there.

    The name of the file is a hash of the rows, the tokenizer and its template, so a change of one of them counts again.
    A file that cannot be read or is damaged counts as missing. Raises InputError when the folder cannot be written.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not folder or backend is None:  # a tokenizer in Python has no text that identifies it
        return count()
    digest = hashlib.sha256(backend.to_str().encode())
    digest.update(repr(tokenizer.chat_template).encode())
    for row in rows:
        digest.update(repr(row).encode())  # JSON has no lone surrogates and no integers of more than 64 bits
    path = Path(folder).expanduser() / f"lengths-{digest.hexdigest()}.json"
    try:
        found = orjson.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, orjson.JSONDecodeError):
        found = None
    if isinstance(found, list) and len(found) == len(rows) and all(type(length) is int for length in found):
        return found
    lengths = count()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, orjson.dumps(lengths))
    except OSError as error:
        message = f"cache_dir: {folder} cannot be written: {error.strerror}"
        raise InputError(message, code="data.cache_dir") from error
    return lengths
