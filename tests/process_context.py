"""The context that a launcher gives to a process."""

from typing import Any

from areal.system.process import ProcessContext


def a_context(**changes: Any) -> ProcessContext:
    """The context of the only trainer rank of a run with one server, with other values."""
    inputs: dict[str, Any] = {"role": "trainer", "index": 0, "world_size": 1, "num_servers": 1, "run_id": 0}
    inputs |= {"run_dir": "", "num_threads": 1, "recover": False, "device": "cpu"}
    return ProcessContext(**inputs | changes)
