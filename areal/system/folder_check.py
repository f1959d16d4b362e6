"""Owns the check of a checkpoint folder before a server is asked to load it. Reads headers only, and loads no torch."""

from __future__ import annotations

import json
from pathlib import Path

from areal.api.errors import InputError
from areal.system.checkpoint_files import StoredWeight, stored_weights
from areal.system.durable import COMPLETE, is_complete

_HEAD = "lm_head.weight"
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".masked_bias")
"""Endings of what older checkpoints hold besides weights; every server computes it."""
_CONVERTIBLE = {"F64", "F32", "F16", "BF16"}
"""Servers convert these into one another while they load."""


def folder_problem(folder: Path, like: Path | None) -> str:
    """Why a server must not be asked to load this checkpoint folder, "" when it may. Reads headers only.

    Foreign servers do not survive every bad folder, and load one that lacks a weight without a word. `like` is the
    folder they loaded first: the weights must be the same, by name, shape and kind of dtype. Without it, or where it is
    no folder (a hub name) or holds no safetensors files, only what the folder says of itself is checked.
    """
    if not folder.is_dir():
        return f"checkpoint folder {folder} does not exist"
    if (folder / COMPLETE).exists() and not is_complete(folder):
        return f"checkpoint folder {folder} is incomplete: its {COMPLETE} marker does not match its files"
    try:
        is_tied = _is_tied(folder)
        found = stored_weights(folder)
        needed = stored_weights(like) if like is not None and any(like.glob("*.safetensors")) else found
    except InputError as error:
        return str(error)
    missing = [name for name in needed if name not in found and not _may_differ(name, is_tied)]
    strange = [name for name in found if name not in needed and not _may_differ(name, is_tied)]
    if missing:
        return f"checkpoint folder {folder} lacks {_listed(missing)}"
    if strange:
        return f"checkpoint folder {folder} holds {_listed(strange)}, which the model does not have"
    for name in found.keys() & needed.keys():
        if difference := _difference(found[name], needed[name]):
            return f"checkpoint folder {folder}: {name} {difference}"
    return ""


def _may_differ(name: str, is_tied: bool) -> bool:
    """Whether a checkpoint may have this weight or leave it out: a head that is the embedding, what is computed."""
    return (is_tied and name.endswith(_HEAD)) or name.endswith(_BUFFERS)


def _is_tied(folder: Path) -> bool:
    """What config.json says of the head. InputError without one that can be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
        return bool(config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings"))
    except FileNotFoundError as error:
        raise InputError(f"checkpoint folder {folder} has no config.json") from error
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"checkpoint configuration {path} cannot be read: {error}") from error


def _difference(found: StoredWeight, needed: StoredWeight) -> str:
    if found.shape != needed.shape:
        return f"has shape {found.shape}, the model's has {needed.shape}"
    if found.dtype != needed.dtype and not {found.dtype, needed.dtype} <= _CONVERTIBLE:
        return f"is {found.dtype}, the model's is {needed.dtype}"
    return ""


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more weights"
