"""Every rule of the audit, each broken in a ledger forged for it: found, named with its ids, and nothing else is."""

from dataclasses import dataclass

import pytest

from areal.ledger.audit import audit

FORGERIES = []


@dataclass(frozen=True)
class Forgery:
    forge: object
    rules: set
    episodes: set
    steps: set


def breaks(*rules, episodes=(), steps=()):
    """Marks a function that continues a clean ledger of two trained steps so that these rules are broken."""

    def add(function):
        FORGERIES.append(pytest.param(Forgery(function, set(rules), set(episodes), set(steps)), id=function.__name__))
        return function

    return add


@breaks("in two batches", episodes=[3], steps=[1, 2])
def in_two_batches(forge):
    forge.batched(2, 3, 4)


@breaks("twice in a batch", episodes=[4], steps=[2])
def in_one_batch_twice(forge):
    forge.batched(2, 4, 4)


@breaks("consumed twice", episodes=[2, 3], steps=[1])
def consumed_twice_without_going_back(forge):
    forge.consumed(1)


@breaks("consumed twice", episodes=[2, 3], steps=[1])
def trained_again_without_going_back(forge):
    forge.consumed(1, again=True)


@breaks("trained again", steps=[2])
def trained_again_but_never_consumed(forge):
    forge.accepted(5)
    forge.batched(2, 4, 5)
    forge.published(3)
    forge.consumed(2, again=True)


@breaks("never batched", steps=[2])
def consumed_but_never_batched(forge):
    forge.trained(2)


@breaks("consumption order", "publication", steps=[2, 3])
def consumed_out_of_turn(forge):
    forge.accepted(5)
    forge.batched(2, 4, 5)
    forge.published(1)
    forge.attached(1, 1)
    forge.trained(2)


@breaks("never consumed", steps=[2])
def a_batch_passed_over(forge):
    forge.accepted(5)
    forge.batched(2, 4, 5)
    forge.published(3)
    forge.attached(3, 3)


@breaks("accepted twice", episodes=[4])
def accepted_twice(forge):
    forge.accepted(4)


@breaks("accepted twice", episodes=[0])
def accepted_again_after_it_was_trained_on(forge):
    forge.accepted(0)


@breaks("never admitted", episodes=[77])
def accepted_but_never_admitted(forge):
    forge.accepted(77)


@breaks("verdict", episodes=[4])
def failed_after_it_was_accepted(forge):
    forge.failed(4)


@breaks("verdict", episodes=[4])
def rejected_after_it_was_accepted_though_not_stale(forge):
    forge.rejected(4)


@breaks("verdict", episodes=[5])
def ended_under_a_controller_that_had_not_started_it(forge):
    forge.started()
    forge.accepted(5)


@breaks("attempt", episodes=[5])
def an_attempt_number_skipped(forge):
    forge.started()
    forge.admitted(5, attempt=2, version=2)


@breaks("attempt", episodes=[5])
def started_again_while_it_runs(forge):
    forge.admitted(5, attempt=1, version=2)


@breaks("attempt", episodes=[4])
def started_again_after_it_was_accepted(forge):
    forge.started()
    forge.admitted(4, attempt=1, version=2)


@breaks("attempt", episodes=[6])
def started_again_but_never_before(forge):
    forge.started()
    forge.admitted(6, attempt=1, version=2)


@breaks("interrupted", episodes=[5])
def an_interrupted_episode_passed_over(forge):
    forge.started()
    forge.admitted(6, 7, version=2)


@breaks("row used twice", episodes=[3])
def a_row_used_twice(forge):
    forge.admitted(3, version=2)


@breaks("row skipped", episodes=[6, 7])
def rows_skipped(forge):
    forge.admitted(8, version=2)


@breaks("identity")
def other_data_settings(forge):
    forge.started(seed=2)


@breaks("identity")
def data_settings_that_make_no_stream(forge):
    for event in forge.events:
        if event["event"] == "started":
            event["rows_per_epoch"] = 5


@breaks("version of step", steps=[2])
def a_batch_made_for_another_version(forge):
    forge.accepted(5)
    forge.batched(2, 4, 5, version=1)


@breaks("version of step", steps=[2])
def a_step_that_led_to_another_version(forge):
    forge.accepted(5)
    forge.batched(2, 4, 5)
    forge.published(3)
    forge.consumed(2, version=4)


def batch_3_while_the_servers_have_version_2(forge):
    forge.accepted(5)
    forge.batched(2, 4, 5)
    forge.consumed(2)
    forge.admitted(6, 7, version=2)
    forge.accepted(6, 7, version=2)
    forge.batched(3, 6, 7)


@breaks("version of step", steps=[3])
def consumed_before_the_version_that_trained_was_published(forge):
    batch_3_while_the_servers_have_version_2(forge)
    forge.consumed(3)


@breaks("version of step", steps=[2])
def a_trainer_of_another_version(forge):
    forge.attached(2, 5)


