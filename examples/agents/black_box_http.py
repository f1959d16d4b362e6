"""The same program without an SDK, so it starts in 50 ms. Its dialect is that of Anthropic, or with --openai of OpenAI.

workflow_args={command: [python, examples/agents/black_box_http.py, "{question}", "{answer}"]}
workflow_args={command: [python, examples/agents/black_box_http.py, "{question}", --openai]} reward_fn=exact

With the answer it reports its reward by POST; without, a function scores the finished session.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
MAX_TURNS, MAX_RETRIES = 4, 3
BUDGET_CODES = ("agent.turn_budget", "agent.token_budget", "agent.prompt_too_long")
ADDRESS, KEY = os.environ.get("ANTHROPIC_BASE_URL", ""), os.environ.get("ANTHROPIC_API_KEY", "")
OPENAI_ADDRESS, OPENAI_KEY = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")
NAME, DESCRIPTION = "calculator", "The value of a product of two numbers."
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}
OPENAI_TOOL = {"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}}


def calculator(arguments: dict[str, Any]) -> str:
    match = re.fullmatch(r"(\d{1,4})\*(\d{1,4})", str(arguments.get("expression")))
    return str(int(match[1]) * int(match[2])) if match else "error"


def post(url: str, body: dict[str, Any], key: dict[str, str]) -> dict[str, Any]:
    """The reply. 429, 5xx and lost connections are repeated, with the mark by which the server knows a retry."""
    for attempt in range(MAX_RETRIES + 1):
        headers = {"Content-Type": "application/json", "x-stainless-retry-count": str(attempt)} | key
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
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


def anthropic_turn(messages: Messages) -> tuple[str, Messages]:
    """The text of an answer, and the messages that follow it: none without a tool call."""
    body = {"model": "policy", "max_tokens": 64, "messages": messages, "tools": [TOOL]}
    content = post(f"{ADDRESS}/v1/messages", body, {"x-api-key": KEY})["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": calculator(block["input"])}
        for block in content
        if block["type"] == "tool_use"
    ]
    text = "".join(block["text"] for block in content if block["type"] == "text")
    return text, [{"role": "assistant", "content": content}, {"role": "user", "content": results}] if results else []


def openai_turn(messages: Messages) -> tuple[str, Messages]:
    """The same in the dialect of OpenAI."""
    body = {"model": "policy", "messages": messages, "tools": [OPENAI_TOOL]}
    reply = post(f"{OPENAI_ADDRESS}/chat/completions", body, {"Authorization": f"Bearer {OPENAI_KEY}"})
    answer = reply["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": calculator(json.loads(call["function"]["arguments"]))}
        for call in answer.get("tool_calls") or ()
    ]
    return answer.get("content") or "", [answer, *results] if results else []


def dialogue(question: str, turn: Callable[[Messages], tuple[str, Messages]]) -> str:
    """The text of the last answer; empty when the budget of the session ended before."""
    messages: Messages = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        try:
            text, following = turn(messages)
        except urllib.error.HTTPError as error:
            if error.code != 400 or json.load(error)["error"]["code"] not in BUDGET_CODES:
                raise
            return ""
        if not following:
            return text
        messages += following
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("answer", nargs="?", help="report the reward: 1 for this answer, else 0")
    parser.add_argument("--openai", action="store_true", help="the dialect and the variables of OpenAI")
    args = parser.parse_args()
    text = dialogue(args.question, openai_turn if args.openai else anthropic_turn)
    if args.answer is not None:
        reward = float(text.strip() == args.answer)
        post(f"{ADDRESS}/sessions/{KEY}/reward", {"reward": reward}, {"x-api-key": KEY})


if __name__ == "__main__":
    main()
