"""`python -m areal.fleet.server_host` in quick motion, with servers that speak the native dialect."""

from areal.fleet import server_host
from areal.fleet.native import NativeReplica
from areal.system import heartbeat
from areal.system.process import run_main

if __name__ == "__main__":
    server_host.replica_factory = lambda backend: NativeReplica
    server_host._ASK_INTERVAL_S = heartbeat.INTERVAL_S = 0.1
    server_host._SLOW_ENGINE_S = 0.5
    run_main(server_host.main)
