"""Owns how a trainer object learns which process of a run it lives in."""

from __future__ import annotations

from areal.api.errors import LaunchError
from areal.observe.log import configure_logging
from areal.system.process import ProcessContext


def join_run() -> ProcessContext:
    """This process's place in its run; its log is set up from here on. LaunchError when no launcher started it."""
    context = ProcessContext.from_env()
    if context is None:
        raise LaunchError(
            "this script is started by a launcher: python -m areal.launcher.local SCRIPT --config CONFIG.yaml"
        )
    configure_logging(process_name=context.name)
    return context
