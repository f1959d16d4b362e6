"""Options of machines and processes."""

import re
from dataclasses import dataclass, field

from areal.api.config.redaction import has_secret
from areal.api.config.schema import Condition, Problems, choice, choice_of, given, number, option, satisfies, when


def _with(*launchers: str) -> Condition:
    """The launcher is one of these, or is chosen on the command line."""
    text = f"{when('', *launchers).text}, also by --launcher"
    return satisfies("/launcher.type", lambda chosen: chosen in ("auto", *launchers), text)


_SLURM, _RESERVES, _NODES = _with("slurm"), _with("slurm", "ray"), _with("slurm", "ray", "ssh")
_ELASTIC = given("max")
_ETCD = when("type", "etcd", "etcd3")
_ADDRESS = re.compile(r"(https?://)?([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}")


@dataclass(frozen=True, kw_only=True)
class NameResolveConfig:
    """How processes find each other."""

    type: str = choice("nfs", "nfs", "etcd", "etcd3", "ray")
    """Discovery backend; nfs (or ray, a value of AReaL) = files in a shared folder, etcd (or etcd3) = an etcd."""
    nfs_record_root: str = option("", relevant=when("type", "nfs", "ray"))
    """Folder of the discovery files; empty = inside the run folder."""
    etcd3_addr: str = option("localhost:2379", relevant=_ETCD)
    """HOST:PORT of each etcd member, separated by commas; https://HOST:PORT for TLS."""
    etcd_lease_s: int = number(30, low=5, relevant=_ETCD)
    """Seconds after which the names of a process that was lost expire; they are renewed ten times in this time."""
    etcd_timeout_s: float = number(60.0, above=0, relevant=_ETCD)
    """Maximum seconds without an answer of any etcd member until a process that needs one fails."""

    def problems(self) -> Problems:
        for address in self.etcd3_addr.split(","):
            if not _ADDRESS.fullmatch(address.strip()):
                yield "etcd3_addr", f"{address!r} is not HOST:PORT (separate several with commas)"


@dataclass(frozen=True, kw_only=True)
class ClusterSpecConfig:
    """The machines."""

    name_resolve: NameResolveConfig = field(default_factory=NameResolveConfig)
    """How processes find each other."""
    fileroot: str = "/tmp/areal/"
    """Shared root folder; the run folder is fileroot/experiment_name/trial_name."""
    n_nodes: int = number(1, low=1, also="verl: trainer.nnodes")
    """Number of machines; the local launcher uses one."""
    n_gpus_per_node: int = number(8, low=0, also="verl: trainer.n_gpus_per_node")
    """GPUs per machine; not used on a machine without GPUs, where processes run on the CPU."""

    node_connect_s: float = number(30.0, above=0)
    """Maximum seconds until the agent of a node answers; not used by the local launcher."""
    node_silence_s: float = number(10.0, above=0)
    """Seconds without contact after which a node ends its processes; it counts as lost after 1.5 times as many."""

    def problems(self) -> Problems:
        if not self.fileroot or self.fileroot.startswith("~"):
            yield "fileroot", f"{self.fileroot!r} is not expanded: write the full path, or ${{oc.env:HOME}}/areal"


