#!/usr/bin/env bash
# The SDKs sleep as long as Retry-After says, whatever their timeout; openai gives up above 120 s, anthropic never.
#
# Version: openai 3.54.0 and anthropic 2.12.0, Python 3.11, Linux.
#
# Assumption: timeout=1.0 bounds a request with its retries, or at least the wait between them; a Retry-After that is too
# long is replaced by the backoff of the client, which is at most 8 s.
#
# Behaviour: with timeout=1.0 both sleep 90 s after a 429 with "Retry-After: 90". openai with 121 does not try again at
# all, although max_retries=1 is left; anthropic sleeps for a day if it is told so.
#
# Output seen:
#   sleeps in seconds: {"anthropic": {"121": [121.0], "86400": [86400.0], "90": [90.0]}, "openai": {"121": [],
#   "86400": [], "90": [90.0]}}
#
# Why it matters: a server that says when it expects to be free (a restart in 10 minutes) fails the agents of one SDK at
# once and stops those of the other for that time; both look like faults of the agent. Short values are the only ones
# that both clients follow.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check openai==3.54.0 anthropic==2.12.0
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

import time
import anthropic, openai

def answer(body):
    return 429, {"Retry-After": wait}, b""

slept, real_sleep = [], time.sleep
time.sleep = lambda seconds: (slept.append(seconds), real_sleep(0))
options = {"base_url": address, "api_key": "k", "timeout": 1.0, "max_retries": 1}
asked, found = {"model": "m", "messages": [{"role": "user", "content": "x"}]}, {}
for kind, ask in {
    "openai": lambda: openai.OpenAI(**options).chat.completions.create(**asked),
    "anthropic": lambda: anthropic.Anthropic(**options).messages.create(**asked, max_tokens=1),
}.items():
    found[kind] = {}
    for wait in ("90", "121", "86400"):
        slept.clear()
        try:
            ask()
        except (openai.RateLimitError, anthropic.RateLimitError):
            found[kind][wait] = list(slept)
print(json.dumps(found, sort_keys=True))
PYTHON
)
echo "sleeps in seconds: $seen"
expected='{"anthropic": {"121": [121.0], "86400": [86400.0], "90": [90.0]}, "openai": {"121": [], "86400": [], "90": [90.0]}}'
[ "$seen" = "$expected" ] || { echo "expected: $expected"; exit 1; }
