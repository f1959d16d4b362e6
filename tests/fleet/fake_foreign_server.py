"""A foreign server as its host sees it: a script with processes of its own that speaks enough of the native dialect.

    fake_foreign_server.py PORT FOLDER [WORD ...]

It leaves FOLDER/server.pid and FOLDER/engine.pid. The words make it misbehave; see the code.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port, folder, words = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
ENGINE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def note(name, text):
    new = folder / f".{name}.{os.getpid()}"
    new.write_text(str(text))
    new.replace(folder / name)


def start_engine():
    """As an engine that is not told of the death of its server, and so outlives it."""
    engine = subprocess.Popen([sys.executable, "-I", "-S", "-c", ENGINE], stdout=subprocess.PIPE)
    engine.stdout.readline()
    note("engine.pid", engine.pid)
    return engine


def end_with_engine(engine):
    engine.wait()
    sys.stdout.write("(APIServer pid=1) RuntimeError: Engine core died. See root cause above.\n")
    sys.stdout.flush()
    os._exit(1)


def close_when_told(server):
    """As vLLM without its engine: it takes no more connections, and is long in ending."""
    while not (folder / "close-the-port").exists():
        time.sleep(0.01)
    sys.stdout.write("(APIServer pid=1) ERROR 11-21 10:00:00 [async_llm.py:9] EngineDeadError: no engine\n")
    sys.stdout.flush()
    server.shutdown()


def end_slowly(*_):
    time.sleep(0.5)
    sys.stdout.write("ended by itself\n")
    sys.stdout.flush()
    os._exit(0)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        while self.path == "/health" and (folder / "engine-hangs").exists():
            time.sleep(0.01)
        if self.path == "/health" and (folder / "engine-is-dead").exists():
            return self.answer(500, {"error": "the engine is dead"})
        info = {"weight_version": "3", "vocab_size": 9, "context_length": 99, "max_group_samples": 1, "adapters": []}
        load = {"running_requests": 2, "queued_requests": 1, "kv_tokens_used": 0, "kv_tokens_capacity": 1}
        self.answer(200, info | load | {"generated_tokens_total": 5})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True  # as uvicorn

    def handle_error(self, request, client_address):
        """One who asked and did not wait for the answer is no error of the server, and none of its last words."""


if "says-why" in words:
    sys.exit(
        "(EngineCore pid=1) ERROR 11-21 10:00:00 [core.py:9] ValueError: no such model\nRuntimeError: root cause above"
    )
if "port-taken" in words and not (folder / "server.pid").exists():
    note("server.pid", os.getpid())
    sys.exit("OSError: [Errno 98] Address already in use")
note("environment.json", json.dumps({"argv": sys.argv, "group": os.getpgrp(), "parent": os.getppid()}))
if "ignores-sigterm" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "ends-slowly" in words:
    signal.signal(signal.SIGTERM, end_slowly)
engine = start_engine()
note("server.pid", os.getpid())
if "killed-at-start" in words and not (folder / "was-killed").exists():
    note("was-killed", "")
    os.kill(os.getpid(), signal.SIGKILL)
if "never-ready" in words:
    time.sleep(600)
if "ignores-engine" not in words:
    threading.Thread(target=end_with_engine, args=[engine], daemon=True).start()
with Server(("127.0.0.1", port), Handler) as server:
    threading.Thread(target=close_when_told, args=[server], daemon=True).start()
    server.serve_forever(poll_interval=0.01)
time.sleep(600)
