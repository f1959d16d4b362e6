"""What each state and reason of a Slurm job means."""

import pytest

from areal.launcher.slurm_job import JobFacts, facts_of, meaning_of

ENDED = ("BOOT_FAIL", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
         "RECONFIG_FAIL", "REVOKED", "TIMEOUT")  # fmt: skip
PENDING = ("CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")


@pytest.mark.parametrize("state", ENDED)
def test_every_bad_end_is_a_failure_with_a_cause(state) -> None:
    meaning = meaning_of(JobFacts(state=state, exit_code=1))
    assert (meaning.phase, meaning.outcome) == ("ended", "failed")
    assert meaning.cause


@pytest.mark.parametrize("state", ENDED)
@pytest.mark.parametrize("requeue", [True, False])
def test_only_lost_nodes_and_preemption_may_be_followed_by_a_requeue(state, requeue) -> None:
    expected = requeue and state in ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED")
    assert meaning_of(JobFacts(state=state, requeue=requeue)).requeues is expected


@pytest.mark.parametrize("state", PENDING)
def test_waiting_states(state) -> None:
    meaning = meaning_of(JobFacts(state=state, reason="Resources"))
    assert (meaning.phase, meaning.outcome, meaning.never_starts) == ("pending", "", False)


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "A_NEW_ONE", ""])
def test_states_in_which_the_job_is_followed_on(state) -> None:
    assert meaning_of(JobFacts(state=state)).phase == "running"


@pytest.mark.parametrize("state", ["COMPLETING", "STAGE_OUT"])
def test_completing_is_not_the_end(state) -> None:
    assert meaning_of(JobFacts(state=state)).phase == "ending"


def test_completed_and_cancelled_as_sacct_writes_them() -> None:
    assert meaning_of(JobFacts(state="COMPLETED")).outcome == "completed"
    for state in ("CANCELLED", "CANCELLED+", "CANCELLED by 1000"):
        assert meaning_of(JobFacts(state=state)).outcome == "cancelled"
    assert "1000" in meaning_of(JobFacts(state="CANCELLED by 1000")).cause


@pytest.mark.parametrize(
    "reason",
    ["BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit",
     "QOSMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit", "DependencyNeverSatisfied"],
)  # fmt: skip
def test_reasons_that_never_end(reason) -> None:
    meaning = meaning_of(JobFacts(state="PENDING", reason=reason))
    assert meaning.never_starts
    assert reason in meaning.cause


@pytest.mark.parametrize("reason", ["None", "", "Resources", "Priority", "BeginTime", "QOSGrpCpuLimit", "JobHeldUser"])
def test_reasons_that_end_or_are_for_an_administrator(reason) -> None:
    assert not meaning_of(JobFacts(state="PENDING", reason=reason)).never_starts


def test_a_killed_script_is_not_a_launch_failure() -> None:
    meaning = meaning_of(JobFacts(state="FAILED", reason="JobLaunchFailure", signal=9))
    assert "9" in meaning.cause
    assert "JobLaunchFailure" not in meaning.cause


def test_facts_of_a_line_of_scontrol() -> None:
    line = (
        "JobId=1 JobName=a Reason=b JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 "
        "BatchFlag=1 ExitCode=3:9 PreemptTime=None ReqNodeList=(null) NodeList=node[1-2] BatchHost=node1\n"
    )
    assert facts_of(line) == JobFacts(
        state="RUNNING", reason="None", restarts=2, exit_code=3, signal=9, requeue=True, nodes="node[1-2]"
    )
    assert facts_of(line.replace("PreemptTime=None", "PreemptTime=2026-01-01T00:00:00")).is_preempted
