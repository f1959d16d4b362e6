"""The same program without an SDK, in the dialect of Anthropic: it starts in 50 ms, and reports its reward by POST.

workflow_args={command: [python, examples/agents/black_box_http.py, "{question}", "{answer}"]}
"""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from typing import Any

MAX_TURNS, MAX_RETRIES = 4, 3
BUDGET_CODES = ("agent.turn_budget", "agent.token_budget", "agent.prompt_too_long")
ADDRESS, KEY = os.environ.get("ANTHROPIC_BASE_URL", ""), os.environ.get("ANTHROPIC_API_KEY", "")
TOOL = {
    "name": "calculator",
    "description": "The value of a product of two numbers.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


def calculator(expression: object) -> str:
    found = re.fullmatch(r"(\d{1,4})\*(\d{1,4})", str(expression))
    return str(int(found[1]) * int(found[2])) if found else "error"


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply. 429, 5xx and lost connections are repeated, with the mark by which the server knows a retry."""
    for attempt in range(MAX_RETRIES + 1):
        headers = {"Content-Type": "application/json", "x-api-key": KEY, "x-stainless-retry-count": str(attempt)}
        try:
            request = urllib.request.Request(ADDRESS + path, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=600) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if (error.code != 429 and error.code < 500) or attempt == MAX_RETRIES:
                raise
            time.sleep(float(error.headers["Retry-After"]))
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError):
            if attempt == MAX_RETRIES:
                raise
    raise AssertionError("unreachable")


def dialogue(question: str) -> str:
    """The text of the last answer; empty when the budget of the session ended before."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        body = {"model": "policy", "max_tokens": 64, "messages": messages, "tools": [TOOL]}
        try:
            content = post("/v1/messages", body)["content"]
        except urllib.error.HTTPError as error:
            if error.code != 400 or json.load(error)["error"]["code"] not in BUDGET_CODES:
                raise
            return ""
        results = [
            {"type": "tool_result", "tool_use_id": one["id"], "content": calculator(one["input"].get("expression"))}
            for one in content
            if one["type"] == "tool_use"
        ]
        if not results:
            return "".join(one["text"] for one in content if one["type"] == "text")
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    return ""


def main(question: str, expected: str) -> None:
    reward = float(dialogue(question).strip() == expected)
    post(f"/sessions/{KEY}/reward", {"reward": reward})


if __name__ == "__main__":
    main(*sys.argv[1:])
