"""docs/http.md has every field of every dialect."""

from pathlib import Path

import orjson
import pytest

from areal.agent.dialects import chat_completions, completions, messages, responses
from areal.agent.dialects.dialect import METADATA, NEUTRAL

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
TABLES = {
    "/v1/chat/completions": chat_completions.FIELDS,
    "/v1/completions": completions.FIELDS,
    "/v1/responses": responses.FIELDS,
    "/v1/messages": messages.FIELDS,
}


def json_texts(values):
    return " or ".join(f"`{orjson.dumps(value).decode()}`" for value in values)


def section(path, table):
    first = {} if table is chat_completions.FIELDS else chat_completions.FIELDS.read
    shared = [name for name, about in table.read.items() if about == first.get(name)]
    lines = [f"| `{name}` | {about} |" for name, about in table.read.items() if name not in shared]
    lines += [f"| {', '.join(f'`{name}`' for name in shared)} | as above |"] if shared else []
    as_above = chat_completions.NO_EFFECT if table.ignored is responses.FIELDS.ignored else {}
    lines += ["", f"No effect: {', '.join(f'`{name}`' for name in table.ignored) if not as_above else 'as above'}."]
    if table.only:
        one_value = [f"`{name}` ({json_texts(values)})" for name, (values, _) in table.only.items()]
        lines.append(f"Only with one value: {', '.join(one_value)}.")
    lines.append(f"Foreign: {', '.join(f'`{name}`' for name in table.foreign)}.")
    lines.append(f"Refused: {', '.join(f'`{name}`' for name in table.refused)}.")
    return "\n".join([f"### `{path}`", "", "| field | meaning |", "|---|---|", *lines, ""])


@pytest.mark.parametrize("path", TABLES)
def test_the_page_has_the_fields_of_the_dialect(path):
    assert section(path, TABLES[path]) in PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_fields_of_inference_servers():
    groups: dict[str, list[str]] = {}
    for name, (values, _) in NEUTRAL.items():
        groups.setdefault(json_texts(values) or "null", []).append(f"`{name}`")
    neutral = "; ".join(f"{value}: {', '.join(names)}" for value, names in groups.items())
    text = f"without an effect: {', '.join(f'`{name}`' for name in METADATA)}. With a neutral value only: {neutral}."
    assert text in " ".join(PAGE.read_text(encoding="utf-8").split())