_TIME_LIMIT = re.compile(r"\d+|(\d+-)?\d+:\d{1,2}(:\d{1,2})?|\d+-\d+")
_HAS_IMAGE = (given("trainer_image") | given("inference_server_image")) & _NODES


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """The job of a run with the Slurm launcher. ssh and Ray read the last five options only."""

    partition: str = option("", relevant=_SLURM)
    """Partition; empty = the default one."""
    account: str = option("", relevant=_SLURM)
    """Account; empty = the default one of the user."""
    qos: str = option("", relevant=_SLURM)
    """Quality of service; empty = the default one."""
    reservation: str = option("", relevant=_SLURM)
    """Reservation; empty = none."""
    time_limit: str = option("", relevant=_SLURM)
    """Time limit in Slurm's form, for example 30 (minutes), 12:00:00 or 2-00:00:00; empty = that of the partition."""
    signal_s: int = number(120, low=30, high=65535, relevant=_SLURM)
    """Seconds before the time limit at which the run saves and requeues itself; Slurm may be up to 60 s early."""
    separate_jobs: bool = option(False, relevant=_SLURM)
    """Submit one job for the controller, one for each server and one for all trainers, in place of one for all."""
    sbatch_additional_args: str = option("", relevant=_SLURM)
    """More options of sbatch, separated by spaces, for example --constraint=a100."""
    srun_additional_args: str = option("", relevant=_SLURM)
    """More options of the srun that starts the agent of a node; $NAME is replaced by the environment variable."""
    additional_bash_cmds: list[str] | None = option(None, relevant=_NODES)
    """Shell commands that run on each node before the agent, in the container if there is one; null = none."""
    container_type: str = choice("apptainer", "apptainer", "pyxis", "none", relevant=_HAS_IMAGE)
    """How containers are started; pyxis = srun --container-image, with Slurm only."""
    mount: str = option("", relevant=_HAS_IMAGE)
    """Folders mounted into the container: source:target pairs separated by commas."""
    trainer_image: str | None = option(None, relevant=_NODES)
    """Container image in which the agent of a node and its processes start; null = inference_server_image, or none."""
    inference_server_image: str | None = option(None, relevant=_NODES)
    """Image for servers, if it differs: with Ray, or with Slurm and separate_jobs. null = trainer_image."""

    def problems(self) -> Problems:
        if self.time_limit and not _TIME_LIMIT.fullmatch(self.time_limit):
            yield (
                "time_limit",
                f"{self.time_limit!r} is not minutes, hours:minutes:seconds or days-hours:minutes:seconds",
            )
        commands = {
            "sbatch_additional_args": [self.sbatch_additional_args],
            "srun_additional_args": [self.srun_additional_args.replace("$", "")],  # the launcher replaces variables
            "additional_bash_cmds": self.additional_bash_cmds or [],
        }
        for name, texts in commands.items():
            if any(map(has_secret, texts)):
                yield (
                    name,
                    "contains a secret, which the job script and the list of processes would show: export it before "
                    "the launch, or read it from a file",
                )


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """When the launcher adds and removes inference servers during a run."""

    max: int | None = number(None, low=1)
    """Maximum number of servers; null = the number changes by commands only."""
    min: int = number(1, low=1, relevant=_ELASTIC)
    """Minimum number of servers."""
    add_above: float = number(64.0, above=0, relevant=_ELASTIC)
    """Requests per server above which a server is added; at least twice remove_below."""
    busy_s: float = number(30.0, low=0, relevant=_ELASTIC)
    """Seconds for which the requests per server must exceed add_above."""
    remove_below: float = number(8.0, low=0, relevant=_ELASTIC)
    """Requests per server below which a server is removed."""
    idle_s: float = number(120.0, low=0, relevant=_ELASTIC)
    """Seconds for which the requests per server must be below remove_below."""

    def problems(self) -> Problems:
        if self.max is not None and self.max < self.min:
            yield "max", f"{self.max} is below elastic.min={self.min}"
        if self.add_above < 2 * self.remove_below:
            fix = "with less than twice elastic.remove_below an added server would be removed again"
            yield "add_above", f"{self.add_above:g} is below 2 x {self.remove_below:g}: {fix}"


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """How processes are started and monitored."""

    type: str = choice_of("launchers", "auto", "auto")
    """Launcher of `areal run`; auto = local, or ssh if the command line has --hosts."""
    inference_server_cpus_per_gpu: int = number(4, low=1)
    """Maximum CPU threads for each GPU of a server, which Slurm and Ray reserve; without GPUs all share the cores."""
    trainer_cpus_per_gpu: int = number(4, low=1)
    """Maximum CPU threads of a trainer rank, which Slurm and Ray reserve; without GPUs all share the cores."""
    inference_server_mem_per_gpu: int = number(32768, low=1, relevant=_RESERVES)
    """Memory in MiB for each GPU of a server (Slurm: also for a server on the CPU): Slurm and Ray reserve it."""
    trainer_mem_per_gpu: int = number(32768, low=1, relevant=_RESERVES)
    """Memory in MiB for each trainer rank: Slurm and Ray reserve it."""
    inference_server_env_vars: str = ""
    """Additional environment variables of servers: K=V pairs separated by commas (\\, is a comma inside a value)."""
    trainer_env_vars: str = ""
    """Additional environment variables of trainer ranks, in the same syntax."""
    nodelist: str = option("", relevant=_NODES)
    """Nodes to use, in the form node[1-3],node7: of --hosts, Ray (also addresses) or Slurm; empty = any."""
    exclude: str = option("", relevant=_NODES)
    """Nodes not to use, in the form of nodelist."""
    ready_timeout_s: float = number(300.0, above=0)
    """Maximum seconds from the start of a process until it reports ready; the default grows with the checkpoint."""
    stop_grace_s: float = number(10.0, low=0)
    """Seconds between the termination signal and the kill signal of a process."""
    save_grace_s: float = number(300.0, low=0)
    """Seconds after the first Ctrl-C within which the trainers save a recovery checkpoint; 0 = they do not."""
    status_interval_s: float = number(1.0, above=0)
    """Seconds between two updates of the status line."""
    hang_s: float = number(120.0, above=0)
    """Seconds without a heartbeat after which a process is killed and restarted."""
    stall_s: float = number(300.0, above=0)
    """Seconds without progress of the run after which the launcher logs what each process waits for and all stacks."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """The job of the Slurm launcher."""
