"""Files that grow line by line, on a disk that is full after 12 KiB: each line is whole or absent, also afterwards."""

import ast
import contextlib
import json
import resource
from pathlib import Path

import pytest

import areal
from areal.agent.session_server import TurnJournal
from areal.evaluate.samples import Sample, SampleKey
from areal.launcher.status import keep_changes
from areal.observe.spans import SessionTracer
from areal.observe.step_files import StepLines, append_step_line
from areal.observe.trace import ChromeTracer
from areal.system.durable import append_whole
from areal.system.run_paths import RunPaths

LIMIT = 12 * 1024
TEXT = "x" * 700


def step_lines(folder):
    lines = StepLines(folder / "metrics.jsonl")
    return folder / "metrics.jsonl", lambda: lines.append(1, {"text": TEXT})


def step_line(folder):
    return folder / "alarms.jsonl", lambda: append_step_line(folder / "alarms.jsonl", 1, {"text": TEXT})


def turn_journal(folder):
    journal = TurnJournal(folder / "turns")
    return folder / "turns" / "000001.jsonl", lambda: journal.intent([TEXT])


def session_tracer(folder):
    tracer = SessionTracer(folder / "sessions.ndjson", flush_threshold=1)

    def add():
        tracer.add_part("episode", "1", "episode", 0, 1)
        tracer.ended("1", "accepted", TEXT)

    return folder / "sessions.ndjson", add


def chrome_tracer(folder):
    tracer = ChromeTracer(folder / "trace.jsonl", "trainer-0")

    def add():
        tracer.add_span(TEXT, 0, 1)
        tracer.flush()

    return folder / "trace.jsonl", add


def option_changes(folder):
    paths = RunPaths(folder)
    paths.metrics.write_text('{"step": 1}\n')
    return paths.option_changes, lambda: keep_changes(paths, [TEXT])


def answers(folder):
    sample = Sample(key=SampleKey("", 1, "greedy", 0), data={}, source="", error=TEXT)
    file = open(folder / "answers.jsonl", "ab", buffering=0)  # noqa: SIM115
    return folder / "answers.jsonl", lambda: append_whole(file, sample.line())


@contextlib.contextmanager
def full_after(size):
    """Files cannot grow beyond `size`: a write up to there is cut short, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "appender", [step_lines, step_line, turn_journal, session_tracer, chrome_tracer, option_changes, answers]
)
def test_a_file_on_a_full_disk_has_whole_lines_and_continues(tmp_path, appender):
    path, append = appender(tmp_path)

    def fill():
        for _ in range(100):
            append()

    with full_after(LIMIT):
        with pytest.raises(OSError):  # noqa: PT011 - EFBIG here, ENOSPC on a disk
            fill()
        size = path.stat().st_size
        with pytest.raises(OSError):  # noqa: PT011
            append()
        assert path.stat().st_size == size
    assert LIMIT - 1600 < size <= LIMIT
    append()
    lines = path.read_bytes().splitlines(keepends=True)
    assert path.stat().st_size > size
    assert all(line.endswith(b"\n") and isinstance(json.loads(line), dict) for line in lines)


def opens_for_append(path: Path) -> bool:
    """Whether a module has a call with a file mode that begins with `a`."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    modes = [call.args[1].value for call in calls if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)]
    return any(isinstance(mode, str) and mode in ("a", "ab", "a+", "at") for mode in modes)


def test_every_module_that_appends_uses_one_function():
    root = Path(areal.__file__).parent
    others = {"launcher/preflight.py", "ledger/ledger.py", "system/process.py"}  # locks; the output of a child process
    result = {str(path.relative_to(root)): path for path in root.rglob("*.py") if opens_for_append(path)}
    assert [
        name for name, path in result.items() if name not in others and "append_whole" not in path.read_text()
    ] == []
