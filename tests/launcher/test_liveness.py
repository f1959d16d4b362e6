from types import SimpleNamespace

import pytest

from areal.launcher.status import LivenessWatch, SilenceTimer
from areal.system.heartbeat import Beat
from areal.system.run_paths import RunPaths
from tests.launcher.fake_backend import FakeBackend


def beat(beats, pid=7):
    return Beat(pid=pid, beats=beats, doing="work", for_s=0.0, step=None)


def test_silence_is_the_time_without_a_new_heartbeat():
    silences = SilenceTimer()
    looks = [(1, 0.5), (1, 0.5), (1, 0.5), (2, 0.5), (2, 0.5)]
    result = [silences.look("a", 7, beat(beats), since_last_look_s=gap_s) for beats, gap_s in looks]
    assert result == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_before_the_first_beat_of_a_process_there_is_no_silence():
    silences = SilenceTimer()
    assert silences.look("a", 7, None, since_last_look_s=50.0) == 0.0
    for _ in range(3):  # what an earlier process of that name left
        assert silences.look("a", 8, beat(99, pid=7), since_last_look_s=1.0) == 0.0
    assert silences.look("a", 8, beat(99, pid=8), since_last_look_s=1.0) == 0.0
    assert silences.look("a", 8, beat(99, pid=8), since_last_look_s=1.0) == 1.0


def test_silence_excludes_time_when_the_launcher_was_stopped():
    silences = SilenceTimer()
    silences.look("a", 7, beat(1), since_last_look_s=0.5)
    assert silences.look("a", 7, beat(1), since_last_look_s=3600.0) == pytest.approx(1.0)


def test_a_server_with_rejected_weights_is_reported_once_per_connection(tmp_path):
    child = SimpleNamespace(name="server-1", is_running=True, pid=7, killed_s=None)
    watch = LivenessWatch(RunPaths(tmp_path), FakeBackend(), 10.0)

    def ended(now_s, connection, weights):
        replica = {"name": "server-1", "id": connection, "weights": weights}
        status = {"replicas": {"replicas": [{"name": "server-0", "id": "z", "weights": "rejected"}, replica]}}
        return [child.name for child, _ in watch.look([child], now_s, status)]

    looks = [(1.0, "a", "differs"), (2.0, "a", "rejected"), (3.0, "a", "rejected"), (4.0, "b", "rejected")]
    assert [ended(*look) for look in looks] == [[], ["server-1"], [], ["server-1"]]
    assert watch.look([child], 5.0, {"replicas": None}) == []
