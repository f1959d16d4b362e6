"""The ssh launcher of `areal run`: runs a configuration on machines reached by ssh."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from areal.api.errors import ConfigError
from areal.launcher.local import launch, read_command_line
from areal.launcher.node_link import agent_command, check_containers, variables_of_agent
from areal.launcher.nodes import Node, NodeCluster
from areal.launcher.placement import is_chosen
from areal.launcher.result import help_if_asked
from areal.system.process import run_main

USAGE = """usage: areal run --hosts [USER@]HOST[:PORT],... [SCRIPT.py] --config FILE.yaml
                 [key.sub=value ...] [--ssh-option OPTION ...] [--python PATH]

Runs a configuration on the named machines; the controller runs on the first.
ssh must log in without a password. The working directory, cluster.fileroot and
the Python environment must be at the same path on all machines.

  --hosts A,B          the machines
  --ssh-option OPTION  passed to ssh -o, such as IdentityFile=KEY; repeatable
  --python PATH        the interpreter there; default: this one
"""
_OPTIONS = ("BatchMode=yes", "ServerAliveInterval=5", "ServerAliveCountMax=2", "ConnectTimeout=10")


def take_option(words: list[str], name: str) -> list[str]:
    """Remove `name VALUE` and `name=VALUE` from a command line. Returns the values."""
    values: list[str] = []
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == name:
            value = next(remaining, None)
            if value is None:
                raise ConfigError(f"{name} needs a value", code="config.bad_override")
            values.append(value)
        elif word.startswith(f"{name}="):
            values.append(word.partition("=")[2])
        else:
            rest.append(word)
    words[:] = rest
    return values


def nodes_of(hosts: str, options: Sequence[str], agent: Sequence[str]) -> list[Node]:
    """The nodes of `--hosts`, in its order, and how ssh starts `agent` there.

    ConfigError when a host is named twice or its form is wrong."""
    nodes: list[Node] = []
    for text in filter(None, (part.strip() for part in hosts.split(","))):
        target, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
        target, port = (target, port) if colon else (text, "")
        if (colon and not port.isdigit()) or target.startswith("-"):
            raise ConfigError(f"--hosts: {text!r} is not [USER@]HOST[:PORT]", code="config.bad_override")
        address = target.rpartition("@")[2].strip("[]")
        if any(node.name == address for node in nodes):
            raise ConfigError(f"--hosts names {address} twice", code="config.bad_override")
        nodes.append(Node(name=address, address=address, command=_command(target, port, options, agent)))
    if not nodes:
        raise ConfigError("--hosts needs at least one host: --hosts node1,node2", code="config.bad_override")
    return nodes


def _command(target: str, port: str, options: Sequence[str], agent: Sequence[str]) -> tuple[str, ...]:
    flags = [word for option in (*options, *_OPTIONS) for word in ("-o", option)]  # ssh uses the first of equal ones
    where = ["-p", port] if port else []
    remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *variables_of_agent(), *agent])}"
    return ("ssh", *flags, *where, target.strip("[]"), remote)


def run_command(argv: Sequence[str]) -> int:
    """Run the words of a command line; returns the exit status."""
    help_if_asked(argv, USAGE)
    words = list(argv)
    hosts = take_option(words, "--hosts")
    options = take_option(words, "--ssh-option")
    python = take_option(words, "--python") or [sys.executable]
    request = read_command_line(words, launcher="ssh")
    launcher = request.config.launcher
    check_containers(launcher.slurm, has_srun=False, has_shared_agents=True)
    named = nodes_of(",".join(hosts), options, agent_command(launcher.slurm, None, python[-1]))
    nodes = [node for node in named if is_chosen([node.name], launcher.nodelist, launcher.exclude)]
    if not nodes:
        message = "launcher.nodelist and launcher.exclude leave no host of --hosts: change one of the three"
        raise ConfigError(message, code="launch.no_node_chosen")
    if request.config.cluster.n_nodes not in (1, len(nodes)):
        message = (
            f"cluster.n_nodes={request.config.cluster.n_nodes}, but {len(nodes)} of --hosts are used: make them equal"
        )
        raise ConfigError(message, code="launch.several_nodes")
    return launch(request, NodeCluster(nodes, request.config.cluster))


if __name__ == "__main__":
    run_main(lambda: sys.exit(run_command(sys.argv[1:])))
