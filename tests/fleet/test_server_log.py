"""What is quoted from the log of a foreign server that has ended."""

import json
from pathlib import Path

import pytest

from areal.fleet.server_log import end_reason, last_error

VLLM_LOG = """
(EngineCore pid=7) ERROR 11-21 10:00:00 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-21 10:00:00 [core.py:9]   File "core.py", line 9, in run
(EngineCore pid=7) ERROR 11-21 10:00:00 [core.py:9] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
SGLANG_LOG = """
[2026-11-21 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 9, in __init__
IndexError: index out of range in self

[2026-11-21 10:00:00] Received sigquit from a child process. It usually means the child failed.
"""
KILLED_SCHEDULER_LOG = """
[2026-11-21 10:00:00] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...
[2026-11-21 10:00:05] kill_process_tree called: parent_pid=6, include_parent=True, pid=6
"""
DEAD_ENGINE_LOG = """
(APIServer pid=1) ERROR 11-21 10:00:00 [vllm_error.py:54]     raise EngineDeadError()
(APIServer pid=1) ERROR 11-21 10:00:00 [vllm_error.py:54] vllm.EngineDeadError: EngineCore died. See the root cause.
INFO:     Finished server process [1]
"""
USAGE_LOG = "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --tpp 2\n"


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (VLLM_LOG, "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"),
        (SGLANG_LOG, "IndexError: index out of range in self"),
        (USAGE_LOG, "launch_server.py: error: unrecognized arguments: --tpp 2"),
        ("INFO 11-21 all is well\n", ""),
        ("", ""),
    ],
)
def test_the_error_of_a_dead_server_is_found_in_its_log(log, error):
    assert last_error(log.splitlines()) == end_reason(log.splitlines()) == ([error] if error else [])


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            KILLED_SCHEDULER_LOG,
            "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
        ),
        (DEAD_ENGINE_LOG, "vllm.EngineDeadError: EngineCore died. See the root cause."),
    ],
)
def test_without_an_error_the_death_of_a_process_is_the_reason(log, words):
    assert last_error(log.splitlines()) == []
    assert end_reason(log.splitlines()) == [words]


RECORDED = json.loads((Path(__file__).parent / "recordings" / "start_errors.json").read_text())


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("vllm-0.32.0 unknown", "main.py: error: unrecognized arguments: --max-modle-len=8"),
        ("sglang-0.5.23 unknown", "sglang serve: error: unrecognized arguments: --max-modle-len=8"),
        ("vllm-0.32.0 dtype", "main.py serve: error: argument --dtype: invalid choice: 'float7'"),
        ("sglang-0.5.23 value", "sglang serve: error: argument --max-running-requests: invalid int value: 'many'"),
        (
            "vllm-0.32.0 model",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, Cannot "
            "find the config file for awq",
        ),
    ],
)
def test_the_error_of_a_start_with_a_bad_flag_is_found_in_what_the_real_servers_printed(name, error):
    assert "\n".join(last_error(RECORDED[name])).startswith(error)
