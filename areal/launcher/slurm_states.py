"""What a state of a Slurm job means: whether it has ended, how, why, and whether Slurm runs it again. Pure rules."""

import re
from dataclasses import dataclass
from typing import Literal

Phase = Literal["pending", "running", "ending", "ended"]
Outcome = Literal["", "completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A job as `scontrol show job` or `sacct` reports it."""

    state: str
    reason: str = ""
    restarts: int = 0
    """How often Slurm has put the job back into the queue."""
    exit_code: int = 0
    """Of the batch script."""
    signal: int = 0
    """That ended the batch script; 0 = none."""
    requeue: bool = False
    """Slurm may put the job back into the queue after the loss of a node or a preemption."""
    is_preempted: bool = False
    """A job of higher priority takes its nodes."""
    nodes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    phase: Phase
    outcome: Outcome = ""
    """Empty while the job has not ended."""
    cause: str = ""
    """Why it ended, or why it waits."""
    requeues: bool = False
    """The end may be followed by PENDING: Slurm puts the job back into the queue a moment later."""
    never_starts: bool = False
    """It waits for something that does not happen without a change of the job."""


_ENDING = {"COMPLETING", "STAGE_OUT"}
_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD",
            "POWER_UP_NODE", "UPDATE_DB"}  # fmt: skip
_REQUEUED = {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
"""Ends after which Slurm puts a job with --requeue back into the queue."""
_CAUSES = {
    "BOOT_FAIL": "its nodes could not be started (BOOT_FAIL)",
    "DEADLINE": "its deadline passed (DEADLINE)",
    "LAUNCH_FAILED": "Slurm could not start it on its nodes (LAUNCH_FAILED)",
    "NODE_FAIL": "one of its nodes failed (NODE_FAIL)",
    "OUT_OF_MEMORY": "a node needed more memory than the job requests (OUT_OF_MEMORY): raise "
    "launcher.trainer_mem_per_gpu or launcher.inference_server_mem_per_gpu",
    "PREEMPTED": "a job of higher priority took its nodes (PREEMPTED)",
    "RECONFIG_FAIL": "its nodes could not be configured (RECONFIG_FAIL)",
    "REVOKED": "another cluster of the federation runs it (REVOKED)",
    "TIMEOUT": "it reached its time limit (TIMEOUT): raise launcher.slurm.time_limit, or set recover.mode=auto and a "
    "larger launcher.slurm.signal_s, so that it saves and continues in a new allocation",
}
_HELD = {
    "JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD",
    "ReservationDeleted", "launch_failed_requeued_held", "job_requeued_in_held_state",
}  # fmt: skip
_NEVER = {
    "AccountNotAllowed": "the account may not use the partition: change launcher.slurm.account or .partition",
    "AccountingPolicy": "the limits of the account do not allow it",
    "BadConstraints": "no node has what it requests",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
    "InvalidAccount": "the account does not exist: change launcher.slurm.account",
    "InvalidQOS": "the quality of service does not exist: change launcher.slurm.qos",
    "MaxMemPerLimit": "it requests more memory than the partition allows",
    "PartitionConfig": "it requests more nodes or time than the partition has: change cluster.n_nodes, "
    "launcher.slurm.time_limit or launcher.slurm.partition",
    "PartitionNodeLimit": "it requests more nodes than the partition allows: change cluster.n_nodes or "
    "launcher.slurm.partition",
    "PartitionTimeLimit": "it requests more time than the partition allows: change launcher.slurm.time_limit",
    "QOSNotAllowed": "the quality of service may not be used here: change launcher.slurm.qos",
}
_LIMIT_OF_ONE_JOB = re.compile(r"(Assoc|QOS)\w*PerJob(Limit)?$")


def meaning_of(facts: JobFacts) -> Meaning:
    """What the facts of a job mean. A state that is not known here counts as running, so that it is followed on."""
    state = facts.state.split()[0].rstrip("+").upper() if facts.state.strip() else ""
    if state in _PENDING:
        return _waiting(state, facts.reason)
    if state in _ENDING:
        return Meaning(phase="ending", cause="its processes end")
    if state == "COMPLETED":
        return Meaning(phase="ended", outcome="completed")
    if state == "CANCELLED":
        return Meaning(phase="ended", outcome="cancelled", cause=_cancelled(facts.state))
    if state == "FAILED":
        return Meaning(phase="ended", outcome="failed", cause=_failed(facts))
    if state in _CAUSES:
        is_requeued = facts.requeue and state in _REQUEUED
        return Meaning(phase="ended", outcome="failed", cause=_CAUSES[state], requeues=is_requeued)
    return Meaning(phase="running", cause="" if state in {"RUNNING", "SIGNALING"} else f"it is {state or 'unknown'}")


def _waiting(state: str, reason: str) -> Meaning:
    if state in _HELD or reason in _HELD:
        why = reason if reason in _HELD else state
        return Meaning(phase="pending", cause=f"it is held ({why}); `scontrol release` starts it")
    if reason in _NEVER:
        return Meaning(phase="pending", cause=f"{_NEVER[reason]} ({reason})", never_starts=True)
    if _LIMIT_OF_ONE_JOB.match(reason):
        return Meaning(phase="pending", cause=f"it exceeds a limit of one job ({reason})", never_starts=True)
    if state == "CONFIGURING":
        return Meaning(phase="pending", cause="its nodes start")
    return Meaning(phase="pending", cause="" if reason in ("", "None") else reason.replace("_", " "))


def _cancelled(state: str) -> str:
    _, _, user = state.partition(" by ")
    return f"it was cancelled by user {user.strip()}" if user else "it was cancelled"


def _failed(facts: JobFacts) -> str:
    if facts.signal == 9:  # Slurm reports this as JobLaunchFailure
        return "its batch script was killed by signal 9"
    if facts.signal:
        return f"its batch script was ended by signal {facts.signal}"
    if facts.exit_code == 130:
        return "its run was interrupted"
    if facts.exit_code == 0 and facts.reason not in ("", "None"):
        return f"Slurm could not run it ({facts.reason})"
    return f"its batch script exited with {facts.exit_code}"
