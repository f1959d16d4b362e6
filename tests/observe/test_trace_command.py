import subprocess
import sys


def test_a_run_without_a_trace_is_told_how_to_get_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    command = [sys.executable, "-m", "areal.observe.trace", str(tmp_path), "-o", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "perf_tracer.enabled=true" in done.stderr
