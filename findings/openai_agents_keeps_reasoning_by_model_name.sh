#!/usr/bin/env bash
# openai-agents sends reasoning_content back only to a model whose name contains "deepseek".
#
# Version: openai-agents 0.24.0 with openai 3.54.0, Python 3.11, Linux.
#
# Assumption: what a chat completions server returns in an assistant message, also its reasoning_content, is part of the
# history that the client sends with the next turn of the tool loop; if not, there is a setting of the client.
#
# Behaviour: the name of the model decides. The same answers of the same server come back with their reasoning for the
# name "my-deepseek", and without it for "qwen3".
#
# Output seen:
#   reasoning in the second request: {"my-deepseek": [null, "hm", null], "qwen3": [null, null, null]}
#
# Why it matters: templates of reasoning models render the reasoning of the turns since the last question. Without it the
# next prompt is no extension of the tokens that the policy generated: every turn of a tool loop becomes a branch with a
# prompt that the policy never continued, and the prefix cache of the server misses.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check openai-agents==0.24.0 openai==3.54.0
seen=$("$folder/env/bin/python" - <<'PYTHON'
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        status, headers, body = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}"

import asyncio, agents
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)

def call(call_id, **arguments):
    function = {"name": "look", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "reasoning_content": "hm",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}]}

def answer(body):
    sent.append(body["messages"])
    message = replies.pop(0)
    reason = "tool_calls" if "tool_calls" in message else "stop"
    reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m",
             "choices": [{"index": 0, "message": message, "finish_reason": reason}]}
    return 200, {"Content-Type": "application/json"}, json.dumps(reply).encode()

def run(model, *messages):
    global sent, replies
    sent, replies, looked = [], [*messages, {"role": "assistant", "content": "done"}], []

    @agents.function_tool
    def look(place: int) -> str:
        looked.append(place)
        return "nothing"

    client = AsyncOpenAI(base_url=address + "/v1", api_key="k")
    agent = agents.Agent("one", tools=[look], model=agents.OpenAIChatCompletionsModel(model, client))
    try:
        end = asyncio.run(agents.Runner.run(agent, "look")).final_output
    except agents.AgentsException as error:
        end = type(error).__name__
    return looked, end

found = {}
for model in ("qwen3", "my-deepseek"):
    run(model, call("call_0", place=1))
    found[model] = [message.get("reasoning_content") for message in sent[1]]
print(json.dumps(found, sort_keys=True))
PYTHON
)
echo "reasoning in the second request: $seen"
expected='{"my-deepseek": [null, "hm", null], "qwen3": [null, null, null]}'
[ "$seen" = "$expected" ] || { echo "expected: $expected"; exit 1; }
