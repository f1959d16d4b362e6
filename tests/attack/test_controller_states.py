"""The fuzz of the controller in every state of a run, with more examples than `make test` gives."""

from tests.rollout.test_trainer_rules import test_a_refused_request_changes_nothing_and_the_run_completes

__all__ = ["test_a_refused_request_changes_nothing_and_the_run_completes"]
