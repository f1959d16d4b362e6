"""What a hostile program can and cannot do. Each protection is also tested alone, with the others switched off."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from areal.reward import sandbox as module
from areal.reward.code_tests import Output, SandboxEnded
from areal.reward.sandbox import Isolation, Sandbox, SandboxLimits

ROOT = Path(__file__).parents[2]
NO_WALLS = Isolation(namespaces=False, system_calls=False)
NO_NAMESPACES = Isolation(namespaces=False)
NO_FILTER = Isolation(system_calls=False)
ISOLATION, _ = module.available_isolation()


@pytest.fixture(scope="module", autouse=True)
def patient():
    """On a busy machine a sandbox may start slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_START_WAIT_S", 100.0)
        yield


def run(source, *, stdin=b"", isolation=None, limits=None, wait_s=100.0):
    with Sandbox(
        "program", source, limits=limits or SandboxLimits(), isolation=isolation or ISOLATION, keep_s=200, stdin=stdin
    ) as sandbox:
        return sandbox.wait_started().output(until_s=time.monotonic() + wait_s)


@pytest.fixture
def namespaces():
    if not ISOLATION.namespaces:
        pytest.skip("this machine has no namespaces for us")


@pytest.fixture
def call_filter():
    if not ISOLATION.system_calls:
        pytest.skip("this machine has no filter of system calls")


def test_a_program_reads_writes_and_exits():
    assert run("print(int(input()) + 1)", stdin=b"41\n") == Output(stdout=b"42\n", exit_code=0)
    assert run("import sys; print(1); sys.exit(3)") == Output(stdout=b"1\n", exit_code=3)
    assert run("exit()").exit_code == 0
    assert run("def f(:").exit_code == 1
    assert run("1 / 0").exit_code == 1
    assert run("import os; print(7, flush=True); os._exit(0)").stdout == b"7\n"
    assert run("if __name__ == '__main__': print(2 ** 20000 % 7, len(str(10 ** 5000)))").stdout == b"4 5001\n"


def test_threads_event_loops_and_installed_packages_work():
    assert run("import threading as t; x = t.Thread(target=print, args=(1,)); x.start(); x.join()").stdout == b"1\n"
    assert run("import asyncio; asyncio.run(asyncio.sleep(0)); print(1)").stdout == b"1\n"
    assert run("import numpy; print(numpy.ones(3).sum())").stdout == b"3.0\n"


def test_files_go_into_its_own_folder_which_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    source = "import tempfile; open('a', 'w').write('x'); print(open('a').read(), tempfile.mkdtemp())"
    for isolation in (ISOLATION, NO_WALLS):
        output = run(source, isolation=isolation)
        assert output.stdout.startswith(b"x /tmp" if isolation.namespaces else b"x " + bytes(tmp_path))
        assert output.exit_code == 0
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("isolation", [None, NO_WALLS])
def test_environment_and_descriptors_of_the_worker_are_not_inherited(monkeypatch, isolation):
    monkeypatch.setenv("AREAL_SECRET", "hunter2")
    mine, theirs = socket.socketpair()
    with mine, theirs:
        os.set_inheritable(mine.fileno(), True)
        source = (
            "import os\nprint(sorted(os.environ))\nfor fd in range(3, 60):\n"
            "  try:\n    os.fstat(fd); print(fd)\n  except OSError: pass\n"
        )
        assert run(source, isolation=isolation).stdout == b"['HOME', 'OPENBLAS_NUM_THREADS', 'TMPDIR']\n"


def test_the_environment_of_other_processes_cannot_be_read(namespaces):
    source = "import os; print(os.listdir('/proc')); open(f'/proc/{PID}/environ', 'rb')".replace(
        "{PID}", str(os.getpid())
    )
    assert run(source) == Output(stdout=b"[]\n", exit_code=1)


