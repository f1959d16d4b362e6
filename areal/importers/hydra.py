"""Hydra's `defaults` lists: the other files that a configuration is composed of."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from areal.api.errors import ConfigError

_HEADER = re.compile(r"\A(?:\s*#[^\n]*\n)*?\s*#\s*@package\s+(\S+)", re.M)
_ENTRY = re.compile(r"(?:override\s+|optional\s+)*/?(?P<group>[^@]*)(?:@(?P<package>.*))?")

Tree = dict[str, Any]


def composed(tree: Tree, path: Path, read: Callable[[Path], Tree], *, above: tuple[Path, ...] = ()) -> Tree:
    """`tree`, which was read from `path`, over the files of its `defaults`; `_self_` is last unless the list says more.

    Groups are folders next to the first file of `above`, the files that include this one. What is not found stays in
    the tree under `defaults`, entry by entry. Raises ConfigError for a file that includes itself.
    """
    entries: Any = tree.pop("defaults", None)
    if not isinstance(entries, list):
        return tree if entries is None else tree | {"defaults": entries}
    above = (*above, path)
    chosen = _chosen(cast("list[Any]", entries))
    if "_self_" not in chosen:
        chosen["_self_"] = ""
    found: Tree = {}
    lost: Tree = {}
    for group, name in chosen.items():
        if group == "_self_":
            found = _merged(found, tree)
            continue
        base, _, package = group.partition("@")
        file = _file(above[0].parent, path.parent, base, name)
        if file is None:
            lost[group.replace("../", "").replace(".", "/")] = name
            continue
        if file.resolve() in [one.resolve() for one in above]:
            raise ConfigError(f"{path}: its defaults include {file}, which includes it", code="config.unreadable_file")
        part = composed(read(file), file, read, above=above)
        deeper = part.pop("defaults", {})
        lost |= deeper if isinstance(deeper, dict) else {base: deeper}
        header = _HEADER.match(file.read_text(encoding="utf-8"))
        where = package or (header[1] if header else base.replace("/", ".") if name and ".." not in base else "")
        found = _merged(found, _at("" if where in ("_global_", "_here_", "_group_") else where, part))
    return found | ({"defaults": lost} if lost else {})


def _chosen(entries: list[Any]) -> dict[str, str]:
    """`GROUP@PACKAGE` -> the file that is chosen in the group, empty for a file without one. Overrides come last."""
    chosen: dict[str, str] = {}
    for entry in entries:
        pairs = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {str(entry): ""}
        for key, name in pairs.items():
            match = _ENTRY.fullmatch(str(key).strip())
            if match is None or match["group"].startswith("hydra/") or name is None:
                continue
            group = match["group"] + (f"@{match['package']}" if match["package"] else "")
            if str(key).startswith("override ") and group not in chosen:
                group = next((known for known in chosen if known.partition("@")[0] == match["group"]), group)
            chosen[group] = str(name)
    return chosen


def _file(root: Path, near: Path, base: str, name: str) -> Path | None:
    relative = f"{base}/{name}" if name else base
    found = [folder / f"{relative.removesuffix('.yaml')}.yaml" for folder in (near, root)]
    return next(filter(Path.is_file, found), None)


def _at(package: str, tree: Tree) -> Tree:
    for name in reversed(package.split(".") if package else []):
        tree = {name: tree}
    return tree


def _merged(below: Tree, above: Tree) -> Tree:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[name] = _merged(cast("Tree", old), cast("Tree", value)) if both else value
    return merged