@breaks("newer token", episodes=[5], steps=[2])
def a_token_newer_than_its_batch(forge):
    forge.accepted(5, version=3)
    forge.batched(2, 4, 5)


@breaks("payload", "newer token", episodes=[5], steps=[2])
def a_token_newer_than_its_batch_which_the_event_hides(forge):
    forge.accepted(5, version=3, min_version=0, max_version=0)
    forge.batched(2, 4, 5)


@breaks("old token", episodes=[6])
def a_token_older_than_its_attempt(forge):
    forge.admitted(6, version=2)
    forge.accepted(6, version=1)


@breaks("batch size", steps=[2])
def a_batch_too_small(forge):
    forge.batched(2, 4)


@breaks("not accepted", episodes=[5], steps=[2])
def a_batch_with_a_running_episode(forge):
    forge.batched(2, 4, 5)


@breaks("not accepted", episodes=[99], steps=[2])
def a_batch_with_an_episode_that_never_was(forge):
    forge.batched(2, 4, 99)


@breaks("batch order", steps=[3])
def a_batch_made_before_the_step_before_it_was_consumed(forge):
    forge.admitted(6, 7, version=2)
    forge.accepted(5)
    forge.accepted(6, 7, version=2)
    forge.batched(2, 4, 5)
    forge.published(3)
    forge.batched(3, 6, 7)
    forge.consumed(2)


@breaks("batch order", "version of step", steps=[3])
def a_batch_left_out(forge):
    forge.accepted(5)
    forge.batched(3, 4, 5, version=2)


@breaks("batch order", "version of step", steps=[1])
def a_batch_made_twice(forge):
    forge.accepted(5)
    forge.batched(1, 4, 5)


@breaks("attach", steps=[3])
def a_trainer_beyond_the_batches(forge):
    forge.published(3)
    forge.attached(3, 3)


@breaks("publication", steps=[2])
def publications_that_go_back_without_an_attach(forge):
    forge.published(1)
    forge.published(2)
    forge.admitted(6, version=2)


@breaks("publication", steps=[4])
def a_publication_that_leaps_and_is_relied_on(forge):
    forge.published(4)
    forge.admitted(6, version=4)


@breaks("admission", episodes=[6])
def admitted_at_a_version_that_the_trainer_does_not_hold(forge):
    forge.admitted(6, version=1)


@breaks("admission", episodes=[6])
def admitted_under_a_policy_that_went_back(forge):
    forge.published(1)
    forge.attached(1, 1)
    forge.admitted(6, version=1)


@breaks("checkpoint", steps=[3])
def a_checkpoint_of_steps_not_trained(forge):
    forge.committed(3)


@breaks("beginning")
def events_before_any_controller(forge):
    forge.events.insert(0, {"event": "published", "version": 0, "kind": "disk", "path": "v", "at": 1.0})


@breaks("unknown event")
def an_unknown_event(forge):
    forge.events.append({"event": "vanished"})


@breaks("form")
def an_event_without_its_fields(forge):
    forge.events.append({"event": "failed", "id": 5})


@breaks("payload", episodes=[5])
def a_payload_of_another_episode(forge):
    forge.accepted(5, payload=next(event for event in forge.events if event["event"] == "accepted")["payload"])


@breaks("payload", episodes=[5])
def a_payload_beyond_its_segment(forge):
    forge.accepted(5, payload=(1, 10**12, 10**15))


@breaks("payload", episodes=[3])
def a_payload_damaged(forge):
    where = next(event for event in forge.events if event["event"] == "accepted" and event["id"] == 3)["payload"]
    forge.payloads = forge.payloads[: where[1] + 30] + b"?" + forge.payloads[where[1] + 31 :]


@breaks("payload", episodes=[4, 5])
def a_payload_segment_missing(forge):
    for event in forge.events:
        if event["event"] == "accepted" and event["id"] == 4:
            event["payload"] = (9, 0, 60)
    forge.accepted(5, payload=(9, 60, 60))


@breaks("payload", episodes=[5])
def a_reward_that_is_not_that_of_the_payload(forge):
    forge.accepted(5, reward=1.0)


@breaks("payload", episodes=[5])
def a_number_of_tokens_that_is_not_that_of_the_payload(forge):
    forge.accepted(5, tokens=3)


def test_a_step_may_begin_while_the_servers_install_the_version_that_trains_it(forge):
    forge.two_steps()
    batch_3_while_the_servers_have_version_2(forge)
    forge.published(3)
    forge.trained(3)
    forge.write()
    report = audit(forge.folder)
    assert report.is_clean, report.lines()


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_broken_rule_is_found_with_its_ids_and_no_other_is(forge, forgery):
    forge.two_steps()
    forgery.forge(forge)
    forge.write()
    report = audit(forge.folder)
    assert {violation.rule for violation in report.violations} == forgery.rules, report.lines()
    assert {number for violation in report.violations for number in violation.episodes} == forgery.episodes
    assert {number for violation in report.violations for number in violation.steps} == forgery.steps
