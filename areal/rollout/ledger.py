"""The old path of the ledger command, which is `python -m areal.ledger` now."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.exit("areal: error: the command is now `python -m areal.ledger audit|show|stats RUN`")
