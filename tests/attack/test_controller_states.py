"""The fuzz of the controller in every state of a run, with more examples than `make test` gives, and known attacks."""

from tests.rollout.test_trainer_rules import (
    test_a_refused_request_changes_nothing_and_the_run_completes,
    test_a_trainer_of_an_earlier_start_is_refused,
    test_a_wrong_request_is_refused,
)

__all__ = [
    "test_a_refused_request_changes_nothing_and_the_run_completes",
    "test_a_trainer_of_an_earlier_start_is_refused",
    "test_a_wrong_request_is_refused",
]
