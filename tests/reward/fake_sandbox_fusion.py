"""A small server in the dialect of SandboxFusion, which runs Python programs without isolation. For tests only."""

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FakeSandboxFusion:
    """Serves on loopback while it is used as a context manager. `answers` replaces the first answers of the server:
    each is (HTTP status, body)."""

    def __init__(self, answers=()):
        self.answers = list(answers)
        self.requests = []
        self.headers = []
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = fake.answer(self.path, body, self.headers)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, name="fake SandboxFusion")
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, path, body, headers):
        with self._lock:
            self.requests.append((path, body))
            self.headers.append(dict(headers))
            if self.answers:
                return self.answers.pop(0)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            return 200, json.dumps(run(body)).encode()
        finally:
            with self._lock:
                self._running -= 1


def run(body):
    """The answer to one request: the program runs in an empty folder with the files of the request."""
    assert body["language"] == "python"
    with tempfile.TemporaryDirectory(prefix="fake-fusion-") as folder:
        for name, content in body.get("files", {}).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))
        code = Path(folder, "main.py")
        code.write_text(body["code"])
        process = subprocess.Popen(
            [sys.executable, str(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"PATH": os.environ["PATH"]},
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(body.get("stdin", "").encode(), timeout=body["run_timeout"])
            status, code = "Finished", process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            status, code = "TimeLimitExceeded", None
    result = {"status": status, "execution_time": 0.1, "return_code": code}
    result |= {"stdout": stdout.decode(errors="replace"), "stderr": stderr.decode(errors="replace")}
    outcome = "Success" if status == "Finished" and code == 0 else "Failed"
    return {"status": outcome, "message": "", "compile_result": None, "run_result": result, "files": {}}
