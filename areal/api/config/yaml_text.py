"""YAML text, in files and in overrides: values that look like numbers and are text, and why text cannot be read."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal.api.config.schema import FieldSpec, find_field

MAX_DEPTH = 32
UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError)
"""What reading text as YAML raises: ValueError for bytes that are not UTF-8 and for numbers of thousands of digits."""


_STARTS = tuple("+-.0123456789")
"""What numbers start with."""


class _Loader(yaml.SafeLoader):
    """Composes an alias of a number as a node at the place of the alias, because each place has its own field."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        parser = cast("Any", self)
        alias = parser.peek_event() if parser.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)
        if alias is None or not isinstance(node, yaml.ScalarNode):
            return node
        return yaml.ScalarNode(node.tag, node.value, alias.start_mark, alias.end_mark, node.style)


def composed_yaml(text: str) -> yaml.Node | None:
    """The nodes of YAML with their places in `text`; None where it is empty."""
    return cast("Any", yaml).compose(text, Loader=_Loader)


def override_value(text: str, cls: type[Any], path: str) -> Any:
    """The value of `path=text`. Text fields take it unchanged (007, 1e-3, yes); everything else is read as in files."""
    text, spec = text.strip(), find_field(cls, path)
    is_list = text[:1] == "[" and spec is not None and spec.hint is not str
    if _takes_text(spec) and not is_list and text != "null" and text[:1] not in ("'", '"'):
        loaded = OmegaConf.create({"value": text})
    else:
        written = f"value: {text}"
        root = cast("yaml.MappingNode", composed_yaml(written))
        loaded = OmegaConf.create(with_quotes(written, root.value[0][1], cls, path))
    return cast("dict[str, Any]", OmegaConf.to_container(loaded, resolve=False))["value"]


def with_quotes(text: str, node: yaml.Node, cls: type[Any], path: str = "") -> str:
    """The YAML `text` with quotes around the numbers of text fields of `cls`, and around those that have a colon.

    YAML reads 007 as 7, 1.50 as 1.5, 2024_01_02 as 20240102 and the time limit 12:30:00 as 45000, a number in base 60.
    `node`: the part of the composed `text` that is the value of `path`. Lines keep their numbers.
    """
    numbers: dict[int, tuple[yaml.ScalarNode, bool]] = {}
    for number, is_text in _numbers(node, cls, path, ()):
        start = number.start_mark.index
        numbers[start] = number, is_text or (start in numbers and numbers[start][1])
    for start, (number, is_text) in sorted(numbers.items(), reverse=True):
        end = number.end_mark.index
        value = "'" + number.value.replace("'", "''") + "'" if is_text else number.value
        if text[start] == "*":
            text = f"{text[:start]}{value}{text[end:]}"
        elif text[start:end].endswith(number.value):  # perhaps after an anchor or a tag
            text = f"{text[: end - len(number.value)]}{value}{text[end:]}"
    return text


def _numbers(
    node: yaml.Node, cls: type[Any], path: str, above: tuple[yaml.Node, ...]
) -> Iterator[tuple[yaml.ScalarNode, bool]]:
    """The numbers, once for each path, and whether they are text. `above`: the nodes that contain `node`."""
    if node in above:
        return
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = path if key.value == "<<" else f"{path}.{key.value}" if path else str(key.value)
            yield from _numbers(value, cls, here, above)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _numbers(item, cls, path, above)
    elif isinstance(node, yaml.ScalarNode) and node.style is None and node.value[:1] in _STARTS:
        spec = find_field(cls, path)
        yield node, ":" in node.value or _takes_text(spec) or (spec is not None and spec.hint == list[str])


def written_numbers(text: str, override: str = "") -> dict[str, str]:
    """Path -> each number in YAML as it is written, such as 1.50. `override`: the path of the key `value`."""
    found = _numbers_by_path(composed_yaml(text), "")
    return {override + path.removeprefix("value") if override else path: node.value for path, node in found}


def with_numbers(text: str, numbers: Mapping[str, str]) -> str:
    """The YAML `text` with `numbers` as they are written, by path, in place of the same numbers."""
    found = list(_numbers_by_path(composed_yaml(text), "")) if numbers else []
    for path, node in reversed(found):
        written = numbers.get(path, node.value)
        before, after = cast("list[Any]", OmegaConf.create(f"- {node.value}\n- {written}"))
        if before == after:
            text = f"{text[: node.start_mark.index]}{written}{text[node.end_mark.index :]}"
    return text


def _numbers_by_path(node: yaml.Node | None, path: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _numbers_by_path(value, f"{path}.{key.value}" if path else str(key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _numbers_by_path(item, f"{path}[{index}]")
    elif (
        isinstance(node, yaml.ScalarNode) and node.style is None and node.value[:1] in _STARTS and ":" not in node.value
    ):
        yield path, node


def _takes_text(spec: FieldSpec | None) -> bool:
    """Whether a single value of the field is text."""
    return spec is not None and spec.hint in (str, str | list[str])


def reason_of(error: BaseException) -> str:
    """The message of an error of YAML, OmegaConf or Python in one line."""
    if isinstance(error, RecursionError):
        return f"it is nested deeper than {MAX_DEPTH} levels"
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    if isinstance(error, ValueError) and "digits" in str(error):
        return "a number has thousands of digits"
    if isinstance(error, yaml.MarkedYAMLError):  # without the quoted line, which may contain a secret
        places = [(error.context, error.context_mark), (error.problem, error.problem_mark)]
        return ", ".join(f"{text} in {_place(mark)}" if mark else text for text, mark in places if text)
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(("full_key:", "object_type=")))
    return re.sub(r'in "<[^>]*>", ', "", text)


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
