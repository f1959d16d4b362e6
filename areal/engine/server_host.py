"""Owns the process that hosts one foreign inference server (SGLang, vLLM): its ports, start, readiness, health, end.

    python -m areal.engine.server_host --backend vllm --config RUN/config.yaml -- vllm serve MODEL --port {port} ...

In the server's command {port} stands for a free port of this machine, on which it must serve HTTP; {port_NAME} for a
further one, another for each NAME; {index} for the index of this server in the run; {index+N} for N more.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal.api.config import PPOConfig
from areal.api.config.load import load_experiment
from areal.api.errors import ConfigError
from areal.system.discovery import NameRegistry, registry_of
from areal.system.process import ProcessContext, run_main

_PORT = re.compile(r"\{port(?:_[a-z]+)?\}")
_INDEX = re.compile(r"\{index(?:\+(\d+))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Everything a host is told."""

    backend: str
    command: tuple[str, ...]
    """Of the foreign server, with placeholders."""
    index: int
    process_name: str
    registry: NameRegistry | None
    from_scratch: bool
    """The policy starts from random weights of the trainer's: this server has none until they arrive."""


def parse_options(argv: Sequence[str]) -> HostOptions:
    """Options from flags, the run's config and the launcher's context where there are some."""
    parser = argparse.ArgumentParser(
        prog="python -m areal.engine.server_host",
        description="Hosts one foreign inference server: starts it on free ports, announces it when it is ready, and "
        "ends with it.",
        usage="%(prog)s --backend {sglang,vllm} [--config RUN/config.yaml] -- COMMAND ... {port} ...",
    )
    parser.add_argument("--backend", choices=("sglang", "vllm"), required=True, help="which server the command starts")
    parser.add_argument("--config", help="the run's config.yaml; without it the server belongs to no run")
    parser.add_argument(
        "command",
        nargs="+",
        help="command of the server; {port} in it becomes the port it must serve HTTP on, {port_NAME} a further one, "
        "{index} and {index+N} the index of this server in the run, and N more",
    )
    args = parser.parse_args(argv)
    if not any("{port}" in word for word in args.command):
        raise ConfigError("the server's command must hold {port}, the port that it serves on")
    context = ProcessContext.from_env()
    registry, from_scratch = None, False
    if args.config:
        config = load_experiment(["--config", args.config], allow_unknown_top_level=True)
        if not isinstance(config, PPOConfig):
            raise ConfigError(f"{args.config} is of a kind of training that needs no server")
        from_scratch = config.actor.init_from_scratch
        if context is not None:
            registry = registry_of(config)
    return HostOptions(
        backend=args.backend,
        command=tuple(args.command),
        index=context.index if context else 0,
        process_name=context.name if context else "server-0",
        registry=registry,
        from_scratch=from_scratch,
    )


def port_names(command: Sequence[str]) -> list[str]:
    """The placeholders of ports in a command, each once."""
    return sorted({found for word in command for found in _PORT.findall(word)})


def filled_in(command: Sequence[str], ports: Mapping[str, int], index: int) -> list[str]:
    """The command with ports and indices in place of the placeholders."""
    with_ports = [_PORT.sub(lambda found: str(ports[found[0]]), word) for word in command]
    return [_INDEX.sub(lambda found: str(index + int(found[1] or 0)), word) for word in with_ports]


def main() -> None:
    parse_options(sys.argv[1:])
    raise ConfigError("hosting foreign servers is not there yet")


if __name__ == "__main__":
    run_main(main)
