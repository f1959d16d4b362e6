"""The command `areal`, also `python -m areal`."""

from areal.cli.main import console

if __name__ == "__main__":
    console()
