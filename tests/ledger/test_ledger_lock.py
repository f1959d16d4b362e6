"""One process writes a ledger: a second controller on the same folder is refused and changes nothing."""

import os
import subprocess
import sys

import pytest

from areal.api.errors import LedgerError
from areal.ledger.event_files import LedgerReader
from areal.ledger.ledger import Ledger

HOLD = """
import sys
from pathlib import Path
from areal.ledger.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_controller_is_refused_until_the_first_ends(tmp_path):
    folder = tmp_path / "ledger"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(LedgerError, match=rf"pid {holder.pid} on host ") as error:
            Ledger.open(folder)
        assert error.value.code == "ledger.locked"
        assert list(LedgerReader(folder).events()) == [], "readers need no lock"
        holder.kill()
    Ledger.open(folder)


async def test_closing_a_ledger_releases_its_lock(tmp_path):
    ledger = Ledger.open(tmp_path)
    await ledger.close()
    done = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "ledger").write_text("a file")
    with pytest.raises(LedgerError, match=rf"{os.fspath(tmp_path)}/ledger: ") as error:
        Ledger.open(tmp_path / "ledger")
    assert error.value.code == "ledger.not_writable"
