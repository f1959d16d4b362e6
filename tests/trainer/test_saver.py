"""Which exports stay, and their upload to a hub: a server on loopback."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from areal.api.config import HubUploadConfig, SaverConfig
from areal.trainer.after_step import HubUploads, Saver, is_final, removable
from tests.fake_ranks import FakeRanks


class Engine:
    """What a saver calls of a TrainEngine."""

    def save(self, path: Path, *, with_optimizer: bool) -> None:
        assert not with_optimizer
        path.mkdir(parents=True)
        (path / "config.json").write_text(path.name)
        (path / "COMPLETE").write_text("{}")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"keep_last": 2}, [1, 2, 3, 4]),
        ({"keep_last": 1, "keep_every": 2}, [1, 3, 5]),
        ({"keep_last": 1, "keep_best": "m"}, [1, 3, 4, 5]),
        ({"keep_last": 1, "keep_best": "m", "best_is": "lowest"}, [1, 2, 4, 5]),
    ],
)
def test_the_newest_the_best_and_each_nth_export_stay(options, expected):
    scores = {1: 0.2, 2: 0.9, 3: 0.1, 5: 0.9}
    if options.get("best_is") != "lowest":
        scores |= {5: 0.5}
    assert removable(range(1, 7), scores, SaverConfig(**options)) == expected


def test_the_scores_outlive_the_process_and_those_of_a_lost_future_do_not_count(tmp_path):
    config = SaverConfig(keep_last=1, keep_best="eval/reward")
    first = Saver(tmp_path, {"actor": Engine()}, FakeRanks(), config)
    for step, reward in ((1, 0.9), (2, 0.3), (4, 1.0)):
        first.save(step, {"eval/reward": reward})
    again = Saver(tmp_path, {"actor": Engine()}, FakeRanks(), config)
    again.save(3, {})  # after a recovery
    assert sorted(path.name for path in (tmp_path / "actor").iterdir()) == ["step-000003", "step-000004"]
    assert json.loads((tmp_path / "scores.json").read_bytes()) == {"1": 0.9, "2": 0.3}


class Hub(ThreadingHTTPServer):
    """The requests of a folder's upload; everything else is 404."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.failures: list[int] = []
        """Statuses of the next commits."""
        self.created: list[dict] = []
        self.commits: list[dict[str, str]] = []
        self.may_commit = threading.Event()
        self.may_commit.set()


class HubHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub, base = self.server, f"http://127.0.0.1:{self.server.server_port}"
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.answer(200, {"url": f"{base}/me/model", "name": "me/model"})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            names = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            self.answer(200, {"files": names})
        elif self.path.endswith("/commit/main"):
            hub.may_commit.wait(100)
            if hub.failures:
                return self.answer(hub.failures.pop(0), {"error": "no"})
            lines = [json.loads(line) for line in body.splitlines()]
            result = {line["value"]["path"]: line["value"] for line in lines if line["key"] == "file"}
            title = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            texts = {name: base64.b64decode(item["content"]).decode() for name, item in result.items()}
            hub.commits.append({"": title, **texts})
            self.answer(200, {"commitUrl": f"{base}/me/model/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self.answer(404, {"error": self.path})
        return None

    def do_GET(self):
        self.answer(404, {"error": self.path})

    do_HEAD = do_GET

    def answer(self, status: int, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments):
        return None


@pytest.fixture
def hub(monkeypatch):
    result = Hub()
    thread = threading.Thread(target=result.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{result.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("areal.trainer.after_step._FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    yield result
    result.shutdown()
    result.server_close()
    thread.join()


def test_exports_are_uploaded_during_the_training_and_again_after_a_failure(hub, tmp_path):
    hub.may_commit.clear()
    hub.failures = [503]
    config = SaverConfig(keep_last=1, hub_upload=HubUploadConfig(repo_id="me/model", every=2))
    saver = Saver(tmp_path, {"actor": Engine()}, FakeRanks(), config)
    for step in (1, 2, 3):
        saver.save(step, {})  # does not wait for the hub
    kept = sorted(path.name for path in (tmp_path / "actor").iterdir())
    assert kept == ["step-000002", "step-000003"], "one that is uploaded is not removed"
    hub.may_commit.set()
    saver.save(5, {}, is_last=True)
    saver.close()
    assert hub.commits == [{"": f"After {step} train steps", "config.json": f"step-{step:06d}"} for step in (2, 5)]
    assert all(item.get("private") or item.get("visibility") == "private" for item in hub.created), hub.created
    assert saver.failed_uploads == 0


def test_a_refused_upload_is_not_repeated_and_is_counted(hub, tmp_path):
    hub.failures = [403] * 9
    uploads = HubUploads(HubUploadConfig(repo_id="me/model"))
    Engine().save(tmp_path / "step-000001", with_optimizer=False)
    uploads.add(1, tmp_path / "step-000001")
    uploads.close()
    assert (uploads.num_failed, len(hub.failures)) == (1, 8)


def test_the_end_gives_up_after_its_limit(hub, tmp_path):
    hub.may_commit.clear()
    uploads = HubUploads(HubUploadConfig(repo_id="me/model", timeout_s=0.01))
    Engine().save(tmp_path / "step-000001", with_optimizer=False)
    uploads.add(1, tmp_path / "step-000001")
    uploads.close()
    assert uploads.num_failed == 1
    hub.may_commit.set()


def test_an_error_without_an_answer_is_repeated():
    assert not is_final(ConnectionError())
