"""Serves the store in which the ranks of a server over several machines find each other, on loopback.

python -m areal.weights.parts_store prints the port of the store, and ends with the process that started it.
"""

import signal
import sys

from areal.system.network import Host, required_token
from areal.system.process import run_main
from areal.weights.update_group import serve_store

_TIMEOUT_S = 600.0


def main() -> None:
    store = serve_store(Host(), required_token("the store of the parts"), timeout_s=_TIMEOUT_S)
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    run_main(main)