@pytest.mark.parametrize("isolation", [Isolation(), NO_FILTER])
def test_nothing_outside_its_folder_can_be_written(namespaces, tmp_path, isolation):
    existing = tmp_path / "existing"
    existing.write_text("mine")
    source = f"""
import os, errno, ctypes
def tried(step):
    try:
        step()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "DONE"
print(tried(lambda: open({str(existing)!r}, "w")), tried(lambda: open({str(tmp_path / "new")!r}, "w")))
print(tried(lambda: os.unlink({str(existing)!r})), tried(lambda: os.mkdir("/dev/shm/areal-{os.getpid()}")))
libc = ctypes.CDLL(None)
print(libc.mount(b"none", b"/", None, 32 | 4096, None), libc.umount2({str(tmp_path)!r}.encode(), 2))
print(tried(lambda: open("/new", "w")), tried(lambda: open(os.path.dirname(os.__file__) + "/os.py", "a")))
print(tried(lambda: open("/dev/zero")), tried(lambda: open("/dev/null", "w").write("x")))
"""
    wanted = b"ENOENT ENOENT\nENOENT ENOENT\n-1 -1\nEROFS EROFS\nENOENT DONE\n"
    assert run(source, isolation=isolation).stdout == wanted
    assert not os.path.exists(f"/dev/shm/areal-{os.getpid()}")
    assert existing.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [existing]


@pytest.mark.parametrize("isolation", [Isolation(), NO_FILTER])
def test_only_the_files_of_python_are_visible(namespaces, tmp_path, isolation):
    """Not the datasets, the run folder, the home folder, or the files of areal."""
    (tmp_path / "train.jsonl").write_text('{"answer": 18}')
    mine = [str(tmp_path), str(ROOT / "README.md"), str(Path(module.__file__).parent)]
    hidden = [*mine, "/etc/passwd", "/sys", "/proc/self"]
    installed = {Path(prefix).parts[2] for prefix in (sys.prefix, sys.base_prefix) if prefix.startswith("/tmp/")}
    source = f"""
import os
print([path for path in {hidden!r} if os.path.exists(path)])
for folder in ("/tmp/..", "/", "/tmp/../..", "/proc/1/root"):
    if os.path.exists(folder):
        print(sorted(set(os.listdir(folder)) & {{"tmp", "proc", "dev", "sys", "boot", "var", "srv"}}))
print(sorted(os.listdir("/dev")), sorted(set(os.listdir("/tmp")) - {installed!r}))
import json, ssl, sqlite3
"""
    wanted = "[]\n" + "['dev', 'proc', 'tmp']\n" * 3 + "['null'] ['program.py']\n"
    assert run(source, isolation=isolation) == Output(stdout=wanted.encode(), exit_code=0)


@pytest.mark.parametrize("isolation", [NO_NAMESPACES, NO_FILTER])
def test_no_socket_reaches_the_test(namespaces, call_filter, isolation):
    source = (
        "import socket, sys; s = socket.socket(); s.settimeout(9); s.connect(('127.0.0.1', int(input()))); print('in')"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1]).encode()
        assert run(source, stdin=port, isolation=NO_WALLS).stdout == b"in\n"  # the test can tell
        assert run(source, stdin=port, isolation=isolation).stdout == b""


def test_a_unix_socket_of_another_process_is_out_of_reach(call_filter, tmp_path):
    source = "import socket; s = socket.socket(socket.AF_UNIX); s.connect(input()); print('in')"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        assert run(source, stdin=bytes(tmp_path / "s"), isolation=NO_WALLS).stdout == b"in\n"
        assert run(source, stdin=bytes(tmp_path / "s")).stdout == b""


