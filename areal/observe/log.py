"""Owns log lines: `time level process name message` on standard error, below the logger "areal" only."""

from __future__ import annotations

import logging
import sys

_ROOT = "areal"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: pass `__name__`, or a short name that is put below "areal"."""
    return logging.getLogger(name if name == _ROOT or name.startswith(_ROOT + ".") else f"{_ROOT}.{name}")


def configure_logging(level: str = "INFO", process_name: str = "main") -> None:
    """Send our log lines to standard error. Called once by each process entry; foreign loggers are left alone."""
    root = logging.getLogger(_ROOT)
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    # The name goes into a format string: a percent sign in it must not start a field.
    shown = process_name.replace("%", "%%")
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)s {shown} %(name)s %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False
