"""Values that look like numbers and are text, in YAML files and in overrides."""

from collections.abc import Iterator
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from areal.api.config.schema import FieldSpec, find_field


def override_value(text: str, spec: FieldSpec | None) -> Any:
    """The value of `key=text`. Text fields take it unchanged (007, 1e-3, yes); everything else is read as YAML."""
    text = text.strip()
    is_list = text[:1] == "[" and spec is not None and spec.hint is not str
    is_text = _takes_text(spec) and not is_list and text != "null" and text[:1] not in ("'", '"')
    loaded = OmegaConf.create({"value": text} if is_text else f"value: {text}")
    return cast("dict[str, Any]", OmegaConf.to_container(loaded, resolve=False))["value"]


def with_quotes(text: str, root: yaml.MappingNode, cls: type[Any]) -> str:
    """The YAML `text` with quotes around the numbers of text fields of `cls`, and around those that have a colon.

    YAML reads 007 as 7, 1.50 as 1.5, 2024_01_02 as 20240102 and the time limit 12:30:00 as 45000, a number in base 60.
    `root`: the composed `text`. Lines keep their numbers.
    """
    for node in reversed(list(_numbers(root, cls, "", set()))):
        start, end = node.start_mark.index, node.end_mark.index
        if text[start:end] == node.value:  # no anchor or tag before it
            text = f"{text[:start]}'{node.value}'{text[end:]}"
    return text


def _numbers(node: yaml.Node, cls: type[Any], path: str, seen: set[yaml.Node]) -> Iterator[yaml.ScalarNode]:
    """The numbers that are text, in the order of the file. `seen`: what aliases may repeat, or contain themselves."""
    if node in seen:
        return
    seen.add(node)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _numbers(value, cls, f"{path}.{key.value}" if path else str(key.value), seen)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _numbers(item, cls, path, seen)
    elif isinstance(node, yaml.ScalarNode) and node.style is None and node.value[:1] in tuple("+-.0123456789"):
        spec = find_field(cls, path)
        if ":" in node.value or _takes_text(spec) or (spec is not None and spec.hint == list[str]):
            yield node


def _takes_text(spec: FieldSpec | None) -> bool:
    """Whether a single value of the field is text."""
    return spec is not None and spec.hint in (str, str | list[str])
