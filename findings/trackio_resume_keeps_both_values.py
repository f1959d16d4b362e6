"""A resumed Trackio run keeps both values of a step that is logged again, where wandb drops the second.

Version: trackio 0.43.0, Python 3.11 to 3.13, Linux.

Assumption: trackio is "a drop-in replacement for wandb". In a run that is resumed with resume="allow", log(...,
step=s) with a step that the run already has either replaces the value or is ignored with a warning, as in wandb, so
that a curve has one value per step.

Behaviour: every call adds a row. The database has both values of the step, nothing is printed, and the dashboard
draws the curve through both. resume="allow" also continues the newest run of that name, whatever made it: a training
that starts from its first step under an old name is mixed into the old run.

Output seen: "values by step after a resume: {1: [10.0], 2: [20.0, 21.0], 3: [30.0, 31.0], 4: [41.0]}".

Why it matters: a training that continues from a checkpoint after a failure computes the steps after the checkpoint
again. Its curves get a zigzag there, and means over steps count these steps twice. A caller has to remember the last
step that was sent.

    python findings/trackio_resume_keeps_both_values.py     # exit 0 while this holds, 1 otherwise
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PACKAGES = ("trackio==0.43.0",)
WRITE = """
import sys, trackio

run = trackio.init(project="p", name="training", resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)
for step in map(int, sys.argv[2].split(",")):
    run.log({"loss": 10.0 * step + float(sys.argv[1])}, step=step)
run.finish()
"""
READ = """
import json, os, sqlite3

database = sqlite3.connect(os.path.join(os.environ["TRACKIO_DIR"], "p.db"))
values = {}
for step, metrics in database.execute("SELECT step, metrics FROM metrics ORDER BY id"):
    values.setdefault(step, []).append(json.loads(metrics)["loss"])
print(json.dumps(values))
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        environ = os.environ | {"TRACKIO_DIR": str(folder / "data"), "HF_HUB_OFFLINE": "1"}

        def run(program: str, *words: str) -> str:
            done = subprocess.run(
                [python, "-c", program, *words], env=environ, check=True, capture_output=True, text=True
            )
            return done.stdout.strip()

        run(WRITE, "0", "1,2,3")
        run(WRITE, "1", "2,3,4")  # continues from a checkpoint after step 1
        found = json.loads(run(READ).splitlines()[-1])
    values = {int(step): given for step, given in found.items()}
    sys.stdout.write(f"values by step after a resume: {values}\n")
    return 0 if values == {1: [10.0], 2: [20.0, 21.0], 3: [30.0, 31.0], 4: [41.0]} else 1


if __name__ == "__main__":
    sys.exit(main())
