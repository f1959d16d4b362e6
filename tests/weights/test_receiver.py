"""The process that receives for a host keeps its place in the group when it cannot write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from areal.weights import receiver
from tests.expect import raises_code


class Group:
    """What a rank receives: the bytes 0, 1, 2 and so on."""

    group_name = "weights-1"

    def __init__(self) -> None:
        self.num_received = 0
        self.is_left = False

    def broadcast_bytes(self, content: NDArray[np.uint8], device: torch.device) -> None:
        content[:] = range(self.num_received, self.num_received + len(content))
        self.num_received += len(content)

    def close(self) -> None:
        self.is_left = True


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null/version/weights"])
def test_what_cannot_be_written_is_received(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the servers of other hosts would not get the version either."""
    monkeypatch.setattr(receiver, "PART_BYTES", 4)
    made, group = receiver.Receiver(), Group()
    monkeypatch.setattr(made, "_group", group)

    def receive(files: dict[str, int]) -> None:
        joined = {"master_address": "", "master_port": 0, "rank": 1, "world_size": 2, "backend": "gloo"}
        made.receive(**joined, group_name=group.group_name, timeout_s=9.0, files=files)  # type: ignore[arg-type]

    other = tmp_path / "version/weights"
    with raises_code("weights.not_written", path):
        receive({path: 10, str(other): 3})
    assert (group.num_received, group.is_left) == (13, False)
    receive({str(other): 6})
    assert other.read_bytes() == bytes(range(13, 19))
