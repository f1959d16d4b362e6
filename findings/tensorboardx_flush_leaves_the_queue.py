"""flush() of tensorboardX's SummaryWriter does not write what is still in the writer's queue.

Version: tensorboardX 2.6.5 with numpy 2.3.5 and protobuf 6.33.6, Python 3.11 to 3.13, Linux.

Assumption: after add_scalar() and flush() the values are in the event file, as the docstring of flush() says
("Flushes the event file to disk"). A process that flushes at each checkpoint loses nothing from before the checkpoint
when it is killed.

Behaviour: add_scalar() puts an event into a queue, and a thread writes the events of the queue. flush() flushes the
file object; it waits neither for the queue nor for the thread. What is in the queue when the process is killed is
lost, although flush() returned.

Output seen: "after flush() and SIGKILL: 6, 2, 3, 6, 5 of 8 values are in the file"; the numbers differ, and most are
below 8.

Why it matters: a training that continues from a checkpoint logs only later steps, so the steps of the queue are
missing from the curves for good. Event files of a training are to be written without the queue:
tensorboardX.event_file_writer.EventsWriter.

    python findings/tensorboardx_flush_leaves_the_queue.py     # exit 0 while this holds, 1 otherwise
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PACKAGES = ("tensorboardX==2.6.5", "numpy==2.3.5", "protobuf==6.33.6")
NUM_VALUES, NUM_RUNS = 8, 5
PROGRAM = """
import os, signal, sys
from tensorboardX import SummaryWriter

writer = SummaryWriter(logdir=sys.argv[1])
for step in range(int(sys.argv[2])):
    writer.add_scalar("loss", float(step), global_step=step)
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        counts: list[int] = []
        for run in range(NUM_RUNS):
            logs = folder / f"run-{run}"
            subprocess.run([python, "-c", PROGRAM, logs, str(NUM_VALUES)], check=False)
            counts.append(sum(len(re.findall(b"loss", path.read_bytes())) for path in logs.iterdir()))
    shown = ", ".join(map(str, counts))
    sys.stdout.write(f"after flush() and SIGKILL: {shown} of {NUM_VALUES} values are in the file\n")
    return 0 if min(counts) < NUM_VALUES else 1


if __name__ == "__main__":
    sys.exit(main())
