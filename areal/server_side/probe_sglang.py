"""Owns the question to an installed SGLang: which version it is, whether it can run here, which flags it refuses.

Run by path with the interpreter of SGLang's environment; see flag_check for the question and the answer.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from typing import Any

try:
    import flag_check  # beside this file: areal is not installed here
except ModuleNotFoundError:
    from areal.server_side import flag_check


def probe(question: dict[str, Any]) -> dict[str, Any]:
    if importlib.util.find_spec("sglang") is None:
        return {"missing": "sglang"}
    version = importlib.metadata.version("sglang")
    problem = platform_problem(on_gpu=question["on_gpu"])
    if problem:
        return {"version": version, "problems": [["", problem]]}
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    return {"version": version, "problems": flag_check.flag_problems(parser, question)}


def platform_problem(*, on_gpu: bool) -> str:
    """Why this SGLang cannot run on what it is given, or ''."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return "cannot run, SGLang's package sgl_kernel is missing there"
    if not on_gpu:
        return ""
    import torch

    return "" if torch.cuda.is_available() else "cannot run, its torch sees no GPU"


if __name__ == "__main__":
    flag_check.answer(probe)
