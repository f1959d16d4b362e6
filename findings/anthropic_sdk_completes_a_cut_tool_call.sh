#!/usr/bin/env bash
# The anthropic SDK turns the cut JSON of a tool call into complete arguments that the model did not write.
#
# Version: anthropic 2.12.0, Python 3.11, Linux.
#
# Assumption: a streamed tool_use block whose input_json_delta events end in the middle of the JSON (stop_reason
# max_tokens) has no usable input: get_final_message() raises, or leaves the input empty or as text.
#
# Behaviour: the text is parsed as far as it goes. A number that was cut becomes a smaller number, and a list or an object
# loses its last entries; the block looks like any other. Only stop_reason tells of it.
#
# Output seen:
#   inputs: [{"keep_days": 3, "path": "/data"}, {"files": ["a"]}, {}]
#
# Why it matters: an agent that dispatches on tool_use blocks deletes files after 3 days instead of 30, and the reward
# blames the policy for it. A server must not offer a call that its length limit has cut.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check anthropic==2.12.0
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

import anthropic

def events(text):
    usage = {"input_tokens": 1, "output_tokens": 9}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
               "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": message}
    yield {"type": "content_block_start", "index": 0,
           "content_block": {"type": "tool_use", "id": "t", "name": "delete", "input": {}}}
    yield {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": text}}
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": {"stop_reason": "max_tokens", "stop_sequence": None}, "usage": usage}
    yield {"type": "message_stop"}

def answer(body):
    parts = [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events(body["messages"][0]["content"])]
    return 200, {"Content-Type": "text/event-stream"}, "".join(parts).encode()

client, found = anthropic.Anthropic(base_url=address, api_key="k"), []
for text in ('{"path": "/data", "keep_days": 3', '{"files": ["a", "b', '{"path": "/da'):
    with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": text}]) as stream:
        found.append(stream.get_final_message().content[0].input)
print(json.dumps(found, sort_keys=True))
PYTHON
)
echo "inputs: $seen"
expected='[{"keep_days": 3, "path": "/data"}, {"files": ["a"]}, {}]'
[ "$seen" = "$expected" ] || { echo "expected: $expected"; exit 1; }
