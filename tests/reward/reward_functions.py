"""Reward functions that behave well or badly, run in the workers of the pool's tests."""

import os
import subprocess
import sys
import time
from pathlib import Path


def length(prompt, completion, prompt_ids, completion_ids, **row):
    return len(completion)


def truth(prompt, completion, prompt_ids, completion_ids, **row):
    return completion == "yes"


def echo_row(prompt, completion, prompt_ids, completion_ids, weight, **row):
    assert "prompt" not in row, row
    return weight + sum(prompt_ids) + len(completion_ids)


def raises(prompt, completion, prompt_ids, completion_ids, **row):
    raise ValueError(f"cannot read {completion!r}")


def math_within_a_second(prompt, completion, prompt_ids, completion_ids, **row):
    """The reward `math` with a shorter limit of processor time for each comparison."""
    from areal.reward import math_symbolic

    math_symbolic._CPU_LIMIT_S = 1
    return math_symbolic.symbolic_math_reward(prompt, completion, prompt_ids, completion_ids, **row)


def hangs(prompt, completion, prompt_ids, completion_ids, **row):
    while completion == "hang":
        time.sleep(0.01)
    return 1.0


def scaled(prompt, completion, prompt_ids, completion_ids, weight, **row):
    return hangs(prompt, completion, prompt_ids, completion_ids) * weight * len(completion)


def returns_nan(prompt, completion, prompt_ids, completion_ids, **row):
    return float("nan")


def returns_none(prompt, completion, prompt_ids, completion_ids, **row):
    return None


def returns_text(prompt, completion, prompt_ids, completion_ids, **row):
    return "1.0"


def details(prompt, completion, prompt_ids, completion_ids, details, **row):
    return {name: float(value) if value in ("nan", "inf") else value for name, value in details.items()}


def dies(prompt, completion, prompt_ids, completion_ids, **row):
    if completion == "die":
        os._exit(3)
    return 1.0


def dies_once(prompt, completion, prompt_ids, completion_ids, marker, **row):
    if not Path(marker).exists():
        Path(marker).touch()
        os._exit(3)
    return 1.0


def prints(prompt, completion, prompt_ids, completion_ids, **row):
    print("hello from a user", flush=True)  # noqa: T201 - what is tested
    os.write(1, b"bytes on descriptor 1")
    os.system("echo from a child")
    sys.stdout.write("no newline")
    sys.stdout.flush()
    return 1.0


def exits(prompt, completion, prompt_ids, completion_ids, **row):
    sys.exit(1)


def process_id(prompt, completion, prompt_ids, completion_ids, **row):
    return os.getpid()


def waits_for_file(prompt, completion, prompt_ids, completion_ids, folder, **row):
    (Path(folder) / f"started-{completion}").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.002)
    return time.monotonic()


def starts_a_child(prompt, completion, prompt_ids, completion_ids, folder, **row):
    child = subprocess.Popen(["sleep", "1000"])
    (Path(folder) / "child").write_text(str(child.pid))
    child.wait()


async def is_async(prompt, completion, prompt_ids, completion_ids, **row):
    return 1.0


if __name__ == "__main__":
    raise SystemExit("this file must not run as a script inside a worker")
