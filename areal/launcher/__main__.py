"""Owns the choice of a launcher: `python -m areal.launcher` takes the one that the configuration needs."""

from __future__ import annotations

from areal.launcher.local import main
from areal.system.process import run_main

if __name__ == "__main__":
    # The local launcher is the only one so far; it refuses a configuration of several machines by name.
    run_main(main)
