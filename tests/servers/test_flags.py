"""The real servers refuse an unknown flag when they start, and their own error is found in what they print."""

from __future__ import annotations

from pathlib import Path

from areal.fleet.server_log import last_error
from tests.servers.real_server import Backend, RealServer


def test_an_unknown_flag_ends_the_start_with_the_server_s_own_error(
    backend: Backend, models: dict[str, Path], tmp_path: Path
) -> None:
    server = RealServer(backend, models["old"], tmp_path, flags={"max_modle_len": 8})
    try:
        assert server.process.wait(timeout=200) != 0
    finally:
        server.kill_all()
    assert "--max-modle-len" in last_error(server.log.read_text().splitlines())[0]
