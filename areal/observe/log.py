"""Log lines `time level process name message` on standard error, for the logger "areal" and those below it."""

import logging
import sys

_ROOT = "areal"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module. `name` is `__name__`, or a short name to put below "areal"."""
    return logging.getLogger(name if name == _ROOT or name.startswith(_ROOT + ".") else f"{_ROOT}.{name}")


def configure_logging(level: str = "INFO", process_name: str = "main") -> None:
    """Send the lines of the logger "areal" to standard error. Called once at the start of a process."""
    root = logging.getLogger(_ROOT)
    handler = logging.StreamHandler(sys.stderr)
    shown = process_name.replace("%", "%%")  # a percent sign would start a field of the format string
    form = f"%(asctime)s.%(msecs)03d %(levelname)s {shown} %(name)s %(message)s"
    handler.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False
