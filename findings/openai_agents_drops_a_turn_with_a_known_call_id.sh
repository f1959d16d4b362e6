#!/usr/bin/env bash
# openai-agents takes a tool call whose id it has seen in the run for the earlier call: the new turn disappears.
#
# Version: openai-agents 0.24.0 with openai 3.54.0, Python 3.11, Linux.
#
# Assumption: the id of a tool call names a call within one answer. A later answer with an id that was used before is
# another call: its tool runs, and the turn is part of the next request.
#
# Behaviour: with the arguments of the earlier call, the tool does not run, and the next request has neither the answer
# nor a result: the model sees the same dialogue again, and the tokens of its answer belong to no history. With other
# arguments the run ends with ModelBehaviorError.
#
# Output seen:
#   tools run, end, messages of each request: [[[1], "done", [1, 3, 3]], [[1], "ModelBehaviorError", [1, 3]]]
#
# Why it matters: models that write ids themselves repeat them (call_0 in each answer, or the name of the tool with a
# number). A server that passes these ids on loses turns of the policy, or ends its episodes. Ids on the wire have to be
# made by the server.
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

found = []
for place in (1, 2):
    looked, end = run("m", call("call_0", place=1), call("call_0", place=place))
    found.append([looked, end, [len(messages) for messages in sent]])
print(json.dumps(found, sort_keys=True))
PYTHON
)
echo "tools run, end, messages of each request: $seen"
expected='[[[1], "done", [1, 3, 3]], [[1], "ModelBehaviorError", [1, 3]]]'
[ "$seen" = "$expected" ] || { echo "expected: $expected"; exit 1; }