def test_a_program_can_start_signal_and_leave_no_process(call_filter):
    source = """
import ctypes, os, resource, subprocess
def tried(step):
    try:
        step()
    except OSError as error:
        return error.errno
libc = ctypes.CDLL(None, use_errno=True)
def fork_itself():
    if os.uname().machine == "x86_64" and libc.syscall(57) < 0:
        raise OSError(ctypes.get_errno(), "fork")
def forget_the_keeper():
    if libc.prctl(1, 0, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "prctl")
for step in (os.fork, lambda: subprocess.run(["true"]), lambda: os.execv("/bin/true", ["true"]), os.setsid,
             lambda: os.kill(os.getppid() or 1, 0), lambda: os.posix_spawn("/bin/true", ["true"], {}),
             lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU), fork_itself, forget_the_keeper):
    print(tried(step), end=" ")
"""
    wanted = b"1 1 1 1 1 1 1 1 1 "
    if os.uname().machine != "x86_64":
        wanted = b"1 1 1 1 1 1 1 None 1 "
    assert run(source, isolation=NO_NAMESPACES).stdout == wanted


def test_no_descriptor_sends_a_signal_or_a_datagram(call_filter, tmp_path):
    """A pipe can be set to send SIGKILL to any process of the user when it becomes ready."""
    kill = """
import fcntl, os
pid, (r, w) = int(input()), os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, pid); fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b"x")
"""
    victims = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    pids = [str(victim.pid).encode() for victim in victims]
    assert run(kill, stdin=pids[0], isolation=NO_WALLS).exit_code == 0  # the test can tell
    assert run(kill, stdin=pids[1], isolation=NO_NAMESPACES).exit_code == 1
    assert victims[0].wait(100) == -9
    assert victims[1].poll() is None
    victims[1].kill()
    victims[1].wait()
    say = "import socket as s; a, b = s.socketpair(s.AF_UNIX, s.SOCK_DGRAM); a.sendto(b'x', input())"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "s"))
        assert run(say, stdin=bytes(tmp_path / "s"), isolation=NO_WALLS).exit_code == 0
        assert run(say, stdin=bytes(tmp_path / "s"), isolation=NO_NAMESPACES).exit_code == 1
    assert run("import socket; a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))").stdout == b"b'x'\n"


def test_other_processes_cannot_be_slowed_down(call_filter):
    source = "import os; os.setpriority(os.PRIO_PROCESS, int(input()), 19)"
    pid = str(os.getpid()).encode()
    assert run(source, stdin=pid, isolation=NO_NAMESPACES).exit_code == 1
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


@pytest.mark.parametrize(
    "source",
    [
        "import os\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()",
        "import os; os.makedirs('a/b'); open('a/f', 'w'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)",
        "import os\nfor k in range(9): os.makedirs(f'{k}/b/{k}')\nos.symlink('/', 'l'); os.symlink('l', '0/x')",
    ],
)
def test_a_folder_is_removed_whatever_the_program_wrote(tmp_path, monkeypatch, source):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    assert run(source, isolation=NO_WALLS).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_message_that_would_need_too_much_memory_is_refused():
    source = """
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b"[" + b"[]," * 600000 + b"1]\\n")
    except OSError:
        pass
"""
    with (
        Sandbox("functions", source, limits=SandboxLimits(), isolation=ISOLATION, keep_s=200) as sandbox,
        pytest.raises(SandboxEnded) as error,
    ):
        sandbox.wait_started().receive(until_s=time.monotonic() + 100)
    assert error.value.reason == "too_large"


def test_all_processes_of_a_fork_bomb_end_with_the_program(namespaces):
    """Without the filter (at most 30 processes): the namespace ends them all."""
    source = "import os, time\nfor _ in range(30):\n  if os.fork() == 0:\n    os.setsid(); time.sleep(1000)\nprint(1)"
    before = set(psutil.pids())
    assert run(source, isolation=NO_FILTER) == Output(stdout=b"1\n", exit_code=0)
    assert not [p for p in set(psutil.pids()) - before if is_sandbox(p)]


