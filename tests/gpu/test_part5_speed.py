"""Part 5: memory and speed of one card, by the benchmarks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["benchmark/gpu_step.py", "--device", "cuda"], "mfu"),
        (["benchmark/gpu_publish.py", "--device", "cuda"], "seconds"),
        (["benchmark/gpu_memory.py", "--device", "cuda"], "rows"),
        (["benchmark/engine_overhead.py", "--device", "cuda", "--rounds", "3"], "head"),
    ],
)
def test_a_benchmark_gives_its_figures(words, key):
    done = subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=280, stdout=subprocess.PIPE)
    print(done.stdout.decode())  # noqa: T201
    assert key in json.loads(done.stdout.splitlines()[-1])
