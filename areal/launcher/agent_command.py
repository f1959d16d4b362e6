"""The command that starts the agent of a node: in its container, after the user's commands. Starts nothing."""

import os
import shlex
import sys

from areal.api.config.launcher import SlurmConfig
from areal.api.errors import ConfigError
from areal.launcher.restart_rules import Role

_AGENT = "areal.launcher.node_agent"
_COMMANDS = "exec 3<&0 4>&1 </dev/null >&2\n{commands}\nexec <&3 >&4 3<&- 4>&-\nexec {agent}"
"""Shell text: the commands neither read the messages for the agent nor write between those that it sends."""


def image_of(slurm: SlurmConfig, role: Role | None) -> str:
    """The container image in which processes of a role run; None = of all roles. Empty = no container."""
    images = [slurm.trainer_image, slurm.inference_server_image]
    image = next((one for one in (images[::-1] if role == "server" else images) if one), "")
    return "" if slurm.container_type == "none" else image


def agent_command(slurm: SlurmConfig, role: Role | None, python: str = sys.executable) -> list[str]:
    """The command of an agent for processes of a role; None = of all roles. pyxis needs options of srun besides it."""
    agent = [python, "-m", _AGENT]
    if slurm.additional_bash_cmds:
        commands = "\n".join(slurm.additional_bash_cmds)
        agent = ["bash", "-c", _COMMANDS.format(commands=commands, agent=shlex.join(agent))]
    image = image_of(slurm, role)
    if image and slurm.container_type == "apptainer":
        agent = ["apptainer", "exec", "--nv", *(["--bind", slurm.mount] if slurm.mount else []), image, *agent]
    return agent


def variables_of_agent() -> list[str]:
    """NAME=value of what an agent on another machine needs to find the code of this one. No secrets: `ps` shows it."""
    return [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []


def check_containers(slurm: SlurmConfig, *, has_srun: bool, has_shared_agents: bool) -> None:
    """ConfigError when a launcher cannot start the containers. Shared agents start all roles."""
    if image_of(slurm, None) and slurm.container_type == "pyxis" and not has_srun:
        message = "launcher.slurm.container_type=pyxis: only Slurm has it; use apptainer, or none for no container"
        raise ConfigError(message, code="config.unsupported")
    if has_shared_agents and image_of(slurm, "server") != image_of(slurm, "trainer"):
        why = "differs from trainer_image: one agent per node starts both, so use one image"
        why += " or launcher.slurm.separate_jobs=true" if has_srun else ""
        raise ConfigError(f"launcher.slurm.inference_server_image {why}", code="config.conflict")
