"""NaN at each stage: loss, gradient, weights, broadcast, logits; see also tests/attack/test_native_states.py."""

from tests.engine.conftest import cases, models
from tests.engine.test_fsdp_engine import (
    test_a_loss_that_is_not_finite_is_found_even_if_no_gradient_shows_it,
    test_non_finite_values_end_the_training,
)
from tests.inference.test_sampler import test_accepted_parameters_give_finite_logprobs
from tests.inference.test_weight_update import test_a_broadcast_that_is_not_finite_restores_the_weights

__all__ = [
    "cases",
    "models",
    "test_a_broadcast_that_is_not_finite_restores_the_weights",
    "test_a_loss_that_is_not_finite_is_found_even_if_no_gradient_shows_it",
    "test_accepted_parameters_give_finite_logprobs",
    "test_non_finite_values_end_the_training",
]
