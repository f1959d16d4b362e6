"""Owns the question to an installed vLLM: which version it is, whether it can run here, which flags it refuses.

Run by path with the interpreter of vLLM's environment; see flag_check for the question and the answer.
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
    if importlib.util.find_spec("vllm") is None:
        return {"missing": "vllm"}
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError as error:
        return {"version": "", "problems": [["", f"is broken, vLLM does not know its own version ({error})"]]}
    problem = platform_problem(on_gpu=question["on_gpu"])
    if problem:
        return {"version": version, "problems": [["", problem]]}
    try:
        parser = server_parser()
    except ImportError as error:
        return {"version": version, "problems": [["", f"cannot be asked for vLLM's flags: {error}"]]}
    return {"version": version, "problems": flag_check.flag_problems(parser, question)}


def server_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ModuleNotFoundError:  # where it was before
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def platform_problem(*, on_gpu: bool) -> str:
    """Why this vLLM cannot run on what it is given, or ''."""
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        needs = "sees no GPU" if on_gpu else "is built for GPUs, of which it gets none: install a CPU build"
        return f"cannot run, vLLM {needs}"
    if on_gpu and current_platform.is_cpu():
        return "is a CPU build, but its servers get GPUs: install vLLM for GPUs, or use cluster.n_gpus_per_node=0"
    return ""


if __name__ == "__main__":
    flag_check.answer(probe)
