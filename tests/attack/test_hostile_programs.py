"""The hostile programs of tests/reward/test_hostile_programs.py in every sandbox backend that this machine has."""

import pytest

from areal.reward import sandbox
from tests.reward.backends import BACKENDS, use_backend
from tests.reward.test_hostile_programs import (
    test_a_correct_program_passes_them,
    test_a_hostile_program_passes_no_test,
    test_a_program_cannot_read_the_wanted_result,
    test_a_program_cannot_replace_what_the_tests_use,
)

__all__ = [
    "test_a_correct_program_passes_them",
    "test_a_hostile_program_passes_no_test",
    "test_a_program_cannot_read_the_wanted_result",
    "test_a_program_cannot_replace_what_the_tests_use",
]


@pytest.fixture(scope="module", params=BACKENDS, autouse=True)
def backend(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_START_WAIT_S", 100.0)  # on a busy machine a sandbox may start slowly
        with use_backend(request.param, patch):
            yield request.param
