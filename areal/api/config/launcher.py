"""Owns the options of machines and processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal.api.config.fields import Problems, choice, number


@dataclass(frozen=True, kw_only=True)
class NameResolveConfig:
    """How processes find each other."""

    type: str = choice("nfs", "nfs")
    """nfs = files below the run folder."""
    nfs_record_root: str = ""
    """Folder of the files; empty = inside the run folder."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpecConfig:
    """The machines."""

    name_resolve: NameResolveConfig = field(default_factory=NameResolveConfig)
    """How processes find each other."""
    fileroot: str = "/tmp/areal/"
    """Shared root folder; a run lives in fileroot/experiment_name/trial_name."""
    n_nodes: int = number(1, low=1)
    """Machines; the local launcher uses one."""
    n_gpus_per_node: int = number(8, low=0)
    """GPUs of a machine; on a machine without GPUs processes run on the CPU and this is not used."""

    def problems(self) -> Problems:
        if not self.fileroot or self.fileroot.startswith("~"):
            yield "fileroot", f"{self.fileroot!r} is not expanded: write the folder out, or ${{oc.env:HOME}}/areal"


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """How processes are started and watched."""

    inference_server_cpus_per_gpu: int = number(4, low=1)
    """CPU threads of a server at most; on a CPU machine the cores are shared out between the processes."""
    trainer_cpus_per_gpu: int = number(4, low=1)
    """CPU threads of a trainer rank at most; on a CPU machine the cores are shared out between the processes."""
    inference_server_env_vars: str = ""
    """More environment for servers: K=V pairs joined by commas (a comma inside a value is written \\,)."""
    trainer_env_vars: str = ""
    """More environment for trainer ranks, same syntax."""
    ready_timeout_s: float = number(300.0, above=0)
    """Seconds a process may take from its start to its ready sign."""
    stop_grace_s: float = number(10.0, low=0)
    """Seconds between the polite and the hard end of a process."""
    status_interval_s: float = number(1.0, above=0)
    """Seconds between two refreshes of the status line."""
    hang_s: float = number(120.0, above=0)
    """Seconds without a sign of life after which a process counts as hung, is killed and started again."""
    stall_s: float = number(300.0, above=0)
    """Seconds without progress of the run after which the launcher says who waits for what and dumps all stacks."""
