"""The command `python -m areal.launcher`: runs a configuration with the launcher that it needs."""

from areal.launcher.local import main
from areal.system.process import run_main

if __name__ == "__main__":
    # The local launcher is the only one so far. It refuses a configuration with several machines.
    run_main(main)
