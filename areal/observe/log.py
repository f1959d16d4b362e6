"""Log lines `time level process name message` on standard error, for the logger "areal" and those below it."""

from __future__ import annotations

import logging
import sys

_ROOT = "areal"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module. `name` is `__name__`, or a short name to put below "areal"."""
    return logging.getLogger(name if name == _ROOT or name.startswith(_ROOT + ".") else f"{_ROOT}.{name}")


def configure_logging(level: str = "INFO", process_name: str = "main") -> None:
    """Send the lines of the logger "areal" to standard error. Called once at the start of a process."""
    root = logging.getLogger(_ROOT)
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    # A percent sign in the name must not start a field of the format string.
    shown = process_name.replace("%", "%%")
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)s {shown} %(name)s %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False
