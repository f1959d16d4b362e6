"""Reward functions of the tests of scoring, in a file of their own, so that workers import nothing else."""

import time
from pathlib import Path

from areal.observe.step_files import log_metric


def length(prompt, completion, prompt_ids, completion_ids, **row):
    return len(completion)


def bangs(prompt, completion, prompt_ids, completion_ids, **row):
    return completion.count("!")


def detailed(prompt, completion, prompt_ids, completion_ids, **row):
    return {"score": len(completion), "bangs": completion.count("!"), "loud": completion.isupper(), "pred": completion}


def logging(prompt, completion, prompt_ids, completion_ids, **row):
    log_metric("spaces", completion.count(" "))
    return len(completion)


def fails_on_bad(prompt, completion, prompt_ids, completion_ids, **row):
    if completion == "bad":
        raise ValueError("bad answer")
    return 1.0


def fails_too(prompt, completion, prompt_ids, completion_ids, **row):
    raise ValueError("and so do I")


def nan_on_bad(prompt, completion, prompt_ids, completion_ids, **row):
    return float("nan") if completion == "bad" else 1.0


def hangs_on_bad(prompt, completion, prompt_ids, completion_ids, **row):
    while completion == "bad":
        time.sleep(0.01)
    return 1.0


def waits(prompt, completion, prompt_ids, completion_ids, folder, **row):
    Path(folder, "started").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.002)
    return 1.0


def fails_after_the_other_began(prompt, completion, prompt_ids, completion_ids, folder, **row):
    while not Path(folder, "started").exists():
        time.sleep(0.002)
    raise ValueError("too bad")