def test_a_daemon_ends_with_its_program():
    """Without namespaces and filter: its keeper ends it."""
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
"""
    before = set(psutil.pids())
    assert run(source, isolation=NO_WALLS).exit_code == 0
    assert run(source + "time.sleep(1000)", isolation=NO_WALLS, wait_s=1.0).exit_code is None
    assert not [p for p in set(psutil.pids()) - before if is_sandbox(p)]


def is_sandbox(pid):
    """Only of this test process: the command line contains the id of the process that started it."""
    try:
        process = psutil.Process(pid)
        is_ours = process.cmdline()[-3:-2] == ["areal.reward.sandbox_inside"] and process.cmdline()[-1] == str(
            os.getpid()
        )
        return is_ours and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


SHIELDED = """
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
time.sleep(1000)
"""


@pytest.mark.parametrize("isolation", [None, NO_WALLS])
def test_an_endless_program_is_ended(isolation):
    assert run("while True: pass", isolation=isolation, wait_s=0.1).exit_code is None
    assert run("import time; time.sleep(1000)", isolation=isolation, wait_s=0.1).exit_code is None
    assert run(SHIELDED, isolation=isolation, wait_s=0.1).exit_code is None
    assert run("while True: pass", isolation=isolation, limits=SandboxLimits(cpu_s=1)).exit_code not in (0, None)


def test_memory_output_and_files_have_a_limit():
    assert run("x = bytes(3 << 30)").exit_code == 1
    flood = run("while True: print('x' * 1000)")
    assert flood.exit_code is None
    assert len(flood.stdout) < 2 << 20
    assert run("open('f', 'wb').write(bytes(20 << 20))").exit_code != 0
    limits = SandboxLimits(folder_bytes=1 << 20)
    if ISOLATION.namespaces:
        assert run("for k in range(9): open(f'f{k}', 'wb').write(bytes(1 << 19))", limits=limits).exit_code != 0
    assert run("import resource as r; r.setrlimit(r.RLIMIT_CPU, (r.RLIM_INFINITY,) * 2)").exit_code == 1


def test_a_sandbox_ends_with_the_process_that_started_it(tmp_path):
    source = """
import os, sys, time
from areal.reward.sandbox import *
isolation, _ = available_isolation()
s = Sandbox("program", "while True: pass", limits=SandboxLimits(cpu_s=60), isolation=isolation, keep_s=1000)
s.wait_started()
print(s.pid, flush=True)
time.sleep(1000)
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, cwd=ROOT, env=env)
    assert parent.stdout is not None
    keeper = psutil.Process(int(parent.stdout.readline()))
    program = keeper.children()[0]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for process in (program, keeper):
        process.wait(timeout=100)
    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_ends_without_close():
    with Sandbox("functions", "", limits=SandboxLimits(), isolation=ISOLATION, keep_s=2.0) as sandbox:
        assert os.getsid(sandbox.pid) == sandbox.pid  # signals to its process group do not reach the test
        sandbox.wait_started().receive(until_s=time.monotonic() + 100)
        with pytest.raises(SandboxEnded) as error:
            sandbox.receive(until_s=time.monotonic() + 100)
    assert error.value.reason == "ended"


def test_a_missing_protection_is_named_and_the_others_remain(namespaces, call_filter, monkeypatch):
    """As on a machine that allows user namespaces but forbids mounts in them."""
    real = module.Sandbox.receive

    def without(self, *, until_s):
        message = real(self, until_s=until_s)
        return {"missing": "namespaces: forbidden"} if self.isolation.namespaces else message

    monkeypatch.setattr(module.Sandbox, "receive", without)
    assert module.available_isolation() == (NO_NAMESPACES, ["namespaces: forbidden"])


def test_no_program_runs_without_the_requested_protections(namespaces):
    with pytest.raises(module.IsolationMissing) as error:
        run("print(1)", isolation=Isolation(), limits=SandboxLimits(folder_bytes=-1))
    assert error.value.args[0].startswith("namespaces: ")
