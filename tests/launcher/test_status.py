import http.server
import io
import json
import threading

import pytest

from areal.launcher import status as status_module
from areal.launcher.result import episodes_of
from areal.launcher.status import (
    EvaluationSource,
    StatusLine,
    StatusSource,
    finished_line,
    fitted,
    last_record,
    rollout_line,
    training_line,
    waiting_text,
)
from areal.launcher.units import Child
from areal.system.discovery import FileRegistry
from areal.system.heartbeat import Beat, write_beats
from areal.system.run_paths import RunPaths
from tests.launcher.fake_backend import FakeBackend, planned_process


class _Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        raise OSError


def test_status_lines():
    status = {
        "step": 3,
        "total_steps": 10,
        "reward_mean": 0.25,
        "waiting": 7,
        "running": 20,
        "staleness_mean": 1.5,
        "tokens_per_s": 1234.5,
        "awaited": "the trainer",
        "replicas": {"replicas": [{"state": "serving"}, {"state": "serving"}]},
    }
    assert rollout_line(status, None, is_waiting=True) == (
        "step 3/10 | reward 0.250 | queue 7+20 running | staleness 1.50 | 1,234 tokens/s | waits for the trainer"
    )
    assert "waits for" not in rollout_line(status, None, is_waiting=False)
    status["replicas"]["replicas"][0]["state"] = "absent"
    assert rollout_line(status, None, is_waiting=True).endswith("| 1 of 2 servers serve | waits for the trainer")
    status["rewards"] = "9 reward calls wait for 1 worker, 3.0 s each: increase reward.workers"
    assert rollout_line(status, None, is_waiting=True).endswith(f"| waits for the trainer | {status['rewards']}")
    assert rollout_line({}, 5, is_waiting=False).startswith("step 0/5 | reward - | queue 0+0 running")
    reasons = {"rejected: no_reward": 3, "rejected: agent_error: KeyError": 4, "failed: TypeError": 1}
    ended = rollout_line({"rejected": 7, "failed": 1, "reasons": reasons}, 5, is_waiting=False)
    assert "running, 7 rejected (agent_error: KeyError), 1 failed (TypeError) |" in ended
    assert training_line({"step": 2, "loss": 0.5, "trained_tokens_per_s": 10.0}, None) == (
        "step 2/? | loss 0.5000 | 10 tokens/s"
    )
    last = {"step": 9, "rollout/reward": 0.5, "rollout/staleness_mean": 2}
    assert finished_line(last, 9) == "step 9/9 | reward 0.500 | staleness 2.00"
    assert "loss -" in training_line({"step": 2, "loss": None}, 4)


def test_a_long_line_loses_whole_parts_before_it_is_cut():
    line = "step 1/2 | reward 0.5 | queue 1+2 | staleness 1 | 7 tokens/s"
    assert fitted(line, len(line)) == line
    assert fitted(line, 50) == "step 1/2 | reward 0.5 | staleness 1 | 7 tokens/s"
    assert fitted(line, 35) == "step 1/2 | reward 0.5 | 7 tokens/s"
    assert fitted(line, 12) == "step 1/2 | r"
    assert fitted("長い行です", 5) == "長い "  # such a letter needs two columns


def test_the_last_record_is_a_complete_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_record(path) is None
    path.write_text('{"step": 1')
    assert last_record(path) is None
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert last_record(path) == {"step": 2}


def test_terminal_line_is_refreshed_in_place_and_cut_to_its_width():
    screen = _Terminal()
    line = StatusLine(screen, width=lambda: 10)
    line.show("a" * 50)
    line.show("short")
    line.say("lasting")
    line.end(None)
    assert screen.getvalue() == "\r" + "a" * 9 + "\x1b[K\rshort\x1b[K\r\x1b[Klasting\n"


def test_last_line_is_not_repeated():
    for screen, expected in ((io.StringIO(), "one\ntwo\n"), (_Terminal(), "\rone\x1b[K\r\x1b[Kone\ntwo\n")):
        line = StatusLine(screen, width=lambda: 80)
        line.show("one")
        line.end("one")
        line.end(None)
        line.end("two")
        assert screen.getvalue() == expected


def test_plain_lines_are_printed_at_intervals(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(status_module.time, "monotonic", lambda: now[0])
    screen = io.StringIO()
    line = StatusLine(screen)
    line.show("one")
    now[0] = 9.0
    line.show("two")
    now[0] = 11.0
    line.show("three")
    now[0] = 40.0
    line.show("three")
    assert screen.getvalue() == "one\nthree\n"


@pytest.fixture
def controller():
    """Address of a server that answers /status."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"step": 4} if self.path == "/status" else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_requests_to_the_controller_bypass_the_proxy(tmp_path, controller, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(status_module, "_TIMEOUT_S", 200.0)
    registry = FileRegistry(tmp_path / "names")
    source = StatusSource(registry, tmp_path / "metrics.jsonl", has_controller=True, total_steps=9)
    assert source.status() is None
    assert source.text(None) is None
    registry.add("controller", json.dumps({"address": "http://127.0.0.1:9"}))
    assert source.status() is None
    registry.add("controller", json.dumps({"address": controller}), replace=True)
    status = source.status()
    assert status == {"step": 4}
    assert source.text(status).startswith("step 4/9")


def test_run_without_controller_reads_the_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "loss": 1.0}\n')
    registry = FileRegistry(tmp_path / "names")
    source = StatusSource(registry, tmp_path / "metrics.jsonl", has_controller=False, total_steps=9)
    assert source.status() is None
    assert source.text(None) == "step 6/9 | loss 1.0000 | - tokens/s"
    assert source.read_last() == source.text(None)


def test_a_restarted_process_is_waited_for_since_its_restart():
    backend, now_s = FakeBackend(), 0.0
    child = Child(planned_process("controller"), backend, lambda: now_s)
    child.start()
    now_s = 500.0
    backend.exit_codes["controller"] = -9
    assert waiting_text([child], now_s) == "waiting 0 s for controller to get ready"
    child.start()
    assert waiting_text([child], now_s + 7.0) == "waiting 7 s for controller to get ready"


def test_an_evaluation_without_training_shows_what_its_process_does_and_has_no_episodes(tmp_path):
    paths = RunPaths(tmp_path)
    source = EvaluationSource(paths.alive)
    assert source.text(source.status()) is None
    write_beats(paths.alive, {"controller": Beat(pid=1, beats=1, doing="3 of 8 answers", for_s=0.0, step=None)})
    assert source.text(source.status()) == "3 of 8 answers"
    assert episodes_of(paths, source.status()) is None
