"""A process that receives files over an update group for the host of a foreign server, which does not import torch.

`python -m areal.weights.receiver` answers each line of JSON on standard input, the arguments of `Receiver.receive`,
with one: empty, or with an error and its code. A wait is ended by ending the process.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from areal.api.errors import ArealError, WeightSyncError
from areal.system.process import run_main
from areal.weights.update_group import PART_BYTES, UpdateGroup, check_trainer, open_store


class Receiver:
    """One rank of an update group."""

    _group: UpdateGroup | None = None

    def receive(
        self,
        *,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
        files: Mapping[str, int],
    ) -> None:
        """Join the group, unless this is the group of the call before, and write `files`: path -> size, in the order in
        which they are sent. After an error of the group it is left, so that the sender does not wait for this rank.
        weights.not_written: everything was received, but not everything could be written."""
        problem = ""
        try:
            if self._group is None or self._group.group_name != group_name:
                self.leave()
                check_trainer(master_address)
                store = open_store(master_address, master_port, timeout_s=timeout_s)
                self._group = UpdateGroup(
                    store, rank=rank, world_size=world_size, group_name=group_name, backend=backend, timeout_s=timeout_s
                )
            for path, size in files.items():
                try:
                    _write(self._group, path, size)
                except OSError as error:
                    problem = problem or f"the weights cannot be written to {path}: {error.strerror or error}"
        except BaseException:
            self.leave()
            raise
        if problem:
            raise WeightSyncError(problem, code="weights.not_written")

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _write(group: UpdateGroup, path: str, size: int) -> None:
    """Receive a file and write it. The file is received to its end also when it cannot be written: the other ranks wait
    for this one."""
    parts = _parts(group, size)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            for part in parts:
                file.write(part.data)
    except OSError:
        for _ in parts:
            pass
        raise


def _parts(group: UpdateGroup, size: int) -> Iterator[NDArray[np.uint8]]:
    """The parts in which `broadcast_bytes` sends a file. One at a time is in memory."""
    for begin in range(0, size, PART_BYTES):
        part = np.empty(min(PART_BYTES, size - begin), np.uint8)
        group.broadcast_bytes(part, torch.device("cpu"))
        yield part


def _serve() -> None:
    receiver = Receiver()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # gloo writes messages to standard output
        for line in sys.stdin:
            answer: dict[str, str] = {}
            try:
                receiver.receive(**json.loads(line))
            except ArealError as error:
                answer = {"error": str(error), "code": error.code}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    run_main(_serve)
