"""Real runs in bad surroundings: a full disk, a read-only folder, a wall clock that jumps."""

import errno
import mmap
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.driver import Run
from tests.faults.schedule import EVERYTHING

pytestmark = pytest.mark.slow

CLOCK_C = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long *offset_s;
static int (*real)(clockid_t, struct timespec *);
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
    real = dlsym(RTLD_NEXT, "clock_gettime");
    if (file >= 0) offset_s = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME && offset_s) now->tv_sec += *offset_s;
    return status;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def last_line(run: Run) -> str:
    return run.log_path.read_text().strip().splitlines()[-1]


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[None]:
    """A disk of its own for a folder, where the system lets us mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no small disk: there is no mount command here")
    if done.returncode:
        pytest.skip(f"no small disk: mounting one is not permitted here ({done.stderr.strip()})")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def make_read_only(root: Path) -> None:
    """Once the last of the killed has let go of its files."""
    deadline = time.monotonic() + 60.0
    while True:
        done = subprocess.run(["mount", "-o", "remount,ro", str(root)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.1)


def test_a_full_and_then_a_read_only_disk_end_the_run_in_one_line_without_loss(make_run, prove_all, tmp_path):
    root = tmp_path / "disk"
    with small_disk(root, 160):
        run = make_run(root=root)
        run.train_up_to(4)
        ballast = root / "ballast"
        with pytest.raises(OSError) as full:  # noqa: PT011 - its errno is compared
            fill(ballast)
        assert full.value.errno == errno.ENOSPC
        assert run.wait_for_the_end() == 1
        assert "is full" in last_line(run), last_line(run)
        assert "Traceback" not in run.log_path.read_text()
        assert run.left_behind() == []
        ballast.unlink()

        run.start()
        run.train_up_to(run.highest_step + 2)
        run.kill(EVERYTHING)
        make_read_only(root)
        run.start()
        assert run.wait_for_the_end() == 2
        assert "Read-only file system" in last_line(run), last_line(run)
        assert last_line(run).startswith("areal: error: ")
        assert str(root) in last_line(run)
        subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)

        run.start()
        assert run.wait_for_the_end() == 0, last_line(run)
        prove_all(run)
        run.abandon()


@pytest.fixture
def wall_clock(tmp_path, monkeypatch):
    """Sets how far the wall clock of every process started from here on is off, in seconds, now and later."""
    source, library, offset = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "offset"
    source.write_text(CLOCK_C)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    except FileNotFoundError:
        pytest.skip("the wall clock cannot be moved: no C compiler here to build the library that moves it")
    offset.write_bytes(bytes(8))
    monkeypatch.setenv("CLOCK_OFFSET_FILE", str(offset))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with open(offset, "r+b") as file, mmap.mmap(file.fileno(), 8) as shared:

        def jump(seconds: int) -> None:
            shared[:] = struct.pack("@l", seconds)

        yield jump


def test_a_jump_of_the_wall_clock_has_no_effect(make_run, prove_all, wall_clock):
    run = make_run("total_train_steps=90", "launcher.hang_s=3")
    run.train_up_to(10)
    before = run.pids(fresh=True)
    wall_clock(+86_400)
    run.train_up_to(40)
    wall_clock(-86_400)
    run.train_up_to(70)
    assert run.pids(fresh=True) == before, "a process was started again"
    wall_clock(0)
    assert run.wait_for_the_end() == 0
    prove_all(run)
