"""The line that names why policy and servers differ."""

from areal.observe.causes import causes_text


def row(step, **sizes):
    values = {f"batch/log_ratio_abs/{name}": value for name, value in sizes.items()}
    return {"step": step, **values}


def test_the_newest_step_that_was_measured_names_its_largest_cause():
    rows = [row(1, whole=0.3, drift=0.3), row(11, whole=0.021, numerics=0.003, staleness=0.019), {"step": 12}]
    assert causes_text(rows) == (
        "log-ratio of trained tokens at step 11: 0.021 nats a token, most of it staleness (0.019): "
        "set rollout.target_staleness, or lower rollout.max_head_offpolicyness"
    )


def test_equal_policies_have_no_cause():
    rows = [row(3, whole=2e-5, numerics=2e-5)]
    assert causes_text(rows) == "log-ratio of trained tokens at step 3: 2e-05 nats a token"


def test_a_step_whose_servers_gave_no_scores_is_passed_over():
    assert causes_text([{"step": 1}, row(11, whole=None)]) == ""
