"""docs/agent_http.md has every field of every dialect."""

from pathlib import Path

import orjson
import pytest

from areal.agent.dialects import chat_completions, completions, messages, responses

PAGE = Path(__file__).parents[2] / "docs" / "agent_http.md"
TABLES = {
    "/v1/chat/completions": chat_completions.FIELDS,
    "/v1/completions": completions.FIELDS,
    "/v1/responses": responses.FIELDS,
    "/v1/messages": messages.FIELDS,
}


def section(path, table):
    rows = [f"| `{name}` | {about} |" for name, about in table.read.items()]
    rows += [f"| `{name}` | no effect: {why} |" for name, (_, why) in table.ignored.items()]
    for name, (values, why) in table.only.items():
        shown = " or ".join(dict.fromkeys(f"`{orjson.dumps(value).decode()}`" for value in values))
        rows.append(f"| `{name}` | only {shown}: {why} |")
    rows += [f"| `{name}` | refused: {why} |" for name, why in table.refused.items()]
    return "\n".join([f"### `{path}`", "", "| field | meaning |", "|---|---|", *rows, ""])


@pytest.mark.parametrize("path", TABLES)
def test_the_page_has_the_fields_of_the_dialect(path):
    assert section(path, TABLES[path]) in PAGE.read_text(encoding="utf-8")
