"""A real run ends by Ctrl-C with a recovery checkpoint and continues by the same command; nothing is trained twice."""

import json
import signal

import pytest

from areal.launcher.preflight import newest_checkpoint, step_of
from areal.ledger.audit import audit
from areal.system.run_paths import RunPaths

pytestmark = pytest.mark.slow


def test_the_first_ctrl_c_saves_and_the_same_command_continues(make_run):
    run = make_run("recover.freq_steps=1000", "total_train_steps=12")  # no checkpoint is due before the end
    paths = RunPaths(run.folder)
    run.train_up_to(2)
    assert newest_checkpoint(paths) is None
    run.launcher.send_signal(signal.SIGINT)
    assert run.wait_for_the_end() == 130, run.log_path.read_text()
    saved = newest_checkpoint(paths)
    assert saved is not None
    assert step_of(saved) >= 2
    assert f"saved as {saved.name}; to continue: " in run.log_path.read_text()
    run.arguments = [*run.arguments, "actor.optimizer.lr=2.0e-3"]
    run.start()
    run.wait_for_the_end()
    log = run.log_path.read_text()
    assert f"trainers from {saved.name}" in log
    assert "actor.optimizer.lr: 0.001 -> 0.002" in log
    steps = [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()]
    assert steps == list(range(13))
    assert run.exit_code == 0
    assert audit(paths.ledger).is_clean
