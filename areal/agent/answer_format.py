"""Whether an answer has the format that its request asked for: JSON of a schema.

Sampling is not constrained: the log-probabilities of a constrained sampler are not those that the trainer computes.
"""

from collections.abc import Mapping
from typing import Any

from areal.agent.tool_calls import parsed_json

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_MAX_DEPTH = 64


def has_format(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether a text is JSON of a schema, by types, choices, properties and items; other keywords are not checked."""
    value = parsed_json(text.strip())
    return (value is not None or text.strip() == "null") and _fits(value, schema, schema, 0)


def _fits(value: Any, schema: Any, root: Mapping[str, Any], depth: int) -> bool:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return schema is not False

    def fits(one: Any, part: Any) -> bool:
        return _fits(one, part, root, depth + 1)

    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for name in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(name, True) if name and isinstance(target, Mapping) else target
        return fits(value, target)
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or list(_TYPES)
    is_of_type = any(isinstance(value, _TYPES.get(kind, (object,))) for kind in kinds)
    if not is_of_type or (isinstance(value, bool) and "boolean" not in kinds):
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if any(not any(fits(value, part) for part in schema[name]) for name in ("anyOf", "oneOf") if name in schema):
        return False
    if not all(fits(value, part) for part in schema.get("allOf", ())):
        return False
    if isinstance(value, list):
        return all(fits(one, schema.get("items", True)) for one in value)
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        return set(schema.get("required", ())) <= value.keys() and all(
            fits(one, known.get(name, others)) for name, one in value.items()
        )
    return True
