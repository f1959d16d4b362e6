"""A private Slurm on some nodes of one machine: a controller on node1, a daemon with GPUs that do not exist on each.

`python -m tests.cluster.slurm_cluster` exits with 2, and says what is missing, when it cannot run here. As a command it
runs another one on the first node, with SLURM_CONF set:

    python -m tests.cluster.slurm_cluster 3 -- COMMAND...
"""

import argparse
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.nodes import Node, Nodes
from tests.cluster.nodes import missing as nodes_missing

_PACKAGES = "slurmctld slurmd slurm-client munge"
_LIMIT_S = 120.0
_SYSTEM_PATH = "/usr/sbin:/usr/local/sbin"
_CONF = """\
ClusterName=test
SlurmctldHost=node1({address})
SlurmUser=root
SlurmdUser=root
# cred_expire is also how long a requeued job waits; it stays at 120 s for values below 5
AuthInfo=socket=/run/munge/sock,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
# a job gets the nodes with the most free CPUs, so that the separate jobs of a run are on different ones
SelectTypeParameters=CR_CPU_Memory,CR_LLN
DefMemPerCPU=128
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
# with these the loss of a node is noticed after 10 s
SlurmdTimeout=3
MessageTimeout=2
TCPTimeout=1
# seconds from SIGTERM to SIGKILL; 30 by default
KillWait=15
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={names} CPUs=16 RealMemory=64000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime=3
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str:
    """Why a Slurm cannot run here; empty when it can."""
    path = f"{os.environ['PATH']}:{_SYSTEM_PATH}"
    absent = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name, path=path) is None]
    if absent:
        install = f"apt-get install -y --no-install-recommends {_PACKAGES}"
        return f"{', '.join(absent)} not found: install the Debian packages ({install})"
    return nodes_missing()


class SlurmCluster:
    """Slurm on all of `nodes`, ready when it is made. It ends with them."""

    def __init__(
        self, nodes: Nodes, folder: Path, *, gpus: int = 4, login_only: bool = False, limits_memory: bool = False
    ) -> None:
        """`folder` is for this cluster alone. `login_only`: no job runs on the first node.

        `limits_memory`: a control group of the kernel limits the memory of each job.
        """
        self.nodes = nodes
        self._folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] += f":{_SYSTEM_PATH}"
        (folder / "state").mkdir(parents=True)
        devices = [folder / f"gpu{index}" for index in range(gpus)]
        for device in devices:  # Slurm accepts character devices only
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        computing = list(nodes)[1 if login_only else 0 :]
        names = ",".join(node.name for node in computing)
        conf = _CONF.format(address=nodes[1].address, folder=folder, names=names, gpus=gpus)
        groups = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
        if limits_memory:
            conf = conf.replace("task/none", "task/cgroup")
            groups += "CgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n"
        (folder / "slurm.conf").write_text(conf)
        gres = "".join(f"NodeName={names} Name=gpu File={device}\n" for device in devices)
        (folder / "gres.conf").write_text(gres)
        (folder / "cgroup.conf").write_text(groups)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        for node in nodes:
            self._authenticate(node)
        self._start(nodes[1], "slurmctld", "-D")
        self._await(lambda: "UP" in self.command("scontrol", "ping").stdout, "slurmctld")
        for node in computing:
            self._start(node, "slurmd", "-D", "-N", node.name)
        self._await(lambda: self.states() == {node.name: "idle" for node in computing}, "slurmd")

    def power_on(self, node: Node) -> None:
        """Start a node that was powered off, and its daemon."""
        node.power_on()
        self._authenticate(node)
        self._start(node, "slurmd", "-D", "-N", node.name)

    def states(self) -> dict[str, str]:
        """State of each node."""
        lines = self.command("sinfo", "-p", "main", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def queue(self) -> str:
        """The jobs that have not ended."""
        return self.command("squeue", "-h", "-o", "%i %T").stdout

    def command(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node to its end."""
        return self.nodes[1].run(argv, env=self.environment)

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the first node."""
        return self.nodes[1].popen(argv, env=self.environment, **options)

    def _authenticate(self, node: Node) -> None:
        script = (
            "chmod 755 /run; mkdir -p -m 755 /run/munge; mkdir -p /run/slurmd; install -m 600 $0 /run/munge/key; "
            "exec munged --key-file=/run/munge/key --socket=/run/munge/sock --pid-file=/run/munge/pid "
            "--log-file=/run/munge/log --seed-file=/run/munge/seed --num-threads=2"
        )
        node.run(["bash", "-c", script, str(self._folder / "munge.key")], env=self.environment)

    def _start(self, node: Node, *argv: str) -> None:
        with open(self._folder / f"{argv[0]}-{node.name}.out", "ab") as log:
            node.popen(argv, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _await(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: see the logs in {self._folder}")
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", help="number of nodes; without it only the packages are checked")
    parser.add_argument("command", nargs="*", help="runs on node1; all nodes end with it")
    args = parser.parse_args()
    if problem := missing():
        sys.stderr.write(f"tests with Slurm cannot run here: {problem}\n")
        sys.exit(2)
    if args.count is None:
        return
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Nodes(args.count) as nodes:
        code = SlurmCluster(nodes, Path(folder, "slurm")).popen(args.command).wait()
    sys.exit(code)


if __name__ == "__main__":
    main()
