#!/usr/bin/env bash
# A resumed Trackio run keeps both values of a step that is logged again.
#
# Version: trackio 0.43.0, Python 3.11 to 3.13, Linux.
#
# Assumption: trackio is "a drop-in replacement for wandb". In a run that is resumed with resume="allow", log(...,
# step=s) with a step that the run already has either replaces the value or is ignored, so that a curve has one value
# per step.
#
# Behaviour: every call adds a row. The database has both values of the step. resume="allow" also continues the
# newest run of that name, whatever made it: a training that starts from its first step under an old name is mixed into
# the old run.
#
# Output seen: "values by step after a resume: {1: [10.0], 2: [20.0, 21.0], 3: [30.0, 31.0], 4: [41.0]}".
#
# Why it matters: a training that continues from a checkpoint after a failure computes the steps after the checkpoint
# again. Its curves get a zigzag there, and means over steps count these steps twice. A caller has to remember the last
# step that was sent.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check trackio==0.43.0
export TRACKIO_DIR="$folder/data" HF_HUB_OFFLINE=1
cat > "$folder/write.py" <<'PYTHON'
import sys, trackio

run = trackio.init(project="p", name="training", resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)
for step in map(int, sys.argv[2:]):
    run.log({"loss": 10.0 * step + float(sys.argv[1])}, step=step)
run.finish()
PYTHON
"$folder/env/bin/python" "$folder/write.py" 0 1 2 3 >/dev/null 2>&1
"$folder/env/bin/python" "$folder/write.py" 1 2 3 4 >/dev/null 2>&1 # continues from a checkpoint after step 1
seen=$("$folder/env/bin/python" - <<'PYTHON'
import json, os, sqlite3

database = sqlite3.connect(os.path.join(os.environ["TRACKIO_DIR"], "p.db"))
values = {}
for step, metrics in database.execute("SELECT step, metrics FROM metrics ORDER BY id"):
    values.setdefault(step, []).append(json.loads(metrics)["loss"])
print(values)
PYTHON
)
echo "values by step after a resume: $seen"
[ "$seen" = "{1: [10.0], 2: [20.0, 21.0], 3: [30.0, 31.0], 4: [41.0]}" ]
