"""The command `python -m areal.launcher.ray`: runs a configuration on the nodes of a Ray cluster."""

import sys
from collections.abc import Sequence

from areal.launcher.local import launch, read_command_line
from areal.launcher.ray_cluster import RayCluster
from areal.system.process import run_main

USAGE = """usage: python -m areal.launcher.ray [SCRIPT.py] --config FILE.yaml [key.sub=value ...] [--dry-run]

Runs a configuration on cluster.n_nodes nodes of the Ray cluster at RAY_ADDRESS (default: that of this machine). Start
it on a node of the cluster, or with `ray job submit`. The working directory, cluster.fileroot and the Python
environment must be at the same path on all nodes. Each process runs in an actor of one placement group.
Exit status: 0 the run completed, 1 it failed, 2 it could not start as configured, 130 it was interrupted.

"""


def run_command(words: Sequence[str]) -> int:
    """Run the words of a command line; returns the exit status."""
    request = read_command_line(words, usage=USAGE, on_one_machine=False)
    return launch(request, RayCluster(request.config.cluster))


if __name__ == "__main__":
    run_main(lambda: sys.exit(run_command(sys.argv[1:])))
