"""openai-agents sends reasoning_content back only to a model whose name contains "deepseek".

Version: openai-agents 0.24.0 with openai 3.54.0, Python 3.11, Linux.

Assumption: what a chat completions server returns in an assistant message, also its reasoning_content, is part of the
history that the client sends with the next turn of the tool loop; if not, there is a setting of the client.

Behaviour: the name of the model decides. The same answers of the same server come back with their reasoning for the
name "my-deepseek", and without it for "qwen3".

Output seen: "reasoning in the second request: {'qwen3': [None, None, None], 'my-deepseek': [None, 'hm', None]}".

Why it matters: templates of reasoning models render the reasoning of the turns since the last question. Without it the
next prompt is no extension of the tokens that the policy generated: every turn of a tool loop becomes a branch with a
prompt that the policy never continued, and the prefix cache of the server misses.

    python findings/openai_agents_keeps_reasoning_by_model_name.py     # exit 0 while this holds, 1 otherwise
"""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PACKAGES = ("openai-agents==0.24.0", "openai==3.54.0")
PROGRAM = """
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
print(json.dumps(found))
"""
SHOWN = "reasoning in the second request"
EXPECTED = {"qwen3": [None, None, None], "my-deepseek": [None, "hm", None]}


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        venv.create(Path(name) / "env", with_pip=True)
        python = Path(name) / "env" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        done = subprocess.run([python, "-c", PROGRAM], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(f"{SHOWN}: {found}\n")
    return 0 if found == EXPECTED else 1


if __name__ == "__main__":
    sys.exit(main())
