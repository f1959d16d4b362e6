"""docs/http.md has every field of every dialect."""

from pathlib import Path

import orjson
import pytest

from areal.agent.dialects import chat_completions, completions, messages, responses

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
TABLES = {
    "/v1/chat/completions": chat_completions.FIELDS,
    "/v1/completions": completions.FIELDS,
    "/v1/responses": responses.FIELDS,
    "/v1/messages": messages.FIELDS,
}


def section(path, table):
    lines = [f"| `{name}` | {about} |" for name, about in table.read.items()]
    lines += ["", f"No effect: {', '.join(f'`{name}`' for name in table.ignored)}."]
    if table.only:
        shown = {name: dict.fromkeys(map(orjson.dumps, values)) for name, (values, _) in table.only.items()}
        one_value = [
            f"`{name}` ({' or '.join(f'`{text.decode()}`' for text in texts)})" for name, texts in shown.items()
        ]
        lines.append(f"Only with one value: {', '.join(one_value)}.")
    lines.append(f"Foreign: {', '.join(f'`{name}`' for name in table.foreign)}.")
    lines.append(f"Refused: {', '.join(f'`{name}`' for name in table.refused)}.")
    return "\n".join([f"### `{path}`", "", "| field | meaning |", "|---|---|", *lines, ""])


@pytest.mark.parametrize("path", TABLES)
def test_the_page_has_the_fields_of_the_dialect(path):
    assert section(path, TABLES[path]) in PAGE.read_text(encoding="utf-8")
