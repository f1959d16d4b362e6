"""Runs one part of the GPU suite: python -m tests.gpu PART. Exit status 2 without a GPU, or for another part."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
LIMIT_S = 600
COMMANDS = {
    1: ["test_part1_kernels.py"],
    2: ["test_part2_engine.py", "test_part2_float8.py"],
    3: ["test_part3_rollout.py"],
    4: ["test_part4_runs.py"],
    5: ["test_part5_speed.py"],
    6: ["test_part6_megatron.py"],
}


def main(words: Sequence[str]) -> int:
    part = int(words[0]) if len(words) == 1 and words[0].isdigit() else 0
    if part not in COMMANDS:
        sys.stderr.write("make test-gpu PART=1..6\n")
        return 2
    if not torch.cuda.is_available():
        sys.stderr.write("make test-gpu: torch finds no CUDA device on this machine, so nothing was tested\n")
        return 2
    files = [str(FOLDER / name) for name in COMMANDS[part]]
    argv = [sys.executable, "-X", "no_debug_ranges", "-m", "pytest", "-m", "gpu", "-q", "-s", *files]
    return subprocess.run([*argv, "--session-timeout", str(LIMIT_S)], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
