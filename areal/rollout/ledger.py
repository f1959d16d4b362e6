"""The former path of the ledger command: prints the new one, `python -m areal.ledger`, and exits with status 1."""

import sys

if __name__ == "__main__":
    sys.exit("areal: error: the command is now `python -m areal.ledger audit|stats RUN`")
