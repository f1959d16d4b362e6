"""`python -m areal.engine.server_host` in quick motion, with servers that speak the native dialect and that may be
silent, as vLLM is, while they take in weights."""

from areal.engine import server_host
from areal.engine.native import NativeReplica
from areal.system import heartbeat
from areal.system.process import run_main


class SilentInUpdates(NativeReplica):
    @property
    def answers_during_update(self) -> bool:
        return False


if __name__ == "__main__":
    server_host.replica_factory = lambda backend: SilentInUpdates
    server_host._ASK_INTERVAL_S = heartbeat.INTERVAL_S = 0.1
    server_host._REMARKABLE_S = 0.5
    run_main(server_host.main)
