import pytest

from areal.api.config import RecoverConfig
from areal.launcher.restart_rules import Death, RestartCounts, backoff_s, decide

ALWAYS = RecoverConfig(mode="auto", freq_steps=1)


def death(exit_code, *, was_ready=True, name="trainer-0"):
    return Death(name=name, exit_code=exit_code, was_ready=was_ready)


def decision(*deaths, role="trainer", num_restarts=0, recover=ALWAYS, disk_problem="", others_serve=False):
    return decide(
        role, deaths, num_restarts=num_restarts, recover=recover, disk_problem=disk_problem, others_serve=others_serve
    )


@pytest.mark.parametrize("role", ["server", "controller", "trainer"])
@pytest.mark.parametrize(
    ("exit_code", "was_ready", "ends_run"),
    [
        (-9, True, False),
        (-9, False, False),  # a kill before the ready sign is chance too
        (-11, False, False),
        (75, True, False),
        (75, False, False),
        (1, True, False),
        (1, False, True),  # it never worked: it will not work the next time
        (2, True, True),
        (2, False, True),
        (7, True, False),
        (7, False, True),
        (0, True, False),  # an end that was not requested
    ],
)
def test_a_transient_death_leads_to_a_restart(role, exit_code, was_ready, ends_run):
    result = decision(death(exit_code, was_ready=was_ready), role=role)
    assert result.ends_run == ends_run
    assert result.reason == ""


@pytest.mark.parametrize("mode", ["disabled", "auto", "fault", "resume"])
@pytest.mark.parametrize("role", ["server", "controller", "trainer"])
def test_only_trainers_need_a_recovery_mode(role, mode):
    result = decision(death(-9), role=role, recover=RecoverConfig(mode=mode, freq_steps=1))
    assert result.ends_run == (role == "trainer" and mode == "disabled")
    assert ("recover.mode=disabled" in result.reason) == result.ends_run


def test_restarts_without_progress_are_limited():
    assert not decision(death(-9), num_restarts=2).ends_run
    result = decision(death(-9), num_restarts=3)
    assert result.ends_run
    assert "3 restarts (recover.retries=3)" in result.reason
    assert decision(death(-9), recover=RecoverConfig(mode="auto", freq_steps=1, retries=0)).ends_run


def test_a_full_disk_prevents_restarts():
    result = decision(death(-9), disk_problem="the disk is full")
    assert (result.ends_run, result.reason) == (True, "the disk is full")


def test_the_rank_with_the_error_is_the_cause():
    lost, wrong = death(1, name="trainer-0"), death(2, name="trainer-1")
    assert decision(lost, wrong).cause == wrong
    assert decision(lost, wrong).ends_run
    killed = death(-9, name="trainer-0")
    assert decision(killed, wrong).cause == killed, "whatever others say after a kill is its consequence"
    assert not decision(killed, wrong).ends_run


def test_a_new_train_step_resets_all_restart_counts():
    counts = RestartCounts()
    counts.add("server-0")
    counts.add("server-0")
    counts.add("trainers")
    counts.saw_step(4)  # where a recovered run starts: nothing was gained
    assert (counts.of("server-0"), counts.of("trainers"), counts.of("controller")) == (2, 1, 0)
    counts.saw_step(4)
    counts.saw_step(3)  # rolled back
    assert counts.of("server-0") == 2
    counts.saw_step(5)
    assert (counts.of("server-0"), counts.of("trainers")) == (0, 0)
    counts.add("trainers")
    counts.saw_step(5)
    assert counts.of("trainers") == 1


def test_backoff_doubles_up_to_ten_seconds():
    assert [backoff_s(count) for count in (0, 1, 2, 4, 5, 50)] == [0.5, 1.0, 2.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize(("role", "others_serve", "gives_up"), [
    ("server", True, True), ("server", False, False), ("trainer", True, False), ("controller", True, False),
])  # fmt: skip
def test_a_server_that_cannot_restart_is_removed_while_others_serve(role, others_serve, gives_up):
    result = decision(death(-9), role=role, num_restarts=3, others_serve=others_serve)
    assert (result.gives_up, result.ends_run) == (gives_up, not gives_up)
